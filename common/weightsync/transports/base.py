"""The interfaces of a transport.

A transport moves the stream of `layout.Layout` from the trainer's arena to every rank of every engine, and nothing
else: it knows neither models nor engines. `outgoing.Outgoing` drives the trainer end. `receiver.Receiver` drives the
engine end, in a thread that never touches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed, WeightSyncError
from weightsync.memory.arenas import Arena
from weightsync.protocol import http
from weightsync.protocol.diagnosis import Finding
from weightsync.protocol.expected import Lent
from weightsync.protocol.handles import Handle
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Digests, Subset


class Peer(NamedTuple):
    """One engine rank, identified by the engine's URL and the rank's number in that engine."""

    engine: str
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.engine}"


Progress = Callable[[int], None]
"""Called after every bucket with the number of bytes announced so far."""


class Bucket(NamedTuple):
    """One bucket of the stream, as received by a rank.

    ``data`` (1-D uint8) is valid until the next bucket is requested, or longer if it lies in the rank's own stage.
    ``digests`` belong to the tensors that end in this bucket, each computed over the part that the rank needs.
    ``begins`` and ``digest`` as in `control.BucketReady`.
    """

    number: int
    data: torch.Tensor
    digests: tuple[int, ...]
    begins: tuple[int, ...] = ()
    digest: int | None = None


class Sending(Protocol):
    """One push as a trainer end sends it."""

    def await_ranks(self) -> None:
        """Wait until every rank has connected. Raises `TransferFailed` or `PushTimeout`, naming the ranks."""

    def needs(self) -> Iterable[Subset]:
        """The subset that each connected rank needs."""

    def acquire(self, bucket: int) -> None:
        """Wait until the slot of this bucket may be written. Raises `TransferFailed` or `PushTimeout`."""

    def announce(self, bucket: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        """Send the bucket, which now lies in its slot; ``begins`` as in `control.BucketReady`.

        Raises `TransferFailed` or `PushTimeout`.
        """

    def finish(self) -> float:
        """Wait until every rank has received and verified the stream; returns the slowest verification, in seconds.

        Raises `TransferFailed` or `PushTimeout`.
        """

    def cancel(self, error: BaseException) -> None:
        """Tell the connected ranks that this push is cancelled because of ``error``."""


class TrainerEnd(Protocol):
    """The sending side of a transport. It lives as long as the `Sender`, or until a push fails."""

    def address(self, engine: str) -> str:
        """The address at which the engine at this URL reaches this end; `EngineEnd.release` takes the same string."""

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """The handshake to send to each engine, by URL; engines that are connected already are left out.

        ``engines`` are all engines of the next push. Raises `UnsupportedOption` if an engine cannot be served.
        """

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """Complete the connection once every engine has answered its handshake; ``replies`` are by URL.

        Raises `TransferFailed` or `PushTimeout`, naming the ranks.
        """

    def request(self, plan: UpdateRequest, engine: str) -> UpdateRequest:
        """The request that makes an engine's ranks connect: ``plan`` with this end's address and a secret."""

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> Sending:
        """A push of the stream of ``layout`` to ``peers``, whose bytes will lie in ``arenas[0]``.

        ``arenas`` are all arenas of the sender; ranks unmap any other.
        """

    def disconnect(self, engine: str) -> None:
        """Treat the engine at this URL as unknown: it has dropped this end and needs a new handshake."""

    def forget(self) -> None:
        """Release every reference to the arenas, which are about to be freed."""

    def close(self) -> None:
        """Release everything; idempotent."""


class Incoming(Protocol):
    """One push as an engine end receives it."""

    arena: str
    """The name of the sender's memory that the bytes come from."""

    @property
    def whole(self) -> Stream | None:
        """The whole stream, if the sender's memory is mapped and holds all of it; that memory is then the stage."""

    @property
    def lingers(self) -> bool:
        """Whether what was received may be written again, or read by other ranks, after the push. No other version may
        be received in that memory."""

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """Yield every bucket in order; with a ``stage`` (1-D uint8), each is received at its offset there.

        When the next is asked for, the one before is verified, and is passed on if other ranks wait for it. Raises
        `TransferFailed` or `PushTimeout`.
        """


class PeerRanks(Protocol):
    """The other ranks of a multi-process trainer, through which rank 0's trainer end gets help during a push."""

    filled: bool
    """Whether every rank has mapped the memory that it sends from in this push."""
    addresses: Set[str]
    """Of the ranks' hosts, if there are several: the addresses of the others."""

    @property
    def offered(self) -> Sequence[str]:
        """The name of what each rank but 0 offers, if it is read in place; empty for one that provides nothing."""

    @property
    def in_one_domain(self) -> bool:
        """Whether the ranks share one arena, see `domains.DividedLayout`."""

    @property
    def senders(self) -> Sequence[int]:
        """The ranks that send, rank 0 first: all of them, or of several memory domains the lowest of each.

        Then the number of a sender is that of its domain.
        """

    def lend(self, arena: str, deadline: Deadline) -> Sequence[Handle | None]:
        """Of each memory domain but that of rank 0, a handle of what it provides beside rank 0's arena of this name,
        for one engine rank; None if that is nothing. Raises as `answered`."""

    def ask(self, transport: str, messages: Mapping[int, bytes]) -> None:
        """Send JSON messages to ranks' `RankHelper`, by rank."""

    def answered(self, to: str, deadline: Deadline) -> Mapping[int, bytes]:
        """Wait until they have done what they were asked; ``to`` describes that in errors ("to join the group").

        Returns the reply of each `RankHelper`, by rank; ``b"null"`` if it had none.
        Raises the error of a rank that failed, or `TransferFailed` or `PushTimeout`, naming the ranks.
        """

    def check(self) -> None:
        """Without waiting, raise the error of a rank that failed, or `TransferFailed` if one has ended."""

    def blamed(self, error: WeightSyncError) -> WeightSyncError:
        """``error``, extended with the state of every rank whose process is not running."""


def check_cancelled(interrupted: Callable[[], bool]) -> None:
    """For a `RankHelper` to which rank 0 says nothing more before its reply, unless it cancels the push: raise
    `TransferFailed` if it has."""
    if interrupted():
        raise TransferFailed("the push was cancelled")


class RankHelper(Protocol):
    """A transport's code in a trainer rank other than rank 0."""

    def help(self, body: bytes, stream: torch.Tensor | None, interrupted: Callable[[], bool]) -> bytes | None:
        """Serve one message of rank 0's `TrainerEnd`, and return the reply, JSON, if there is one.

        ``stream`` is the memory that was filled last, or is to be filled next (1-D uint8). ``interrupted`` says whether
        rank 0 has sent its next message, which it does while it waits for a reply only if it has more to say or cancels
        the push; it raises if rank 0 has ended. Raises `WeightSyncError`.
        """

    def forget(self) -> None:
        """Release every reference to that memory, which is about to be freed."""

    def close(self) -> None:
        """Release everything; idempotent."""


class EngineEnd(Protocol):
    """The receiving side of a transport in one rank. It lives as long as the rank and serves one push at a time."""

    bytes_per_s: float
    """The speed of the link, if a rank is sent only what it needs of the stream, and it was measured; otherwise 0."""

    def join(self, handshake: Handshake, rank: int) -> http.RankJoined:
        """Connect to a sender. Raises `UnsupportedOption` or `TransferFailed`."""

    def check(self, request: UpdateRequest) -> None:
        """Raise `TransferFailed` if the sender's address in ``request`` must not be dialled; dials nothing."""

    def open(self, request: UpdateRequest, subset: Subset, rank: int, cancelled: Event) -> Incoming:
        """Connect to the sender and return the incoming push; ``subset`` is what this rank needs of each tensor.

        ``cancelled`` is set when the push is cancelled. Raises `TransferFailed` or `PushTimeout`.
        """

    def confirm(self, push: str, verify_s: float) -> None:
        """Tell the sender that this rank is ready to commit; verifying took ``verify_s`` seconds."""

    def fail(self, push: str, error: BaseException) -> None:
        """Tell the sender that the push has failed in this rank."""

    def release(self, address: str) -> bool:
        """Release whatever is held for the closed sender at ``address``; returns whether anything was."""

    def close(self) -> None:
        """Release everything; idempotent."""


@runtime_checkable
class Borrower(Protocol):
    """What an `EngineEnd` of a transport that is `TransportSpec.local` can do as well."""

    def borrow(self, lent: Lent) -> None:
        """Map what a sender lends before its first push. Raises `TransferFailed` or `OSError`."""

    def give_back(self, but: str = "") -> None:
        """Unmap what was lent, but by the sender at this address, and not used since."""


@dataclass(frozen=True)
class TransportSpec:
    """A transport, as `registry` finds it.

    By default rank 0 of the trainer sends the whole stream. A transport with a ``rank_helper`` can have the other
    trainer ranks send too: its trainer end, in rank 0, reaches them as `PeerRanks` and divides the buckets.
    """

    name: str
    """The name in ``Sender(transport=NAME)`` and in the route ``update_weights_via_NAME``."""
    label: str
    """What the transport needs, as errors and results call it: "the engine has no LABEL"."""
    trainer_end: Callable[[torch.device, PeerRanks | None, str], TrainerEnd]
    """Makes a `TrainerEnd` from the arenas' device, the other trainer ranks (None if there are none), and the address
    of this host that ranks dial (empty: this host's address on the route to each engine)."""
    engine_end: Callable[[torch.device], EngineEnd]
    """Makes an `EngineEnd` from the device of the weights."""
    rank_helper: Callable[[int], RankHelper] | None = None
    """Makes the `RankHelper` of a trainer rank from its number; None if rank 0 alone sends."""
    several_hosts: bool = False
    """Whether a trainer's hosts can each send what they hold of the stream, see `domains.DividedLayout`."""
    handshake: type[Handshake] | None = None
    """The message that its set-up method takes; None if there is no such method. See `registry`."""
    check_handshake: Callable[[Any, int], None] = lambda handshake, ranks: None
    """Raises `UnsupportedOption` if a handshake does not fit an engine with this many ranks."""
    local: bool = False
    """Whether ranks map the trainer's memory (arenas and shared parameters) and connect over private sockets."""
    preference: int | None = None
    """``transport="auto"`` picks the lowest that reaches an engine, and never a transport without one."""
    reason: str = ""
    """Why ``"auto"`` picks this transport; reported after the reasons against those with a lower preference."""
    lacks: Callable[[], str] = lambda: ""
    """How to install what is missing in this process; empty if the transport can be used."""
    apart: Callable[[http.OpenReply], tuple[str, str]] = lambda hello: ("", "")
    """If an engine cannot be reached: where it runs, and what the user can do. Two empty strings if it can."""
    settings: Callable[[], dict[str, str]] = dict
    """The environment settings that must agree between this process and the other ranks."""
    findings: Callable[[torch.device, int], list[Finding]] = lambda device, rank: []
    """What of this host or its settings the transport would use for memory on this device, in this rank (0 in the
    trainer), and what hinders it. Called only if it lacks nothing; touches nothing."""
