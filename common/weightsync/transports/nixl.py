"""Across hosts one-sided: every rank READs the buckets from the trainer's registered arena into its registered stage.

The trainer only answers: it says which bucket is full, and is notified by NIXL when a rank has read it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Event
from typing import Any, ClassVar, Final

import msgspec
import torch

from weightsync import wire
from weightsync.errors import TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.handles import NixlHandle
from weightsync.layout import Layout
from weightsync.staging import Arena
from weightsync.transports.agents import Agent, Reads, translated
from weightsync.transports.base import Bucket, Deadline, Introduction, Peer
from weightsync.transports.control import (
    LOOK_UP_S,
    Call,
    EngineControl,
    Talk,
    TrainerControl,
    interface_of,
    local_address,
)
from weightsync.wire import Filled, Offer, RegisterNixl, Taken, UpdateRequest

#: Buckets that a rank has posted and not yet seen the end of: enough to hide the way of one message.
_IN_FLIGHT: Final = 2
#: Between two looks at what is under way, which is also what keeps it going.
_SPIN_S: Final = 0.0001
#: How long a rank tries to connect before its first push.
_WARM_S: Final = 30.0
_WARM: Final = b"warm"
#: How long its thread may take to notice that it is over.
_END_S: Final = 1.0
#: Stages that a rank keeps registered: one, and that of the version before where it keeps it, for each of two arenas.
_READS: Final = 4


class Trainer:
    """Trainer end, see `base.TrainerEnd`. ``device`` is where the arena is."""

    def __init__(self, device: torch.device):
        self._device = device
        self._control = TrainerControl(remote=True)
        self.address, self.request = self._control.address, self._control.invite
        self._agent = Agent(device, 0)
        #: What is registered, by the name of the arena.
        self._registered: dict[str, Any] = {}
        self._known: dict[str, str] = {}
        self._agents: dict[str, Peer] = {}
        self._talk: Talk | None = None
        self._plan: UpdateRequest | None = None
        self._last = 0

    def introduce(self, engines: Mapping[str, wire.OpenReply], timeout_s: float) -> dict[str, Introduction]:
        """See `base.TrainerEnd`; an engine that was restarted is told again, the others are left alone."""
        asked: dict[str, Introduction] = {}
        for url, hello in engines.items():
            if self._known.get(url) != hello.instance:
                self._known.pop(url, None)
                asked[url] = RegisterNixl(
                    agent=self._agent.name,
                    metadata=self._agent.metadata(),
                    timeout_s=timeout_s,
                    address=self.address(url),
                    instance=hello.instance,
                )
        return asked

    def introduced(self, replies: Mapping[str, wire.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`; returns once every rank has been heard of by NIXL itself, both ways."""
        silent: dict[str, Peer] = {}
        for url, reply in replies.items():
            self._agents = {agent: peer for agent, peer in self._agents.items() if peer.engine != url}
            silent.update({rank.agent: Peer(url, rank.rank) for rank in reply.ranks})
            for rank in reply.ranks:
                self._agent.forget(rank.agent)  # its end of an older connection is gone
                self._agent.know(rank.agent, rank.metadata, str(Peer(url, rank.rank)))
        self._agents.update(silent)
        while silent:
            deadline.check(f"{', '.join(sorted(map(str, silent.values())))} to be reached over NIXL")
            for agent in self._agent.notices().keys() & silent.keys():
                self._agent.notify(agent, _WARM, str(silent.pop(agent)))
            time.sleep(_SPIN_S)
        self._known.update({url: reply.instance for url, reply in replies.items()})

    def meet(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> None:
        """See `base.TrainerEnd`."""
        for arena in arenas:
            if arena.name not in self._registered:
                self._registered[arena.name] = self._agent.register(arena.bytes)
        self._plan, self._last = plan, layout.buckets(plan.bucket_bytes) - 1
        self._talk = Talk(self._control, plan.push, peers, deadline)
        alive, arena = tuple(arena.name for arena in arenas), arenas[0]
        handle = self._agent.handle(arena.bytes)

        def offer(mapped: tuple[str, ...]) -> Offer:
            return Offer(push=plan.push, arena=arena.name, handle=None if arena.name in mapped else handle, alive=alive)

        self._talk.meet(offer)
        if plan.stream:
            self._talk.all_prepared("the ranks to reach the arena")

    def _talking(self) -> Talk:
        assert self._talk is not None, "meet() comes first"
        return self._talk

    def _taken(self, bucket: int) -> None:
        """Wait until every rank has read a bucket: NIXL notifies."""
        talk, plan = self._talking(), self._plan
        assert plan is not None

        def missing() -> set[Peer]:
            for agent, notices in self._agent.notices().items():
                for notice in notices:
                    self._noticed(agent, notice, plan.push, talk)
            return talk.without(bucket)

        if bucket < 0:
            missing()  # looking is what lets ranks read over TCP, also while the trainer packs
        else:
            talk.wait(missing, f"bucket {bucket} to be read", _SPIN_S)

    def _noticed(self, agent: str, notice: bytes, push: str, talk: Talk) -> None:
        peer = self._agents.get(agent)
        try:
            message = wire.unpack_from_rank(notice)
        except msgspec.MsgspecError:
            return
        if peer is not None and isinstance(message, Taken) and message.push == push:
            talk.taken(peer, message.index)

    def acquire(self, bucket: int) -> None:
        """See `base.TrainerEnd`."""
        assert self._plan is not None
        self._taken(bucket - self._plan.slots)

    def announce(self, bucket: int, digests: tuple[int, ...]) -> None:
        """See `base.TrainerEnd`."""
        self._talking().announce(bucket, digests)

    def finish(self) -> float:
        """See `base.TrainerEnd`."""
        self._taken(self._last)
        return self._talking().all_prepared("the ranks to hold and verify everything")

    def call_off(self, error: BaseException) -> None:
        """See `base.TrainerEnd`."""
        if self._talk is not None:
            self._talk.call_off(error)
            self._talk = None

    def dismiss(self, engine: str) -> None:
        """See `base.TrainerEnd`."""
        self._known.pop(engine, None)

    def forget(self) -> None:
        """See `base.TrainerEnd`."""
        for registered in self._registered.values():
            self._agent.deregister(registered)
        self._registered.clear()

    def close(self) -> None:
        """Release registrations and socket; idempotent. The agent goes with its last reference."""
        self.forget()
        self._control.close()


class _WarmUp(threading.Thread):
    """Sends a notice and waits for the answer: NIXL connects when it is first used."""

    #: A thread inside of NIXL when the interpreter ends would take the process down with a signal.
    running: ClassVar[set[_WarmUp]] = set()

    def __init__(self, agent: Agent, trainer: str, timeout_s: float):
        super().__init__(name="weightsync-warm-up", daemon=True)
        self._agent, self._trainer, self._deadline, self._over = agent, trainer, Deadline(timeout_s), Event()
        self.running.add(self)
        self.start()

    def run(self) -> None:
        """Until the answer is here, or nobody waits for it any more."""
        with contextlib.suppress(WeightSyncError):  # the trainer, who waits too, tells
            self._agent.notify(self._trainer, _WARM, "the trainer")
            while self._deadline.left() and not self._over.is_set() and self._trainer not in self._agent.notices():
                time.sleep(_SPIN_S)
        self.running.discard(self)

    def end(self) -> None:
        """Give it up."""
        self._over.set()
        self.join(_END_S)


@atexit.register
def _end_warm_ups() -> None:
    for thread in list(_WarmUp.running):
        thread.end()


class Engine:
    """Engine end, one a rank, see `base.EngineEnd`. ``device`` is where it receives."""

    def __init__(self, device: torch.device):
        self._device = device
        self._control = EngineControl(remote=True)
        self.check, self.confirm = self._control.check, self._control.confirm
        self._agent: Agent | None = None
        self._trainer = ""
        self._warming: _WarmUp | None = None
        #: The sender's arenas by name.
        self._arenas: dict[str, NixlHandle] = {}
        #: Requests by arena, place and size of the stage, the latest last; and registrations by place and size.
        self._reads: dict[tuple[str, int, int, int], Reads] = {}
        self._registered: dict[tuple[int, int], Any] = {}
        self._own: list[torch.Tensor] = []

    def join(self, asked: Introduction, rank: int) -> wire.RankJoined:
        """See `base.EngineEnd`."""
        if not isinstance(asked, RegisterNixl):
            raise UnsupportedOption(f"nixl has no use for {type(asked).__name__}")
        if self._agent is None:
            self._agent = Agent(self._device, rank)
        self._drop()
        self._agent.know(asked.agent, asked.metadata, f"the trainer's agent {asked.agent}")
        self._trainer = asked.agent
        self._warming = _WarmUp(self._agent, asked.agent, min(asked.timeout_s, _WARM_S))
        way = asked.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        interface = self._agent.nic or (interface_of(local_address(way)) if way else "")
        return wire.RankJoined(
            rank=rank, device=str(self._device), interface=interface, agent=self._agent.name,
            metadata=self._agent.metadata(),
        )  # fmt: skip

    def meet(self, request: UpdateRequest, layout: Layout, rank: int, over: Event) -> Incoming:
        """See `base.EngineEnd`."""
        if self._agent is None or not self._trainer:
            raise TransferFailed(f"rank {rank} knows no NIXL agent: register_nixl comes before update_weights_via_nixl")
        call, offer = self._control.meet(request, rank, tuple(self._arenas), over)
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]
            self._release({key for key in self._reads if key[0] == name})
        if isinstance(offer.handle, NixlHandle):
            if offer.handle.agent != self._trainer:
                raise TransferFailed(f"the arena is of the agent {offer.handle.agent}, registered is {self._trainer}")
            self._agent.know(offer.handle.agent, offer.handle.metadata, "the trainer's agent")
            self._arenas[offer.arena] = offer.handle
        remote = self._arenas.get(offer.arena)
        if remote is None:
            raise TransferFailed(f"the arena {offer.arena} was never offered here; push again")
        if remote.nbytes < min(layout.nbytes, request.slots * request.bucket_bytes):
            raise TransferFailed(f"the arena holds {remote.nbytes} bytes, its buckets take more")
        return Incoming(self, call, request, layout, offer.arena, rank)

    def reads(self, arena: str, request: UpdateRequest, layout: Layout, stage: torch.Tensor | None) -> Reads:
        """The requests that fill ``stage``, or this end's own two buckets, made where they are not there yet."""
        assert self._agent is not None
        size, slots = request.bucket_bytes, request.slots
        memory = self._two_buckets(size) if stage is None else stage
        key = (arena, memory.data_ptr(), layout.nbytes if stage is not None else -layout.nbytes, size)
        found = self._reads.pop(key, None)
        if found is None:
            self._release(set(list(self._reads)[: max(0, len(self._reads) - _READS + 1)]))
            self._register(memory)
            here = _IN_FLIGHT if stage is None else layout.buckets(size)
            spans = [
                ((k % slots) * size, (k % here) * size, min(size, layout.nbytes - k * size))
                for k in range(layout.buckets(size))
            ]
            found = Reads(self._agent, self._arenas[arena], memory, spans)
        self._reads[key] = found
        return found

    def _two_buckets(self, size: int) -> torch.Tensor:
        if not self._own or self._own[0].numel() != _IN_FLIGHT * size:
            self._own = [torch.zeros(_IN_FLIGHT * size, dtype=torch.uint8, device=self._device)]
        return self._own[0]

    def _register(self, memory: torch.Tensor) -> None:
        assert self._agent is not None
        place = (memory.data_ptr(), memory.numel())
        if place not in self._registered and memory.numel():
            self._registered[place] = self._agent.register(memory)

    def _release(self, keys: set[tuple[str, int, int, int]]) -> None:
        for key in keys:
            self._reads.pop(key).release()
        used = {(reads.memory.data_ptr(), reads.memory.numel()) for reads in self._reads.values()}
        for place in self._registered.keys() - used:
            assert self._agent is not None
            self._agent.deregister(self._registered.pop(place))

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`; what may still be under way is cut off with the connection."""
        self._control.fail(push, error)
        self._cut()

    def _cut(self) -> None:
        self._release(set(self._reads))
        self._arenas.clear()
        self._own.clear()
        if self._agent is not None and self._trainer:
            self._agent.forget(self._trainer)

    def _drop(self) -> None:
        if self._warming is not None:
            self._warming.end()
        self._cut()
        self._trainer = ""

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._control.address:
            return False
        self._control.hang_up()
        self._drop()
        return True

    def close(self) -> None:
        """Release everything; idempotent."""
        self._drop()
        self._agent = None
        self._control.close()


class Incoming:
    """See `base.Incoming`."""

    whole: torch.Tensor | None = None

    def __init__(self, end: Engine, call: Call, request: UpdateRequest, layout: Layout, arena: str, rank: int):
        self._end, self._call, self._request, self._layout, self._rank = end, call, request, layout, rank
        self.arena = arena

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`; a bucket is read once it is announced, while the one before is still on its way."""
        size, count = self._request.bucket_bytes, self._layout.buckets(self._request.bucket_bytes)
        reads = self._end.reads(self.arena, self._request, self._layout, stage)
        # Without a stage the other buffer is still being looked at.
        ahead = _IN_FLIGHT if stage is not None else 1
        announced: list[Filled] = []
        posted = 0
        for number in range(count):
            while posted <= number or not self._here(reads, number):
                self._call.check(f"bucket {number} to be read from {reads.remote.agent}")
                while posted < min(len(announced), number + ahead):
                    with translated(self._what(posted, reads)):
                        reads.post(posted, wire.pack(Taken(push=self._request.push, index=posted)))
                    posted += 1
                message = self._call.heard(0.0 if posted > number else LOOK_UP_S)
                if message is not None:
                    announced.append(self._call.expect(message, len(announced)))
                else:
                    time.sleep(_SPIN_S)
            at = (number if stage is not None else number % _IN_FLIGHT) * size
            nbytes = min(size, self._layout.nbytes - number * size)
            if not nbytes:
                self._call.taken(number)  # nothing was read, so NIXL has notified nobody
            yield Bucket(number, reads.memory[at : at + nbytes], announced[number].digests)

    def _here(self, reads: Reads, number: int) -> bool:
        with translated(self._what(number, reads)):
            return reads.done(number)

    def _what(self, bucket: int, reads: Reads) -> str:
        start = bucket * self._request.bucket_bytes
        end = min(start + self._request.bucket_bytes, self._layout.nbytes)
        first = next(iter(self._layout.pieces(bucket, self._request.bucket_bytes)), None)
        name = f", from {first.entry.spec.name} on" if first is not None else ""
        return (
            f"rank {self._rank} could not read bucket {bucket} (bytes {start} to {end} of the stream{name}) from "
            f"{reads.remote.agent}"
        )
