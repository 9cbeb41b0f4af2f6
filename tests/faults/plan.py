"""The faults: which process suffers what, in which phase, and the outcomes that are allowed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

UNCHANGED, COMMITTED, DIRTY = "unchanged", "committed", "dirty"


@dataclass(frozen=True)
class Fault:
    """One fault. ``order`` goes to the injector; ``may`` lists the states that the engine may be left in.

    Instead of an order, ``signal`` can be sent to ``victim`` ``delay_s`` seconds after the push has begun.
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

    @property
    def transport(self) -> str:
        """The transport of the push."""
        return self.options.get("transport", "ipc_zmq")


def do(point: str, action: str, **where: Any) -> dict[str, Any]:
    """An order to the injector."""
    return {"point": point, "action": action, "where": where}


STREAM = {"staging": "none"}
KEEP = {"keep_previous": True}
U, C, D = (UNCHANGED,), (COMMITTED,), (DIRTY,)
#: Phases that depend on the transport; later ones are the same for all.
ON_THE_WAY = ("prepare", "connect", "transfer", "stream")


def catalogue(tp: int, last: int, transport: str, standby: bool, *, copies: bool = False) -> list[Fault]:
    """Every fault at every place, for an engine with ``tp`` ranks whose loader takes tensors 0 to ``last``.

    With a ``standby`` it loads before it pauses, and in the pause exchanges the weights, or ``copies`` them.
    """
    rank = tp - 1
    route = f"update_weights_via_{transport}"
    faults = [
        *_signals(rank, last, route, standby),
        *_exceptions(tp, rank, last, standby, copies),
        *_buckets(rank),
        *_connections(rank, route),
        *_world(rank),
        *(_first_push(rank, last) if standby and not copies else []),
    ]
    if transport == "ipc_zmq":
        return faults
    return [
        replace(fault, options={**fault.options, "transport": transport})
        for fault in faults
        if fault.phase in ON_THE_WAY and not fault.spoil and not fault.special and "clock" not in fault.what
    ]


def of_adapters(tp: int, transport: str) -> list[Fault]:
    """Every fault at every place of a push of an adapter, which goes through one bucket and leaves the weights alone.

    A rank that fails in the commit has the adapter before again.
    """
    rank, worker = tp - 1, "worker"
    weights = ("rank loads", "rank loaded", "rank stops", "post-load hook")
    faults = [
        replace(fault, order={**fault.order, "where": {**fault.order["where"], **_first(fault.order["where"])}})
        for fault in catalogue(tp, 0, transport, False)
        if fault.order is not None and fault.order["point"] not in weights and "staging" not in fault.options
    ]
    if transport == "ipc_zmq":
        faults += [
            Fault(f"SIGKILL {worker}", "commit, exchanging", C + D, do("rank serves adapter", "kill", rank=rank)),
            Fault(f"SIGSTOP {worker}", "commit, exchanging", C + D, do("rank serves adapter", "stop", rank=rank)),
            Fault(f"exception in {worker}", "commit, exchanging", U, do("rank serves adapter", "raise", rank=rank)),
        ]
    return faults


def of_changes(tp: int, last: int, transport: str, standby: bool) -> list[Fault]:
    """Every fault at every place of a push of what has changed, which crosses in one bucket.

    Where it does not arrive as it was sent, everything is sent in the same push.
    """
    faults = [
        *catalogue(tp, last, transport, standby),
        *(
            fault
            for fault in catalogue(tp, last, "ipc_zmq", standby)
            if fault.phase.startswith(("commit", "post-load"))
        ),
    ]
    found = []
    for fault in faults:
        order = fault.order
        if order is None or "staging" in fault.options or fault.special or "clock" in fault.what:
            continue
        if (order["point"], order["action"]) in (("trainer packs", "flip"), ("trainer announces", "truncate")):
            continue  # what is packed does not cross, and nothing comes after the only bucket
        order = {**order, "where": {**order["where"], **_first(order["where"])}}
        may = {*fault.may, COMMITTED} if order["action"] == "flip" else fault.may
        options = {**fault.options, "transport": transport}
        found.append(replace(fault, order=order, may=tuple(may), options=options))
    return found


def _first(where: dict[str, Any]) -> dict[str, int]:
    return dict.fromkeys(where.keys() & {"bucket", "number"}, 0)


def _signals(rank: int, last: int, route: str, standby: bool) -> list[Fault]:
    """Processes that die or freeze."""
    faults = []
    for action, verb in (("kill", "SIGKILL"), ("stop", "SIGSTOP")):
        trainer, front, worker = f"{verb} trainer", f"{verb} front end", f"{verb} worker"
        faults += [
            Fault(trainer, "prepare", U, do("trainer was answered", action, route=route)),
            Fault(trainer, "transfer", U, do("trainer packs", action, number=1)),
            Fault(trainer, "commit", U + C, do("trainer asks", action, route="commit")),
            Fault(trainer, "commit, after it", C, do("trainer was answered", action, route="commit")),
            # The engines are asked to commit while the first buckets are packed, so the commit may not have begun.
            Fault(trainer, "stream", U + D, do("trainer packs", action, number=1), STREAM),
            Fault(front, "prepare", U, do("front end prepares", action)),
            Fault(front, "commit", U + C, do("front end commits", action)),
            Fault(front, "commit, after it", C, do("front end committed", action)),
            Fault(worker, "transfer", U, do("rank takes", action, rank=rank, bucket=0)),
            Fault(worker, "commit, before loading", U + C, do("rank stops", action, rank=rank)),
            Fault(
                *(worker, "commit, loading", U + C if standby else C + D),
                do("rank loads", action, rank=rank, tensor=last // 2),
            ),
        ]
        if standby:
            order = do("rank exchanges", action, rank=rank, tensor=last // 2)
            faults.append(Fault(worker, "commit, exchanging", C + D, order))
    return faults


def _exceptions(tp: int, rank: int, last: int, standby: bool, copies: bool) -> list[Fault]:
    """Exceptions in a worker; another rank may have loaded already."""
    worker, kept = "exception in worker", "exception in worker, version kept"
    before = do("rank stops", "raise", rank=rank)
    first = do("rank loads", "raise", rank=rank, tensor=0)
    final = do("rank loads", "raise", rank=rank, tensor=last)
    hook = do("post-load hook", "raise", rank=rank)
    half = U if standby else D
    exchange = do("rank exchanges", "raise", rank=rank, tensor=last // 2)
    return [
        *([Fault(worker, "commit, exchanging", D if copies else U, exchange)] if standby else []),
        *([Fault(kept, "commit, exchanging", U, exchange, KEEP)] if standby else []),
        Fault(worker, "prepare", U, do("rank prepares", "raise", rank=rank)),
        Fault(worker, "connect", U, do("rank connects", "raise", rank=rank)),
        Fault(worker, "transfer", U, do("rank takes", "raise", rank=rank, bucket=1)),
        # Where weights are copied, another rank has no version before by then.
        Fault(worker, "commit, before first write", U if tp == 1 else D if copies else half, before),
        Fault(worker, "commit, first write", half, first),
        Fault(worker, "commit, after last write", half, final),
        Fault(worker, "commit, loaded", half, do("rank loaded", "raise", rank=rank)),
        Fault(worker, "post-load hook", half, hook),
        Fault(kept, "commit, before first write", U, before, KEEP),
        Fault(kept, "commit, first write", U, first, KEEP),
        Fault(kept, "commit, after last write", U, final, KEEP),
        Fault(kept, "post-load hook", U, hook, KEEP),
        Fault(worker, "stream", D, do("rank takes", "raise", rank=rank, bucket=1), STREAM),
    ]


def _buckets(rank: int) -> list[Fault]:
    """Bytes that differ from what was announced, and pushes that do not fit the model."""
    faults, first = [], {"kind": "BucketReady", "number": 0}
    for options, phase, left in (({}, "transfer", U), (STREAM, "stream", D)):
        faults += [
            Fault("bit flipped by the trainer", phase, left, do("trainer packs", "flip", number=0), options),
            Fault("bit flipped at a rank", phase, left, do("rank takes", "flip", rank=rank, bucket=1), options),
            Fault("stream truncated", phase, left, do("trainer announces", "truncate", number=1), options),
            Fault("bucket duplicated", phase, left, do("trainer tells", "duplicate", **first), options),
            Fault("buckets reordered", phase, left, do("trainer tells", "reorder", **first), options),
        ]
    spoilt = ("missing", "unknown", "misshapen", "wrong dtype", "empty")
    return [*faults, *(Fault(f"push {how}", "prepare", U, spoil=how) for how in spoilt)]


def _connections(rank: int, route: str) -> list[Fault]:
    """Connections that break after each message."""
    return [
        Fault("request lost", "prepare", U, do("trainer is cut off", "cut", route=route)),
        Fault("reply lost", "prepare", U, do("trainer was answered", "cut", route=route)),
        # This hits one of the two engines that are asked at the same time.
        Fault("request lost", "commit", U + C, do("trainer is cut off", "cut", route="commit")),
        Fault("reply lost", "commit", U + C, do("trainer was answered", "cut", route="commit")),
        Fault("socket cut after hello and offer", "transfer", U, do("rank connected", "cut", rank=rank)),
        Fault("socket gone at offer", "transfer", U + C, do("trainer tells", "cut", kind="Offer")),
        Fault("socket gone at filled", "transfer", U + C, do("trainer tells", "cut", kind="BucketReady", number=1)),
        Fault("socket cut before taken", "transfer", U, do("rank takes", "cut", rank=rank, bucket=0)),
        Fault("prepared lost", "transfer", U, do("rank confirms", "drop", rank=rank)),
    ]


def _world(rank: int) -> list[Fault]:
    """Faults of the environment: clocks, full mounts, a second trainer."""
    faults = []
    for action in ("clock forward", "clock back"):
        faults += [
            Fault(f"{action} a day, trainer", "transfer", C, do("trainer packs", action, number=0)),
            Fault(f"{action} a day, worker", "transfer", C, do("rank takes", action, rank=rank, bucket=0)),
            Fault(f"{action} a day, front end", "commit", C, do("front end commits", action)),
        ]
    return [
        *faults,
        Fault("shared-memory mount full", "prepare", U, options={"bucket_bytes": 1 << 18}, special="full disk"),
        Fault("second trainer", "after a push", C, special="second trainer"),
    ]


def _first_push(rank: int, last: int) -> list[Fault]:
    """Faults while an engine that has just started proves that a load plan does what its loader does."""
    phase, loads, whole = "first push, loading", {"rank": rank, "tensor": last // 2}, "first push, loaded"
    faults = [
        Fault("SIGKILL worker", phase, U + C, do("rank loads", "kill", **loads)),
        Fault("SIGSTOP worker", phase, U + C, do("rank loads", "stop", **loads)),
        Fault("exception in worker", phase, U, do("rank loads", "raise", **loads)),
        Fault("exception in worker", whole, U, do("rank loaded", "raise", rank=rank)),
    ]
    return [replace(fault, special="fresh engine") for fault in faults]


def at_random(
    seed: int, rounds: int, tp: int, push_s: float, tensors: int, buckets: int, transports: Sequence[str]
) -> list[Fault]:
    """Faults at random instants: signals at a random time of a push, exceptions and flips at a random place."""
    chance = random.Random(seed)
    faults = []
    anything = (UNCHANGED, COMMITTED, DIRTY)
    for _ in range(rounds):
        rank, kind = chance.randrange(tp), chance.random()
        options = {**chance.choice([{}, {}, KEEP, STREAM]), "transport": transports[len(faults) % len(transports)]}
        if kind < 0.5:
            # An engine that dies takes half a minute to restart, so mostly trainers are killed.
            victim = chance.choices(["trainer", "worker", "front end"], [6, 3, 2])[0]
            deadly = 0.6 if victim == "trainer" else 0.12
            signal = "SIGKILL" if chance.random() < deadly else "SIGSTOP"
            after_s = chance.uniform(0, 1.5 * push_s)
            faults.append(
                Fault(
                    f"{signal} {victim}",
                    f"at {after_s * 1000:.0f} ms",
                    anything,
                    options=options,
                    victim=victim,
                    signal=signal,
                    delay_s=after_s,
                )
            )
        elif kind < 0.75:
            tensor = chance.randrange(tensors)
            order = do("rank loads", "raise", rank=rank, tensor=tensor)
            faults.append(Fault(f"exception in rank {rank}", f"tensor {tensor}", anything, order, options))
        else:
            bucket, action = chance.randrange(buckets), chance.choice(["flip", "raise", "cut"])
            order = do("rank takes", action, rank=rank, bucket=bucket)
            faults.append(Fault(f"{action} at rank {rank}", f"bucket {bucket}", anything, order, options))
    return faults
