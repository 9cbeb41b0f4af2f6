"""A small model checker: every state that trainers, engines and the messages between them can reach together.

The model takes what is legal from `session.REPLICA` and `session.PUSH`, and the order of calls from the drivers:
prepare all, transfer, commit all, on failure abort all. A request may arrive at any time, also when its trainer has
given up on it, or never; so may its reply. A step is *fair* if it happens by itself sooner or later (a delivery, a
deadline, an expiry, a load that ends), a *fault*, or a *start* that somebody has to want. Steps of which no order can
be told from outside are one: bytes arrive and are verified, a reply is read, a commit whose reply is missing is looked
after. An engine is one machine here; a load that fails on some of its ranks is one that fails after the first write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightsync.session import PUSH, REPLICA

MIXED, NOBODY, NOTHING = -1, -1, -2
ENGINES = (0, 1)
ALL = 0b11
KINDS = ("prepare", "commit", "abort")
FAIR, FAULT, START = "fair", "fault", "start"
#: States of a trainer in which it does nothing any more until somebody wants something; "crashed" is ours.
RESTING = ("idle", "closed", "crashed")


class Engine(NamedTuple):
    """One engine. ``weights`` and ``label`` are the number of a push, 0 at the start; ``kept`` is what a restore brings.

    ``push`` is under way for the trainer ``of``; ``lease`` is whose lease it is, ``lapsed`` if that has ended.
    """

    state: str = "serving"
    weights: int = 0
    label: int = 0
    kept: int = MIXED
    push: int = 0
    of: int = NOBODY
    committed: int = 0
    lease: int = NOBODY
    lapsed: bool = False


class Trainer(NamedTuple):
    """One trainer and its last push. ``calls``: what each engine answered; ``confirmed``: who holds all, as bits.

    ``told`` is what the user was told of each engine; ``before`` what an engine held when it took the push, as long as
    it was neither restarted nor taken over since.
    """

    state: str = "idle"
    push: int = 0
    calls: tuple[str, ...] = ("", "")
    confirmed: int = 0
    told: tuple[str, ...] = ("", "")
    before: tuple[int, ...] = (NOTHING, NOTHING)


class World(NamedTuple):
    """Everything. ``net`` has a bit for each request on its way; ``ready`` who ever held all of each push."""

    engines: tuple[Engine, ...]
    trainers: tuple[Trainer, ...]
    net: int = 0
    started: int = 0
    restarts: int = 0
    crashes: int = 0
    ready: tuple[int, ...] = ()


class Step(NamedTuple):
    """One step: its kind (`FAIR`, `FAULT`, `START`), what happened, as words, and the world after it."""

    kind: str
    what: tuple[Any, ...]
    world: World


def put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    """A copy with one item replaced."""
    return (*items[:at], item, *items[at + 1 :])


@dataclass(frozen=True)
class Model:
    """The protocol. The numbers bound the faults of a run; ``wrong`` names a rule that is broken on purpose."""

    trainers: int = 1
    pushes: int = 2
    restarts: int = 0
    crashes: int = 0
    keep: bool = False
    stream: bool = False
    unsynced: bool = False
    wrong: str = ""

    def first(self) -> World:
        """Nothing has happened yet. An engine that starts unsynced holds no weights of any version."""
        first = Engine(state="unsynced", weights=MIXED) if self.unsynced else Engine()
        return World((first, Engine()), (Trainer(),) * self.trainers, ready=(0,) * (self.pushes + 1))

    def steps(self, world: World) -> Iterator[Step]:
        """Whatever can happen next."""
        for number, trainer in enumerate(world.trainers):
            yield from self._trainer(world, number, trainer)
        for number, engine in enumerate(world.engines):
            yield from self._engine(world, number, engine)
        net, bit = world.net, 0
        while net >> bit:
            if net >> bit & 1:
                yield from self._message(world, bit)
            bit += 1

    # --- trainers -----------------------------------------------------------------------------------------------------

    def _trainer(self, world: World, t: int, trainer: Trainer) -> Iterator[Step]:
        state, who = trainer.state, f"trainer {t}"

        def to(event: str, told: tuple[str, ...] | None = None, ask: str = "", **more: Any) -> World:
            more.update(state=PUSH[state][event])
            if told is not None:
                more.update(told=told)
            if ask == "abort":
                more.update(confirmed=0)
            push = more.get("push", trainer.push)
            net = world.net
            for e in ENGINES if ask else ():
                net |= 1 << self._bit(ask, t, e, push)
            return world._replace(trainers=put(world.trainers, t, trainer._replace(**more)), net=net)

        if state not in ("closed", "crashed") and trainer.push and world.crashes < self.crashes:
            gone = Trainer(state="crashed")
            crashed = world._replace(trainers=put(world.trainers, t, gone), crashes=world.crashes + 1)
            yield Step(FAULT, (who, "crashes"), _lapse(crashed, t))
        if state == "idle":
            if world.started < self.pushes:
                fresh = Trainer(push=world.started + 1, calls=("asked", "asked"))
                begun = to("push", ask="prepare", **{k: v for k, v in fresh._asdict().items() if k != "state"})
                yield Step(START, (who, "pushes", world.started + 1), begun._replace(started=world.started + 1))
            if trainer.push:
                yield Step(START, (who, "closes"), _lapse(to("close"), t))
        elif state in RESTING:
            return
        elif state == "aborting":
            yield Step(FAIR, (who, "is done with", trainer.push), to("aborted", calls=("", "")))
        elif state == "transferring":
            if trainer.confirmed == ALL or (self.wrong == "commit without all prepared" and trainer.confirmed):
                asked = to("staged", ask="commit", calls=("asked", "asked"))
                yield Step(FAIR, (who, "asks to commit", trainer.push), asked)
            yield Step(FAIR, (who, "gives up", trainer.push), to("lost", ("unchanged",) * 2, "abort"))
        elif "asked" in trainer.calls:
            yield from self._waiting(world, t, trainer)
        elif state == "preparing":
            if trainer.calls != ("ok", "ok"):
                told = tuple("unchanged" if call == "ok" else call for call in trainer.calls)
                yield Step(FAIR, (who, "was refused", trainer.push), to("refused", told, "abort"))
            elif not self.stream:
                yield Step(FAIR, (who, "transfers", trainer.push), to("accepted"))
            else:
                if trainer.confirmed == ALL:
                    asked = to("stream", ask="commit", calls=("asked", "asked"))
                    yield Step(FAIR, (who, "streams", trainer.push), asked)
                yield Step(FAIR, (who, "gives up", trainer.push), to("refused", ("unchanged",) * 2, "abort"))
        elif trainer.calls == ("committed", "committed") and trainer.confirmed:
            yield Step(FAIR, (who, "reports success of", trainer.push), to("committed", trainer.calls, calls=("", ""), confirmed=0))
        else:
            hidden = self.wrong == "an error of the stream hides commits" and trainer.calls == ("committed",) * 2
            told = ("unchanged",) * 2 if hidden else trainer.calls
            yield Step(FAIR, (who, "reports", *told, "of", trainer.push), to("failed", told, "abort"))

    def _waiting(self, world: World, t: int, trainer: Trainer) -> Iterator[Step]:
        """For replies: by the deadline a prepare ends, and after a commit the engine is asked what became of it."""
        who = f"trainer {t}"
        if trainer.state == "streaming" and trainer.confirmed:
            failed = trainer._replace(confirmed=0)
            yield Step(FAULT, (who, "cannot send"), world._replace(trainers=put(world.trainers, t, failed)))
        for e, engine in enumerate(world.engines):
            if trainer.calls[e] != "asked":
                continue
            unknown = _answered(world, t, e, "unknown")
            if trainer.state == "preparing":
                yield Step(FAIR, (who, "waits no longer for engine", e), unknown)
                continue
            yield Step(FAULT, (who, "cannot ask engine", e), unknown)
            if engine.state.endswith("applying"):
                continue  # it is asked again until that has ended
            after = engine
            if engine.push == trainer.push and self.wrong != "a look without an abort":
                after = _forgotten(engine)  # so that the commit, if it still comes, is refused
            found = (
                "committed" if engine.committed == trainer.push
                else "dirty" if engine.state.startswith("dirty") else "unchanged"
            )  # fmt: skip
            looked = world._replace(engines=put(world.engines, e, after))
            yield Step(FAIR, (who, "finds engine", e, found), _answered(looked, t, e, found))

    # --- engines ------------------------------------------------------------------------------------------------------

    def _engine(self, world: World, e: int, engine: Engine) -> Iterator[Step]:
        who = f"engine {e}"

        def to(**more: Any) -> World:
            return world._replace(engines=put(world.engines, e, engine._replace(**more)))

        if world.restarts < self.restarts:
            keep = sum(1 << bit for bit in range(world.net.bit_length()) if world.net >> bit & 1 and bit // 2 % 2 != e)
            restarted = to(**Engine()._asdict())._replace(net=keep & world.net, restarts=world.restarts + 1)
            yield Step(FAULT, (who, "is restarted"), _unheld(restarted, e, NOBODY))
        if "abort" in REPLICA[engine.state]:
            yield Step(FAIR, (who, "lets push", engine.push, "expire"), to(**_forgotten(engine)._asdict()))
            p, trainer = engine.push, world.trainers[engine.of]
            sends = "preparing" if self.stream else "transferring"
            if trainer.push == p and trainer.state == sends and "staged" in REPLICA[engine.state]:
                staged = to(state=REPLICA[engine.state]["staged"])
                confirmed = trainer._replace(confirmed=trainer.confirmed | 1 << e)
                ready = put(world.ready, p - 1, world.ready[p - 1] | 1 << e)
                trainers = put(world.trainers, engine.of, confirmed)
                yield Step(FAIR, (who, "holds all of", p), staged._replace(trainers=trainers, ready=ready))
        if engine.state.endswith("applying"):
            yield from self._apply(world, e, engine)
        elif len(world.trainers) > 1 and engine.lease != NOBODY and not engine.lapsed:
            yield Step(FAIR, (who, "hears nothing of trainer", engine.lease), to(lapsed=True))

    def _apply(self, world: World, e: int, engine: Engine) -> Iterator[Step]:
        who, p, edges = f"engine {e}", engine.push, REPLICA[engine.state]

        def end(kind: str, how: str, event: str, outcome: str, **more: Any) -> Iterator[Step]:
            after = engine._replace(state=edges[event], push=0, of=NOBODY, **more)
            ended = world._replace(engines=put(world.engines, e, after))
            yield from self._reply(kind, (who, how, p), ended, engine.of, e, p, outcome)

        if engine.weights != MIXED or engine.state == "dirty_applying":
            yield from end(FAULT, "fails before it writes", "untouched", "unchanged")
        if engine.weights != MIXED:
            written = engine._replace(weights=MIXED)
            yield Step(FAIR, (who, "writes", p), world._replace(engines=put(world.engines, e, written)))
            return
        sender = world.trainers[engine.of]
        cut = self.stream and not (sender.push == p and sender.state == "streaming" and sender.confirmed)
        if not cut:
            done = {"weights": p, "label": p, "committed": p, "kept": p if self.keep else MIXED}
            yield from end(FAIR, "has applied", "applied", "committed", **done)
        yield from end(FAIR if cut else FAULT, "fails while it writes", "broken", "dirty")
        if engine.kept != MIXED:
            yield from end(FAULT, "fails and goes back from", "untouched", "unchanged", weights=engine.kept)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _bit(self, kind: str, t: int, e: int, p: int) -> int:
        return ((p - 1) * len(KINDS) + KINDS.index(kind)) * 4 + e * 2 + t

    def _message(self, world: World, bit: int) -> Iterator[Step]:
        t, e = bit % 2, bit // 2 % 2
        p, kind = divmod(bit // 4, len(KINDS))
        p, name, engine = p + 1, KINDS[kind], world.engines[e]
        arrived = world._replace(net=world.net & ~(1 << bit))
        what = (f"engine {e}", "gets", name, p, "of trainer", t)
        yield Step(FAULT, (name, p, "to engine", e, "is lost"), arrived)
        if engine.state.endswith("applying"):
            return  # it waits for its turn
        if name == "prepare":
            yield from self._prepare(arrived, what, t, e, p)
        elif name == "commit":
            yield from self._commit(arrived, what, t, e, p)
        else:
            mine = engine.push == p and engine.lease == t
            after = _forgotten(engine) if mine else engine
            yield Step(FAIR, what, arrived._replace(engines=put(world.engines, e, after)))

    def _prepare(self, world: World, what: tuple[Any, ...], t: int, e: int, p: int) -> Iterator[Step]:
        engine = world.engines[e]
        if engine.lease not in (t, NOBODY) and not engine.lapsed:
            yield from self._reply(FAIR, (*what, "and refuses"), world, t, e, p, "unchanged")
            return
        engine = engine._replace(lease=t, lapsed=world.trainers[t].state in ("closed", "crashed"))
        taken = _unheld(world._replace(engines=put(world.engines, e, engine)), e, t)
        yield from self._reply(FAULT, (*what, "which does not fit"), taken, t, e, p, "unchanged")
        engine = _forgotten(engine)
        state = REPLICA[engine.state]["prepare"]
        taken = taken._replace(engines=put(taken.engines, e, engine._replace(state=state, push=p, of=t)))
        if world.trainers[t].push == p:
            trainer = world.trainers[t]
            held = trainer._replace(before=put(trainer.before, e, engine.weights))
            taken = taken._replace(trainers=put(taken.trainers, t, held))
        yield from self._reply(FAIR, what, taken, t, e, p, "ok")

    def _commit(self, world: World, what: tuple[Any, ...], t: int, e: int, p: int) -> Iterator[Step]:
        engine, refused = world.engines[e], False
        if engine.lease != t and self.wrong != "a commit without the lease":
            refused = True
        elif engine.push != p and self.wrong != "a commit of whatever is staged":
            refused = True
        elif "commit" not in REPLICA[engine.state]:
            refused, engine = True, _forgotten(engine)
        if refused:
            world = world._replace(engines=put(world.engines, e, engine))
            yield from self._reply(FAIR, (*what, "and refuses"), world, t, e, p, "unchanged")
            return
        engine = engine._replace(state=REPLICA[engine.state]["commit"], of=t)
        if self.wrong == "the label before the weights":
            engine = engine._replace(label=p)
        yield Step(FAIR, what, world._replace(engines=put(world.engines, e, engine)))

    def _reply(
        self, kind: str, what: tuple[Any, ...], world: World, t: int, e: int, p: int, outcome: str
    ) -> Iterator[Step]:
        trainer = world.trainers[t]
        if trainer.push == p and trainer.calls[e] == "asked":
            yield Step(kind, what, _answered(world, t, e, outcome))
            yield Step(FAULT, (*what, "(its reply is lost)"), world)
        else:
            yield Step(kind, what, world)


def _answered(world: World, t: int, e: int, outcome: str) -> World:
    trainer = world.trainers[t]
    return world._replace(
        trainers=put(world.trainers, t, trainer._replace(calls=put(trainer.calls, e, outcome)))
    )


def _forgotten(engine: Engine) -> Engine:
    """The engine without the push that it has not begun to load."""
    edges = REPLICA[engine.state]
    return engine._replace(state=edges["abort"], push=0, of=NOBODY) if "abort" in edges else engine


def _lapse(world: World, t: int) -> World:
    """A trainer is gone: its socket tells the engines."""
    return world._replace(
        engines=tuple(e._replace(lapsed=True) if e.lease == t else e for e in world.engines)
    )


def _unheld(world: World, e: int, but: int) -> World:
    """Engine ``e`` is no longer what any trainer but ``but`` left it as."""
    trainers = world.trainers
    for t, trainer in enumerate(trainers):
        if t != but and trainer.before[e] != NOTHING:
            trainers = put(trainers, t, trainer._replace(before=put(trainer.before, e, NOTHING)))
    return world._replace(trainers=trainers)


def generates(model: Model, engine: Engine) -> bool:
    """Whether an engine answers requests."""
    if model.wrong == "a dirty engine generates" and engine.state == "dirty":
        return True
    return not engine.state.startswith("dirty") and engine.state not in ("unsynced", "applying")


def violation(model: Model, world: World) -> str:
    """What the contract forbids and this world does; empty if nothing."""
    for e, engine in enumerate(world.engines):
        if generates(model, engine):
            if engine.weights == MIXED:
                return f"engine {e} generates with mixed weights"
            if engine.label != engine.weights:
                return f"engine {e} generates with weights {engine.weights} and says {engine.label}"
        if engine.state.endswith("applying"):
            if world.ready[engine.push - 1] != ALL:
                return f"engine {e} commits push {engine.push}, which not every engine has prepared"
            if engine.lease != engine.of:
                return f"engine {e} commits for trainer {engine.of}, and trainer {engine.lease} holds the lease"
    for t, trainer in enumerate(world.trainers):
        if trainer.state in ("idle", "closed"):
            for e, engine in enumerate(world.engines):
                if fault := _untrue(trainer, engine, e):
                    return f"trainer {t} was told {trainer.told[e]} of engine {e}, {fault}"
    return ""


def _untrue(trainer: Trainer, engine: Engine, e: int) -> str:
    told, before, held = trainer.told[e], trainer.before[e], f"which is {engine.state} and holds {engine.weights}"
    if told == "unchanged" and engine.committed == trainer.push:
        return "which has committed"
    if before == NOTHING:
        return ""  # restarted or taken over since, or it never took the push
    if told == "committed" and not engine.weights == engine.label == trainer.push:
        return held
    if told == "dirty" and not engine.state.startswith("dirty"):
        return held
    still = engine.weights == before or (before == MIXED and engine.state.startswith("dirty"))
    return held if told == "unchanged" and not still else ""


def resting(world: World) -> bool:
    """Nobody is in the middle of anything."""
    return all(trainer.state in RESTING for trainer in world.trainers) and all(
        engine.state in ("serving", "dirty", "unsynced") for engine in world.engines
    )


def smaller(model: Model, world: World) -> World:
    """The same world without requests that can do nothing any more, and with engines and trainers in order."""
    engines, trainers, net = world.engines, world.trainers, world.net
    bit = 0
    while net >> bit:
        if net >> bit & 1 and bit // 4 % 3:
            t, e, p = bit % 2, bit // 2 % 2, bit // 12 + 1
            prepare = bit - bit // 4 % 3 * 4
            if engines[e].push != p and not net >> prepare & 1:
                if bit // 4 % 3 == 2 or trainers[t].push != p or trainers[t].calls[e] != "asked":
                    net &= ~(1 << bit)
        bit += 1
    ready = world.ready
    if engines[0] > engines[1]:
        engines = engines[::-1]
        trainers = tuple(
            Trainer(a, b, c[::-1], d >> 1 | (d & 1) << 1, f[::-1], g[::-1]) for a, b, c, d, f, g in trainers
        )
        net = (net & EVEN_E) << 2 | net >> 2 & EVEN_E
        ready = tuple(r >> 1 | (r & 1) << 1 for r in ready)
    if len(trainers) == 2 and trainers[0] > trainers[1]:
        trainers = trainers[::-1]
        net = (net & EVEN_T) << 1 | net >> 1 & EVEN_T
        engines = tuple(e._replace(of=OTHER[e.of], lease=OTHER[e.lease]) for e in engines)
    return World(engines, trainers, net, world.started, world.restarts, world.crashes, ready)

EVEN_E = int("3"*12,16)
EVEN_T = int("5"*12,16)
OTHER = (1,0,-1)

class Explored(NamedTuple):
    """``fair`` has for each of ``worlds`` the numbers of those that a fair step leads to; ``moves`` are the changes of
    state that were seen. ``trace`` is a shortest way to ``fault``."""

    worlds: list[World]
    transitions: int
    fair: list[list[int]]
    moves: set[tuple[str, str]]
    fault: str
    trace: list[str]


def explore(model: Model, check: Callable[[Model, World], str] = violation) -> Explored:
    """Every world there is, breadth first; ends at the first violation."""
    first = model.first()
    worlds, number = [first], {first: 0}
    parents: list[tuple[int, tuple[Any, ...]]] = [(0, ())]
    fair: list[list[int]] = []
    moves: set[tuple[str, str]] = set()
    transitions = 0

    def trace(at: int) -> list[str]:
        steps = []
        while at:
            at, what = parents[at]
            steps.append(" ".join(map(str, what)))
        return steps[::-1]

    for at, world in enumerate(worlds):  # grows as it goes
        targets: list[int] = []
        for kind, what, after in model.steps(world):
            transitions += 1
            after = smaller(model, after)
            known = number.get(after)
            if known is None:
                known = number[after] = len(worlds)
                worlds.append(after)
                parents.append((at, what))
                if fault := check(model, after):
                    return Explored(worlds, transitions, fair, moves, fault, trace(known))
                for old, new in zip(world.engines + world.trainers, after.engines + after.trainers, strict=True):
                    if old.state != new.state:
                        moves.add((old.state, new.state))
            if kind == FAIR:
                targets.append(known)
        fair.append(targets)
    return Explored(worlds, transitions, fair, moves, "", [])
