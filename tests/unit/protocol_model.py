"""Trainers, engines and the messages between them, as `explorer` walks through them.

The model takes what is legal from `states.ENGINE` and `states.PUSH`, and the order of calls from the drivers:
prepare all, transfer, commit all, on failure abort all. A request may arrive at any time, or never; so may its reply.
A step is *fair* if it happens by itself sooner or later (a delivery, the end of a wait in vain, a load that ends), a
*fault* (a loss, a crash, a failed load, a deadline that passes although all is well), or a *start* that somebody has
to want. Steps whose order nobody can tell are one: bytes arrive and are verified, a reply is read, a commit whose
reply is missing is looked after. An engine is one machine: some ranks' load fails. Bounds: two engines; two pushes, by
one trainer or one each by two; rollbacks, by one trainer; what `Model` says of faults; nobody catches up.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightsync.protocol.states import ENGINE, PUSH

MIXED, NOBODY, NOTHING, ANY = -1, -1, -2, 99
ENGINES, ALL = (0, 1), 0b11
#: The bits of requests to engine 0; those to engine 1 are one to the left.
_LEFT, _ONE_PUSH = int("5" * 16, 16), 0b111111
KINDS = ("prepare", "commit", "abort")
FAIR, FAULT, START = "fair", "fault", "start"
Words = tuple[Any, ...]
#: States of a trainer in which it does nothing any more until somebody wants something; "crashed" is ours.
RESTING = ("idle", "closed", "crashed")
ACTIVE = ("preparing", "transferring", "committing", "streaming")


@functools.cache
def _bit(kind: str, e: int, p: int) -> int:
    """The bit of a request in `World.net`."""
    return ((p - 1) * len(KINDS) + KINDS.index(kind)) * len(ENGINES) + e


class Engine(NamedTuple):
    """One engine. ``weights``, ``label``, ``kept``, which a restore loads, and ``previous``, which a rollback does, are
    numbers of pushes, 0 at the start.

    ``push`` is under way for the trainer ``of``; ``lease`` is whose lease it is, ``lapsed`` if that has ended.
    """

    state: str = "serving"
    weights: int = 0
    label: int = 0
    kept: int = MIXED
    previous: int = MIXED
    push: int = 0
    of: int = NOBODY
    committed: int = 0
    lease: int = NOBODY
    lapsed: bool = False


class Trainer(NamedTuple):
    """One trainer and its last push or rollback, of which ``version`` is to be served. ``calls``: what each engine
    answered; ``confirmed``: who holds all, as bits.

    ``told`` is what the user was told of each engine; ``before`` what an engine held when it took the push, as long as
    it was neither restarted nor taken over since.
    """

    state: str = "idle"
    push: int = 0
    version: int = 0
    calls: tuple[str, ...] = ("", "")
    confirmed: int = 0
    told: tuple[str, ...] = ("", "")
    before: tuple[int, ...] = (NOTHING, NOTHING)


class World(NamedTuple):
    """Everything. ``net`` has a bit for each request on its way; ``ready`` who ever held all of each push; ``back`` the
    version that a rollback, which is numbered like a push, goes back to.
    """

    engines: tuple[Engine, ...]
    trainers: tuple[Trainer, ...]
    net: int = 0
    started: int = 0
    restarts: int = 0
    crashes: int = 0
    faults: int = 0
    ready: tuple[int, ...] = ()
    back: tuple[int, ...] = ()


#: `FAIR`, `FAULT` or `START`; what happened; the world after it.
Step = tuple[str, Words, World]


def put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


@dataclass(frozen=True)
class Model:
    """The protocol. ``restarts`` (of engines), ``crashes`` (of trainers, or Ctrl-C) and ``faults`` bound a run.

    ``wrong`` names a rule that is broken on purpose.
    """

    trainers: int = 1
    pushes: int = 2
    restarts: int = 0
    crashes: int = 0
    keep: bool = False
    rollbacks: int = 0
    stream: bool = False
    unsynced: bool = False
    wrong: str = ""
    faults: int = ANY

    def first(self) -> World:
        """Nothing has happened yet. An engine that starts unsynced holds no weights of any version."""
        first = Engine(state="unsynced", weights=MIXED) if self.unsynced else Engine()
        none = (0,) * (self.pushes + self.rollbacks + 1)
        return World((first, Engine()), (Trainer(),) * self.trainers, ready=none, back=none)

    def steps(self, world: World) -> Iterator[Step]:
        """Whatever can happen next."""
        for number, trainer in enumerate(world.trainers):
            yield from self._trainer(world, number, trainer)
        for number, engine in enumerate(world.engines):
            yield from self._engine(world, number, engine)
        for bit in range(world.net.bit_length()):
            if world.net >> bit & 1:
                yield from self._message(world, bit)

    def _trainer(self, world: World, t: int, trainer: Trainer) -> Iterator[Step]:
        who, known = f"trainer {t}", trainer.push or any(engine.lease == t for engine in world.engines)
        if trainer.state not in ("closed", "crashed") and known and world.crashes < self.crashes:
            crashed = _with(world, t, Trainer(state="crashed"))._replace(crashes=world.crashes + 1)
            yield FAULT, (who, "crashes"), _lapse(crashed, t)
        if trainer.state not in RESTING and world.crashes < self.crashes:
            gone = {"calls": ("", ""), "confirmed": 0, "told": ("unknown",) * 2}
            interrupted = _with(world, t, trainer._replace(state=PUSH[trainer.state]["interrupted"], **gone))
            yield FAULT, (who, "is interrupted"), interrupted._replace(crashes=world.crashes + 1)
        if "asked" in trainer.calls:
            yield from self._waiting(world, t, trainer)
        elif trainer.state == "idle":
            p = world.started + 1
            if p <= self.pushes and t == min(p, self.trainers) - 1:
                begun = Trainer(PUSH["idle"]["push"], p, p, calls=("asked",) * 2)
                at = _with(self._settled(world, trainer), t, begun)
                yield START, (who, "pushes", p), at._replace(started=p, net=at.net | 0b11 << _bit("prepare", 0, p))
            kept = {engine.previous for engine in world.engines}
            if self.rollbacks and kept != {MIXED} and len(kept) == 1 and p <= self.pushes + self.rollbacks:
                begun = Trainer(PUSH["idle"]["rollback"], p, *kept, calls=("asked",) * 2, confirmed=ALL)
                back, ready = put(world.back, p - 1, *kept), put(world.ready, p - 1, ALL)
                at = _with(self._settled(world, trainer), t, begun)._replace(started=p, back=back, ready=ready)
                yield START, (who, "goes back to", *kept), at._replace(net=at.net | 0b11 << _bit("commit", 0, p))
            if known:
                yield START, (who, "closes"), _lapse(_with(world, t, trainer._replace(state=PUSH["idle"]["close"])), t)
        elif trainer.state not in RESTING:
            for kind, what, event, ask, told in self._decisions(world, trainer):
                state = PUSH[trainer.state][event]
                changes: dict[str, Any] = {"calls": ("asked",) * 2} if ask == "commit" else {}
                if state in ("aborting", "idle"):
                    changes = {"told": told, "calls": ("", ""), "confirmed": 0}
                after = _with(world, t, trainer._replace(state=state, **changes))
                net = world.net | 0b11 << _bit(ask, 0, trainer.push) if ask else world.net
                yield kind, (who, what, trainer.push, *changes.get("told", ())), after._replace(net=net)

    def _settled(self, world: World, trainer: Trainer) -> World:
        """Engines refuse the rollback whose outcome a trainer does not know, before it begins anything else."""
        left = self.wrong == "a rollback that is left to arrive" or not (trainer.push and world.back[trainer.push - 1])
        return world if left else _refusing(world, trainer.push, *ENGINES)

    def _decisions(self, world: World, trainer: Trainer) -> Iterator[tuple[str, str, str, str, tuple[str, ...]]]:
        """What a trainer may do that waits for nobody: kind, words, event, what it asks of engines, what it tells."""
        state, calls, unchanged = trainer.state, trainer.calls, ("unchanged",) * 2
        everywhere = trainer.confirmed == ALL
        if state == "aborting":
            yield FAIR, "is done with", "aborted", "", trainer.told
        elif state == "preparing" and calls != ("ok", "ok"):
            told = tuple("unchanged" if call == "ok" else call for call in calls)
            yield FAIR, "was refused", "refused", "abort", told
        elif state == "preparing" and not self.stream:
            yield FAIR, "transfers", "accepted", "", ()
        elif state in ("preparing", "transferring"):
            if everywhere or (self.wrong == "a commit before all have prepared" and trainer.confirmed):
                yield FAIR, "commits", "stream" if self.stream else "staged", "commit", ()
            lost = any(engine.push != trainer.push for engine in world.engines)
            yield FAIR if lost else FAULT, "gives up", "refused" if self.stream else "lost", "abort", unchanged
        elif calls == ("committed",) * 2 and everywhere:
            yield FAIR, "succeeds with", "committed", "", calls
        else:
            hides = self.wrong == "an error of the stream that hides commits" and not everywhere
            yield FAIR, "fails with", "failed", "abort", unchanged if hides and calls == ("committed",) * 2 else calls

    def _waiting(self, world: World, t: int, trainer: Trainer) -> Iterator[Step]:
        """For replies: by the deadline a prepare ends, and after a commit the engine is asked what became of it."""
        who = f"trainer {t}"
        if trainer.state == "streaming" and trainer.confirmed:
            yield FAULT, (who, "cannot send"), _with(world, t, trainer._replace(confirmed=0))
        for e, engine in enumerate(world.engines):
            if trainer.calls[e] != "asked":
                continue
            unknown, asked = _answered(world, t, e, "unknown"), "prepare" if trainer.state == "preparing" else "commit"
            late = FAULT if world.net >> _bit(asked, e, trainer.push) & 1 else FAIR
            if asked == "prepare":
                yield late, (who, "waits no longer for engine", e), unknown
                continue
            yield FAULT, (who, "cannot ask engine", e), unknown
            if engine.state.endswith("applying"):
                continue  # it is asked again until that has ended
            found = "dirty" if engine.state.startswith("dirty") else "unchanged"
            found = "committed" if engine.committed == trainer.push else found
            looked = world
            if self.wrong != "a look without an abort":  # after which a commit that still comes is refused
                mine = engine.push == trainer.push
                looked = _refusing(_set(world, e, _forgotten(engine) if mine else engine), trainer.push, e)
            yield late, (who, "finds engine", e, found), _answered(looked, t, e, found)

    def _engine(self, world: World, e: int, engine: Engine) -> Iterator[Step]:
        who = f"engine {e}"
        if world.restarts < self.restarts:
            others = world.net & (_LEFT << 1 - e)
            restarted = _set(world, e, Engine())._replace(net=others, restarts=world.restarts + 1)
            yield FAULT, (who, "is restarted"), _unheld(restarted, e, NOBODY)
        if "abort" in ENGINE[engine.state]:
            p, trainer = engine.push, world.trainers[engine.of]
            early = FAULT if trainer.push == p and trainer.state in ACTIVE and not engine.lapsed else FAIR
            yield early, (who, "lets push", p, "expire"), _set(world, e, _forgotten(engine))
            sends = "preparing" if self.stream else "transferring"
            if trainer.push == p and trainer.state == sends and "staged" in ENGINE[engine.state]:
                staged = _set(world, e, engine._replace(state=ENGINE[engine.state]["staged"]))
                staged = _with(staged, engine.of, trainer._replace(confirmed=trainer.confirmed | 1 << e))
                ready = put(world.ready, p - 1, world.ready[p - 1] | 1 << e)
                yield FAIR, (who, "holds all of", p), staged._replace(ready=ready)
        if engine.state.endswith("applying"):
            yield from self._apply(world, e, engine)
        elif len(world.trainers) > 1 and engine.lease != NOBODY and not engine.lapsed:
            kind = FAIR if world.trainers[engine.lease].state in RESTING else FAULT
            yield kind, (who, "misses trainer", engine.lease), _set(world, e, engine._replace(lapsed=True))

    def _apply(self, world: World, e: int, engine: Engine) -> Iterator[Step]:
        who, p, edges = f"engine {e}", engine.push, ENGINE[engine.state]

        def end(kind: str, how: str, event: str, outcome: str, **more: Any) -> Iterator[Step]:
            ended = _set(world, e, engine._replace(state=edges[event], push=0, of=NOBODY, **more))
            yield from self._reply(kind, (who, how, p), ended, engine.of, e, p, outcome)

        if engine.weights != MIXED or engine.state == "dirty_applying":
            yield from end(FAULT, "fails before it writes", "untouched", "unchanged")
        if engine.weights != MIXED:
            yield FAIR, (who, "writes", p), _set(world, e, engine._replace(weights=MIXED))
            return
        sender = world.trainers[engine.of]
        cut = self.stream and not (sender.push == p and sender.state == "streaming" and sender.confirmed)
        done = {"weights": p, "label": p, "committed": p, "kept": MIXED, "previous": MIXED}
        if self.keep:
            done.update(kept=p, previous=engine.kept)
        if back := world.back[p - 1]:
            label = engine.label if self.wrong == "a rollback under the old label" else back
            done.update(weights=back, label=label, kept=back)
        yield from end(FAULT if cut else FAIR, "has applied", "applied", "committed", **done)
        yield from end(FAIR if cut else FAULT, "fails while it writes", "broken", "dirty")
        if engine.kept != MIXED:
            yield from end(FAULT, "fails and goes back from", "untouched", "unchanged", weights=engine.kept)

    def _message(self, world: World, bit: int) -> Iterator[Step]:
        number, e = divmod(bit, len(ENGINES))
        p, name, engine = number // len(KINDS) + 1, KINDS[number % len(KINDS)], world.engines[e]
        t = min(p, self.trainers) - 1
        arrived = world._replace(net=world.net & ~(1 << bit))
        what = (f"engine {e}", "gets", name, p, "of trainer", t)
        yield FAULT, (name, p, "to engine", e, "is lost"), arrived
        if engine.state.endswith("applying"):
            return  # it waits for its turn
        if name == "prepare":
            yield from self._prepare(arrived, what, t, e, p)
        elif name == "commit":
            yield from self._commit(arrived, what, t, e, p)
        else:
            mine = engine.push == p and engine.lease == t
            yield FAIR, what, _set(arrived, e, _forgotten(engine) if mine else engine)

    def _prepare(self, world: World, what: Words, t: int, e: int, p: int) -> Iterator[Step]:
        engine = world.engines[e]
        if engine.lease not in (t, NOBODY) and not engine.lapsed:
            yield from self._reply(FAIR, (*what, "and refuses"), world, t, e, p, "unchanged")
            return
        engine = engine._replace(lease=t, lapsed=world.trainers[t].state in ("closed", "crashed"))
        taken = _unheld(world._replace(engines=put(world.engines, e, engine)), e, t)
        yield from self._reply(FAULT, (*what, "which does not fit"), taken, t, e, p, "unchanged")
        engine = _forgotten(engine)
        state = ENGINE[engine.state]["prepare"]
        # What a rollback would load lies where the new version will.
        taken = _taken(_set(taken, e, engine._replace(state=state, push=p, of=t, previous=MIXED)), t, e, p, engine)
        yield from self._reply(FAIR, what, taken, t, e, p, "ok")

    def _commit(self, world: World, what: Words, t: int, e: int, p: int) -> Iterator[Step]:
        engine = world.engines[e]
        refused = engine.lease != t and self.wrong != "a commit without the lease"
        if back := world.back[p - 1]:
            if refused or engine.previous != back or "rollback" not in ENGINE[engine.state]:
                yield from self._reply(FAIR, (*what, "and refuses"), world, t, e, p, "unchanged")
                return
            begun = engine._replace(state=ENGINE[engine.state]["rollback"], push=p, of=t)
            asked = world.trainers[t].calls[e] == "asked"
            yield FAIR, what, _taken(_set(world, e, begun), t, e, p if asked else NOTHING, engine)
            return
        refused = refused or engine.push != p
        if not refused and "commit" not in ENGINE[engine.state]:
            refused, engine = True, _forgotten(engine)
        if refused:
            world = _set(world, e, engine)
            yield from self._reply(FAIR, (*what, "and refuses"), world, t, e, p, "unchanged")
            return
        engine = engine._replace(state=ENGINE[engine.state]["commit"], of=t)
        if self.wrong == "the label before the weights":
            engine = engine._replace(label=p)
        yield FAIR, what, _set(world, e, engine)

    def _reply(self, kind: str, what: Words, world: World, t: int, e: int, p: int, outcome: str) -> Iterator[Step]:
        trainer = world.trainers[t]
        if trainer.push == p and trainer.calls[e] == "asked":
            yield kind, what, _answered(world, t, e, outcome)
            yield FAULT, (*what, "(its reply is lost)"), world
        else:
            yield kind, what, world


def _set(world: World, e: int, engine: Engine) -> World:
    return world._replace(engines=put(world.engines, e, engine))


def _with(world: World, t: int, trainer: Trainer) -> World:
    return world._replace(trainers=put(world.trainers, t, trainer))


def _answered(world: World, t: int, e: int, outcome: str) -> World:
    return _with(world, t, world.trainers[t]._replace(calls=put(world.trainers[t].calls, e, outcome)))


def _taken(world: World, t: int, e: int, p: int, engine: Engine) -> World:
    """An engine that was ``engine`` has taken what trainer ``t`` asked for, if that is still what it is about."""
    trainer = world.trainers[t]
    if trainer.push != p:
        return world
    return _with(world, t, trainer._replace(before=put(trainer.before, e, engine.weights)))


def _refusing(world: World, p: int, *engines: int) -> World:
    """These engines refuse the commit of ``p`` if it still comes."""
    return world._replace(net=world.net & ~sum(1 << _bit("commit", e, p) for e in engines))


def _forgotten(engine: Engine) -> Engine:
    """The engine without the push that it has not begun to load."""
    edges = ENGINE[engine.state]
    return engine._replace(state=edges["abort"], push=0, of=NOBODY) if "abort" in edges else engine


def _lapse(world: World, t: int) -> World:
    """A trainer is gone: its socket tells the engines."""
    return world._replace(engines=tuple(e._replace(lapsed=True) if e.lease == t else e for e in world.engines))


def _unheld(world: World, e: int, but: int) -> World:
    """Engine ``e`` is no longer what any trainer but ``but`` left it as."""
    for t, trainer in enumerate(world.trainers):
        if t != but and trainer.before[e] != NOTHING:
            world = _with(world, t, trainer._replace(before=put(trainer.before, e, NOTHING)))
    return world


def pruned(world: World) -> World:
    """The world without requests that can do nothing any more, and what was told of pushes of which nothing is left."""
    engines, trainers, net, ready, back = world.engines, world.trainers, world.net, world.ready, world.back
    for p in range(1, world.started + 1):
        for e in ENGINES if net else ():
            if engines[e].push != p and not net >> _bit("prepare", e, p) & 1:
                net &= ~(1 << _bit("abort", e, p))
                if not back[p - 1] and not any(
                    trainer.push == p and trainer.calls[e] == "asked" for trainer in trainers
                ):
                    net &= ~(1 << _bit("commit", e, p))
        if not net >> _bit(KINDS[0], 0, p) & _ONE_PUSH and engines[0].push != p != engines[1].push:
            ready = put(ready, p - 1, 0)
            if all(trainer.push != p or trainer.state in RESTING for trainer in trainers):
                back = put(back, p - 1, 0)
            for t, trainer in enumerate(trainers):
                if trainer.push == p and trainer.state in RESTING:
                    trainers = put(trainers, t, Trainer(trainer.state))
    return world._replace(trainers=trainers, net=net, ready=ready, back=back)


def ordered(world: World) -> World:
    """The world or its mirror image, in which the engines have changed places."""
    if world.engines[0] <= world.engines[1]:
        return world
    turned = [
        Trainer(a, b, v, c[::-1], d >> 1 | (d & 1) << 1, f[::-1], g[::-1]) for a, b, v, c, d, f, g in world.trainers
    ]
    net, ready = (world.net & _LEFT) << 1 | world.net >> 1 & _LEFT, tuple(r >> 1 | (r & 1) << 1 for r in world.ready)
    return world._replace(engines=world.engines[::-1], trainers=tuple(turned), net=net, ready=ready)
