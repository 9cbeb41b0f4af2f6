"""Rank 0 of a trainer of several processes: the only rank that talks to the engines.

Every public call of a `Sender` is one conversation: each rank sends rank 0 a greeting, does what rank 0 asks for, and
receives the outcome. If one rank raises, all raise.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, TypeVar

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import (
    TransferFailed,
    UnsupportedOption,
    Weights,
    WeightSyncError,
    WrongState,
)
from weightsync.memory import arenas
from weightsync.memory.arenas import CudaArena, ShmArena
from weightsync.protocol import http
from weightsync.protocol.handles import Handle
from weightsync.sources import Source
from weightsync.tensors import digest
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Found, Wanted
from weightsync.trainer.ranks import assembly
from weightsync.trainer.ranks.assembly import CheckReplicas, Orders, Work
from weightsync.trainer.ranks.assignment import Plan, plan
from weightsync.trainer.ranks.control import CoordinatorControl
from weightsync.trainer.ranks.conversation import Act, Ranks, earlier
from weightsync.trainer.ranks.domains import Domains
from weightsync.trainer.ranks.in_place import Offers
from weightsync.trainer.ranks.messages import (
    Assist,
    Called,
    Compare,
    Fill,
    Greeting,
    Hash,
    Iterate,
    Outcome,
    Release,
    ToRank,
    Welcome,
    WorkDone,
    as_exception,
    remote_error_of,
)
from weightsync.trainer.reading import Reading

#: With ``check_replicas="first"``, one push of so many compares what several ranks hold.
_COMPARE_EVERY: Final = 100
#: Seconds to wait, after a connection was lost, for the end of the process at the other end to become visible, and
#: between two looks.
_ENDS_S, _LOOK_S = 0.3, 0.01
#: What to do about ranks that differ.
_ALIKE: Final = "every rank must build a Sender with the same arguments, of the same version of weightsync"
_T = TypeVar("_T")


def _moment(greeting: Greeting) -> float:
    """When a rank's deadline passes, by this host's clock. That of another host counts from when its greeting is read,
    until its first reply, see `WorkDone`."""
    here = greeting.host == arenas.host_id()
    return greeting.moment if here else time.monotonic() + greeting.left_s


class Coordinator(Ranks):
    """The role of rank 0 in a trainer of ``size`` processes."""

    def __init__(self, group: str, options: Mapping[str, str], size: int):
        super().__init__(options)
        self._control = CoordinatorControl(group)
        self.size, self._others = size, range(1, size)
        #: By rank: the nonce of its conversation, and the number of messages sent to it.
        self._nonces: dict[int, str] = {}
        self._count: dict[int, int] = {}
        self._held: dict[int, tuple[HeldShards, ...]] = {}
        self._plan: Plan | None = None
        #: The plan by which the ranks' copies were last compared, and the number of pushes since.
        self._compared: Plan | None = None
        self._since = 0
        self._orders: list[Orders] = []
        #: The layout that the orders are for.
        self._layout: Layout | None = None
        #: The GPU of each other rank, empty for one without.
        self.gpus: Sequence[str] = ()
        #: The addresses of the other ranks' hosts, if there are several.
        self.addresses: Set[str] = frozenset()
        #: The ranks that were asked last.
        self._asked: Sequence[int] = ()
        #: Whether every rank has mapped the arena that `fill` has filled in this push.
        self.filled = False
        #: Replies of the other ranks to the last message to each.
        self._replies: dict[int, bytes] = {}
        #: The names of the subsets that the ranks' orders cover.
        self._demand: Set[str] = frozenset()
        self._ordered: dict[int, Orders] = {}
        #: What the ranks offer to be read in place, and the arenas that they provide.
        self.offers = Offers(size, self._send, self._await_replies)
        self.domains = Domains(size, self._send, self._await_replies)

    def _take_part(
        self,
        what: str,
        kind: Any,
        deadline: Deadline,
        failure: Exception | None,
        act: Act[_T],
        engines: Callable[[Deadline], Mapping[str, Weights]],
        reading: Reading,
    ) -> _T:
        self._nonces.clear()
        self.filled = False
        try:
            try:
                self._await_greetings(what, deadline)
            except WeightSyncError:
                if failure is not None:
                    raise failure from None
                raise
            if failure is not None:
                raise failure
            result = act(self._source, deadline)
        except BaseException as error:
            self._ordered.clear()
            self.domains.forget()
            self.offers.forget()
            if isinstance(error, WeightSyncError) and not error.engines:
                error.settle(dict(engines(deadline)))
            self._send_outcome(Outcome(failure=remote_error_of(error)))
            raise
        self._send_outcome(Outcome(result=msgspec.Raw(msgspec.json.encode(result))))
        return result

    def _await_greetings(self, what: str, deadline: Deadline) -> None:
        """Wait for the greeting of every other rank. Raises the error of the lowest rank that reports one."""
        names = {rank: self._greeting_name(rank) for rank in self._others}
        to = f"to {what} (in a process group of {self.size} every rank builds a Sender and makes the same calls)"
        bodies: dict[int, bytes] = {}
        try:
            if not self._session:
                self._control.open(deadline)
            self._control.take(names, bodies, deadline, to)
        finally:  # ranks that are there get the outcome, also if another is missing
            greetings = self._read_greetings(bodies)
        if not self._session:
            self._welcome(greetings)
        deadline.advance(min(map(_moment, greetings.values())) - earlier(deadline))
        for rank, greeting in greetings.items():
            if greeting.what != what:
                raise WrongState(
                    f"trainer rank {rank} is in {greeting.what!r} and rank 0 in {what!r}; "
                    "every rank must make the same calls"
                )
        for rank, greeting in greetings.items():
            if greeting.failure is not None:
                raise as_exception(greeting.failure, f"trainer rank {rank}: ")
        for rank, greeting in greetings.items():
            if greeting.held is not None:
                self._held[rank], self._plan = greeting.held, None

    def _read_greetings(self, bodies: Mapping[int, bytes]) -> Mapping[int, Greeting]:
        """Begin a conversation with every rank that has sent one of these. Raises `UnsupportedOption`."""
        greetings: dict[int, Greeting] = {}
        unread: list[WeightSyncError] = []
        for rank, body in sorted(bodies.items()):
            try:
                greetings[rank] = greeting = http.from_json(body, Greeting)
            except msgspec.MsgspecError as error:
                unread.append(self._unread(rank, body, error))
                continue
            self._begin(rank, greeting.nonce)
            if greeting.space == arenas.processes_id():
                self._control.pids[rank] = greeting.pid
        if unread:
            raise unread[0]
        return greetings

    def _begin(self, rank: int, nonce: str) -> None:
        # Replies in its last conversation, which rank 0 no longer waited for; it may have begun another one.
        self._control.forget(rank, but=self._greeting_name(rank))
        self._nonces[rank], self._count[rank] = nonce, 0

    def _unread(self, rank: int, body: bytes, error: msgspec.MsgspecError) -> WeightSyncError:
        """What to raise for a greeting that cannot be read. The rank gets it too, if its conversation can be told."""
        version = "an unknown version"
        with contextlib.suppress(msgspec.MsgspecError):
            called = http.from_json(body, Called)
            version = called.options.get("weightsync", version)
            self._begin(rank, called.nonce)
        return UnsupportedOption(
            f"the first message of trainer rank {rank} cannot be read ({error}); it has weightsync {version} and "
            f"rank 0 {http.package_version()}; {_ALIKE}"
        )

    def _welcome(self, greetings: Mapping[int, Greeting]) -> None:
        self.domains.on([arenas.host_id(), *(greetings[rank].host for rank in self._others)])
        self.addresses = frozenset(greetings[rank].address for rank in self._others if self.domains.host_of[rank])
        self.gpus = [greetings[rank].gpu for rank in self._others]
        for rank, greeting in greetings.items():
            for name, value in self._options.items():
                other = greeting.options.get(name, "of an earlier release" if name == "weightsync" else value)
                if other != value:
                    raise UnsupportedOption(f"trainer rank {rank} has {name} {other} and rank 0 {value}; {_ALIKE}")
        self._session, self._control.is_complete = secrets.token_hex(8), True
        for rank in self._others:
            self._send(rank, Welcome(self._session, os.getpid(), arenas.processes_id()))

    def planned(self, source: Source) -> Plan:
        """Which rank provides what, by what each rank holds according to its greeting. Raises `SourceError`."""
        if self._plan is None or self._held.get(0) != source.held:
            self._held[0] = source.held
            self._plan, self._orders = plan([self._held[rank] for rank in range(self.size)]), []
        return self._plan

    @property
    def is_near(self) -> bool:
        """Whether all ranks are on one host, with the same process numbers."""
        return not self.addresses and len(self._control.pids) == len(self._others)

    @property
    def offered(self) -> Sequence[str]:
        """See `base.PeerRanks`."""
        return self.offers.names

    @property
    def in_one_domain(self) -> bool:
        """See `base.PeerRanks`."""
        return not any(self.domains.of)

    @property
    def senders(self) -> Sequence[int]:
        """See `base.PeerRanks`."""
        return range(self.size) if self.in_one_domain else self.domains.lowest

    def lend(self, arena: str, deadline: Deadline) -> Sequence[Handle | None]:
        """See `base.PeerRanks`."""
        lender = self.domains if self.domains.lends(arena) else self.offers
        return lender.lend(arena, deadline)

    def separate(self, apart: bool) -> None:
        """From now on each process has an arena of its own, if ``apart``; otherwise each host has one."""
        if apart != self.domains.apart:
            self.domains.separate(apart)
            self._orders = []

    def compare(self, source: Source, how: CheckReplicas, deadline: Deadline) -> None:
        """Compare what several ranks hold, at the first push and every hundredth, or always.

        `planned` is called first. Raises `SourceError` that names tensors of which two ranks hold different values.
        """
        assert self._plan is not None, "planned() is called first"
        if how == "first" and self._compared is self._plan and self._since < _COMPARE_EVERY:
            self._since += 1
            return
        copies, algorithm = self._plan.copies, digest.algorithm_for(source.device)
        if any(copies):
            for rank in self._others:
                self._send(rank, Compare(algorithm, copies[rank]))
            with assembly.reading():
                hashed = [assembly.hash_copies(source, copies[0], algorithm)]
            hashed += self._work("to hash what other ranks hold too", deadline)
            assembly.check_equal(self._plan.manifest, hashed)
        self._compared, self._since = self._plan, 1

    def fill(
        self,
        source: Source,
        deadline: Deadline,
        layout: Layout,
        arena: ShmArena | CudaArena,
        alive: tuple[str, ...],
        algorithm: str,
        demand: Wanted,
    ) -> tuple[Found, Work]:
        """Have every rank write its part into its domain's arena and hash; the digests, and the slowest rank's times.

        `Domains.provide` is called first, if there are several domains. ``alive`` names the arenas that are in use.
        Raises `TransferFailed` or `PushTimeout` that names the rank, and what a rank has raised.
        """
        assert self._plan is not None, "planned() is called first"
        if not self._orders or self._demand != demand.names or self._layout is not layout:
            self._orders = assembly.orders_of(self._plan, layout, demand, self.domains.of)
            self._demand, self._layout = set(demand.names), layout
        orders, handles = self._orders, self.domains.handles(arena.name, layout)
        if isinstance(arena, ShmArena):
            handles[0] = arena.handle()
        for rank in self._others:
            new = None if self._ordered.get(rank) is orders[rank] else orders[rank]
            handle = handles.get(self.domains.of[rank])
            self._send(rank, Fill(arena.name, handle, alive, algorithm, new))
        stream = arena.bytes[: layout.domain_bytes(0)]
        written = [assembly.write(source, orders[0].write, stream, algorithm)]
        written += self._work("to write its part into the arena", deadline)
        self._ordered = {rank: orders[rank] for rank in self._others}
        nbytes = sum(work.nbytes for work in written)
        if nbytes != layout.payload_bytes:
            raise TransferFailed(f"the trainer's ranks wrote {nbytes} of {layout.payload_bytes} bytes")
        hashed: list[Work] = []
        if algorithm and any(one.hash for one in orders):
            for rank in self._others:
                self._send(rank, Hash())
            hashed = [assembly.hash_parts(orders[0].hash, stream, algorithm)]
            hashed += self._work("to hash its part of the arena", deadline)
        self.filled = True
        found = {(tensor, box): value for work in (*written, *hashed) for tensor, box, value in work.digests}
        gather_s = max(work.gather_s for work in written)
        digest_s = max(work.digest_s for work in written) + max([0.0, *(work.digest_s for work in hashed)])
        return found, Work((), nbytes, gather_s, digest_s, sum(work.not_finite for work in written))

    def together(self, read: Callable[[], _T], deadline: Deadline) -> _T:
        """Read an iterator, while every other rank reads its own. Raises what a rank has raised."""
        for rank in self._others:
            self._send(rank, Iterate())
        found = read()
        self._await_replies("to read its iterator to the end", deadline)
        return found

    def release(self, deadline: Deadline) -> None:
        """Let every rank go on whose tensors are to be read early."""
        for rank in self._others:
            self._send(rank, Release())
        self._await_replies("to go on", deadline)

    def ask(self, transport: str, messages: Mapping[int, bytes]) -> None:
        """See `base.PeerRanks`."""
        for rank, message in messages.items():
            self._send(rank, Assist(transport, msgspec.Raw(message)))
        self._asked = list(messages)

    def answered(self, to: str, deadline: Deadline) -> dict[int, bytes]:
        """See `base.PeerRanks`."""
        return {rank: bytes(done.body) for rank, done in self._await_replies(to, deadline, self._asked).items()}

    def check(self) -> None:
        """See `base.PeerRanks`."""
        names = self._reply_names(self._asked)
        self._control.poll(names, self._replies)
        self._read_replies(self._asked)
        self._control.check(names, self._replies, "to help")

    def blamed(self, error: WeightSyncError) -> WeightSyncError:
        """See `base.PeerRanks`."""
        until = Deadline(_ENDS_S)
        while not (faulty := [rank for rank in self._others if not self._control.runs(rank)]) and until.left():
            time.sleep(_LOOK_S)
        if not faulty or self._control.describe(faulty) in str(error):
            return error
        message = f"{error}; {self._control.describe(faulty)} was to send its part"
        return type(error)(message, weights=error.weights, engines=error.engines)

    def _reply_names(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: f"{self._nonces[rank]}/up/{self._count[rank]}" for rank in ranks}

    def _await_replies(self, to: str, deadline: Deadline, ranks: Sequence[int] | None = None) -> dict[int, WorkDone]:
        """Wait until all ranks have replied, or only these. Raises what a rank has raised."""
        asked = self._others if ranks is None else ranks
        if asked:
            self._control.take(self._reply_names(asked), self._replies, deadline, to)
        replies = self._read_replies(asked)
        for rank, done in replies.items():
            if self.domains.host_of[rank] and done.left_s is not None:  # its clock is another
                deadline.advance(time.monotonic() + done.left_s - earlier(deadline))
        return replies

    def _work(self, to: str, deadline: Deadline) -> list[Work]:
        """As `_await_replies`, for what all ranks have done."""
        return [done.work for done in self._await_replies(to, deadline).values() if done.work is not None]

    def _read_replies(self, ranks: Sequence[int]) -> dict[int, WorkDone]:
        found = {rank: http.from_json(self._replies[rank], WorkDone) for rank in ranks if rank in self._replies}
        for rank, done in found.items():
            if done.failure is not None:
                raise as_exception(done.failure, f"trainer rank {rank}: ")
        return found

    def _send(self, rank: int, message: ToRank) -> None:
        self._count[rank] += 1
        self._replies.pop(rank, None)
        self._control.send(rank, f"{self._nonces[rank]}/down/{self._count[rank]}", http.to_json(message))

    def _send_outcome(self, outcome: Outcome) -> None:
        """A rank that is gone, or does not get it in time, ends at its own deadline."""
        for rank in self._nonces:
            self._send(rank, outcome)

    def close(self) -> None:
        """Release the connections, once the outcome of the last call is on its way to the other ranks. Idempotent."""
        self._control.close()
