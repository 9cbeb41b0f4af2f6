"""The faults: who suffers what, in which phase, and what may come of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

UNCHANGED, COMMITTED, DIRTY = "unchanged", "committed", "dirty"


@dataclass(frozen=True)
class Fault:
    """One row. ``order`` goes to the injector, ``may`` lists what the engine may be left with before it is mended.

    ``delay_s`` sends ``signal`` to ``victim`` so long after the push has begun, instead of an order.
    """

    what: str
    phase: str
    may: tuple[str, ...]
    order: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    spoil: str = ""
    special: str = ""
    victim: str = ""
    signal: str = ""
    delay_s: float = 0.0


def _order(point: str, action: str, **where: Any) -> dict[str, Any]:
    return {"point": point, "action": action, "where": where}


STREAM = {"staging": "none"}
KEEP = {"keep_previous": True}
BOTH = (UNCHANGED, COMMITTED)


def catalogue(tp: int, last_tensor: int) -> list[Fault]:
    """Every fault at every place, for an engine with ``tp`` ranks; its model is loaded in ``last_tensor`` + 1 steps."""
    worst = tp - 1
    faults: list[Fault] = []
    # --- processes that die or freeze
    for action, verb in (("kill", "SIGKILL"), ("stop", "SIGSTOP")):
        faults += [
            Fault(f"{verb} trainer", "prepare", (UNCHANGED,), _order("trainer was answered", action, route="update_weights_via_ipc_zmq")),
            Fault(f"{verb} trainer", "transfer", (UNCHANGED,), _order("trainer packs", action, number=1)),
            Fault(f"{verb} trainer", "commit", BOTH, _order("trainer asks", action, route="commit")),
            Fault(f"{verb} trainer", "commit, after it", (COMMITTED,), _order("trainer was answered", action, route="commit")),
            Fault(f"{verb} trainer", "stream", (DIRTY,), _order("trainer packs", action, number=1), STREAM),
            Fault(f"{verb} front end", "prepare", (UNCHANGED,), _order("front end prepares", action)),
            Fault(f"{verb} front end", "commit", (UNCHANGED, COMMITTED), _order("front end commits", action)),
            Fault(f"{verb} front end", "commit, after it", (COMMITTED,), _order("front end committed", action)),
            Fault(f"{verb} worker", "transfer", (UNCHANGED,), _order("rank takes", action, rank=worst, bucket=0)),
            Fault(f"{verb} worker", "commit, before loading", (UNCHANGED, COMMITTED), _order("rank stops", action, rank=worst)),
            Fault(f"{verb} worker", "commit, loading", (COMMITTED, DIRTY), _order("rank loads", action, rank=worst, tensor=last_tensor // 2)),
        ]  # fmt: skip
    # --- exceptions in a worker
    before = (UNCHANGED,) if tp == 1 else (DIRTY,)
    faults += [
        Fault("exception in worker", "prepare", (UNCHANGED,), _order("rank prepares", "raise", rank=worst)),
        Fault("exception in worker", "meet", (UNCHANGED,), _order("rank meets", "raise", rank=worst)),
        Fault("exception in worker", "transfer", (UNCHANGED,), _order("rank takes", "raise", rank=worst, bucket=1)),
        Fault("exception in worker", "commit, before first write", before, _order("rank stops", "raise", rank=worst)),
        Fault("exception in worker", "commit, first write", (DIRTY,), _order("rank loads", "raise", rank=worst, tensor=0)),
        Fault("exception in worker", "commit, after last write", (DIRTY,), _order("rank loads", "raise", rank=worst, tensor=last_tensor)),
        Fault("exception in worker", "commit, loaded", (DIRTY,), _order("rank loaded", "raise", rank=worst)),
        Fault("exception in worker", "post-load hook", (DIRTY,), _order("post-load hook", "raise", rank=worst)),
        Fault("exception in worker, version kept", "commit, before first write", (UNCHANGED,), _order("rank stops", "raise", rank=worst), KEEP),
        Fault("exception in worker, version kept", "commit, first write", (UNCHANGED,), _order("rank loads", "raise", rank=worst, tensor=0), KEEP),
        Fault("exception in worker, version kept", "post-load hook", (UNCHANGED,), _order("post-load hook", "raise", rank=worst), KEEP),
        Fault("exception in worker", "stream", (DIRTY,), _order("rank takes", "raise", rank=worst, bucket=1), STREAM),
    ]  # fmt: skip
    # --- buckets
    for options, phase, left in (({}, "transfer", UNCHANGED), (STREAM, "stream", DIRTY)):
        faults += [
            Fault("bucket corrupted, one bit, by the trainer", phase, (left,), _order("trainer packs", "flip", number=0), options),
            Fault("bucket corrupted, one bit, at a rank", phase, (left,), _order("rank takes", "flip", rank=worst, bucket=1), options),
            Fault("stream truncated", phase, (left,), _order("trainer packs", "truncate", number=1), options),
            Fault("bucket duplicated", phase, (left,), _order("trainer tells", "duplicate", kind="Filled", number=0), options),
            Fault("buckets reordered", phase, (left,), _order("trainer tells", "reorder", kind="Filled", number=0), options),
        ]  # fmt: skip
    # --- pushes that do not fit
    faults += [
        Fault(f"push {how}", "prepare", (UNCHANGED,), spoil=how)
        for how in ("missing", "unknown", "misshapen", "wrong dtype", "empty")
    ]
    # --- connections
    for route, phase, left in (
        ("update_weights_via_ipc_zmq", "prepare", (UNCHANGED,)),
        ("lease", "transfer", (UNCHANGED, COMMITTED)),
        ("commit", "commit", BOTH),
    ):
        if route != "lease":
            faults += [
                Fault(f"connection cut before {route}", phase, (UNCHANGED,), _order("trainer is cut off", "cut", route=route)),
                Fault(f"connection cut after {route}", phase, left, _order("trainer was answered", "cut", route=route)),
            ]  # fmt: skip
    faults += [
        Fault("socket cut after hello", "transfer", (UNCHANGED,), _order("rank met", "cut", rank=worst)),
        Fault("socket cut after offer", "transfer", (UNCHANGED, COMMITTED), _order("trainer tells", "cut", kind="Offer")),
        Fault("socket cut after filled", "transfer", (UNCHANGED, COMMITTED), _order("trainer tells", "cut", kind="Filled", number=1)),
        Fault("socket cut before taken", "transfer", (UNCHANGED,), _order("rank takes", "cut", rank=worst, bucket=0)),
        Fault("prepared lost", "transfer", (UNCHANGED,), _order("rank confirms", "drop", rank=worst)),
    ]  # fmt: skip
    # --- the rest of the world
    for action in ("clock forward", "clock back"):
        faults += [
            Fault(f"{action} one day, trainer", "transfer", (COMMITTED,), _order("trainer packs", action, number=0)),
            Fault(f"{action} one day, worker", "transfer", (COMMITTED,), _order("rank takes", action, rank=worst, bucket=0)),
            Fault(f"{action} one day, front end", "commit", (COMMITTED,), _order("front end commits", action)),
        ]  # fmt: skip
    faults += [
        Fault("shared-memory mount full", "prepare", (UNCHANGED,), special="full disk"),
        Fault("second trainer", "transfer", (COMMITTED,), special="second trainer"),
    ]
    return faults


def at_random(seed: int, rounds: int, tp: int, push_s: float, tensors: int, buckets: int) -> list[Fault]:
    """Faults at random instants: signals at a random time of a push, exceptions and flips at a random place."""
    chance = random.Random(seed)
    faults = []
    anything = (UNCHANGED, COMMITTED, DIRTY)
    for _ in range(rounds):
        rank, kind = chance.randrange(tp), chance.random()
        options = chance.choice([{}, {}, KEEP, STREAM])
        if kind < 0.5:
            # Engines that die take half a minute to come back, so it is mostly others that do.
            victim = chance.choices(["trainer", "worker", "front end"], [6, 3, 2])[0]
            deadly = 0.6 if victim == "trainer" else 0.12
            signal = "SIGKILL" if chance.random() < deadly else "SIGSTOP"
            after_s = chance.uniform(0, 1.5 * push_s)
            faults.append(
                Fault(f"{signal} {victim}", f"at {after_s * 1000:.0f} ms", anything, options=options, victim=victim,
                      signal=signal, delay_s=after_s)
            )  # fmt: skip
        elif kind < 0.75:
            tensor = chance.randrange(tensors)
            order = _order("rank loads", "raise", rank=rank, tensor=tensor)
            faults.append(Fault(f"exception in rank {rank}", f"tensor {tensor}", anything, order, options))
        else:
            bucket, action = chance.randrange(buckets), chance.choice(["flip", "raise", "cut"])
            order = _order("rank takes", action, rank=rank, bucket=bucket)
            faults.append(Fault(f"{action} at rank {rank}", f"bucket {bucket}", anything, order, options))
    return faults
