"""What a transport offers to the drivers.

A transport moves the stream of `layout.Layout` from an arena of the trainer to every rank of every engine, and nothing
else: it knows neither models nor engines. The trainer end is driven by `outgoing.Outgoing`, the engine end by
`receiver.Receiver`, in a thread that never touches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple, Protocol

import torch

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.memory.arenas import Arena
from weightsync.protocol import http
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Digests, Subset


class Peer(NamedTuple):
    """One engine rank as the trainer end knows it."""

    engine: str
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.engine}"


Progress = Callable[[int], None]
"""Called with the bytes announced so far after every bucket."""


class Bucket(NamedTuple):
    """Part of the stream. ``data``, 1-D uint8, must not be read once the next bucket was asked for, unless it lies in
    memory of the reader's; ``digests`` are of what the rank keeps of the tensors that end in it."""

    number: int
    data: torch.Tensor
    digests: tuple[int, ...]


class Sending(Protocol):
    """One push as a trainer end sends it."""

    def await_ranks(self) -> None:
        """Return once every rank has connected. Raises `TransferFailed` or `PushTimeout`, naming the ranks."""

    def acquire(self, bucket: int) -> None:
        """Wait until the slot of this bucket may be written. Raises as `await_ranks`."""

    def needs(self) -> Iterable[Subset]:
        """What the ranks that have connected need of the tensors."""

    def announce(self, bucket: int, digests: Digests) -> None:
        """The bucket lies in its slot: let it travel. Raises as `await_ranks`."""

    def finish(self) -> float:
        """Wait until every rank holds the stream, verified; returns the seconds that the slowest took to verify.

        Raises as `await_ranks`.
        """

    def cancel(self, error: BaseException) -> None:
        """Tell the ranks that have connected that no more will come, because of ``error``."""


class TrainerEnd(Protocol):
    """Sends; lives as long as the sender, or until a push fails."""

    def address(self, engine: str) -> str:
        """Where the engine at this URL finds this end; names it to `EngineEnd.release`."""

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """What is to be told to which engine, by URL, before it can take part; nothing where it was told already.

        ``engines`` are all that will. Raises `UnsupportedOption` for what cannot work.
        """

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """Every engine has taken what `connect` told it. Raises `TransferFailed` or `PushTimeout`, by name."""

    def request(self, plan: UpdateRequest, engine: str) -> UpdateRequest:
        """The message that makes an engine's ranks come for the bytes: ``plan`` with this end's address and secret."""

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> Sending:
        """A push of the stream of ``layout`` to ``peers``; its bytes will lie in the first of ``arenas``.

        The other ``arenas`` are the sender's too, and ranks may still read them.
        """

    def disconnect(self, engine: str) -> None:
        """The engine at this URL was told to forget this end: it is to be introduced again."""

    def forget(self) -> None:
        """The arenas are about to be given back."""

    def close(self) -> None:
        """Release everything; idempotent."""


class Incoming(Protocol):
    """One push as an engine end receives it."""

    arena: str
    """Names the sender's memory."""

    @property
    def whole(self) -> Stream | None:
        """The stream, where the sender's memory is mapped and holds all of it: it is the stage then."""

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """Every bucket in order, each brought to its place in ``stage``, 1-D, where there is one.

        Raises `TransferFailed` or `PushTimeout`.
        """


class PeerRanks(Protocol):
    """The other ranks of a trainer of several processes, as rank 0 has them help a transport during a push."""

    size: int
    """How many ranks the trainer has."""
    filled: bool
    """Whether each of them has mapped the memory that holds the whole stream of this push."""

    def ask(self, transport: str, message: bytes, deadline: Deadline) -> None:
        """Hand a message, of JSON, to each one's `RankHelper`. Raises `TransferFailed`, `PushTimeout`."""

    def answered(self, to: str, deadline: Deadline) -> None:
        """Wait until all have done what they were asked ``to`` do. Raises, by rank, also what they have raised."""

    def check(self, deadline: Deadline) -> None:
        """Raise what one of them has raised, or `TransferFailed` where one has ended; there is no waiting for them."""

    def blamed(self, error: WeightSyncError) -> WeightSyncError:
        """The error, with what can be seen of those whose processes do not run."""


class RankHelper(Protocol):
    """What a rank of a trainer that is not rank 0 does for a transport."""

    def help(self, body: bytes, stream: torch.Tensor | None, check: Callable[[], None]) -> None:
        """Do what rank 0's end of the transport asks for; ``stream`` is the memory that was filled last, 1-D uint8.

        ``check`` raises once rank 0 does not wait for it any more. Raises `WeightSyncError`.
        """

    def close(self) -> None:
        """Release everything; idempotent."""


class EngineEnd(Protocol):
    """Receives, in one rank; lives as long as the rank and serves one push after another."""

    def join(self, asked: Handshake, rank: int) -> http.RankJoined:
        """Get ready for a sender. Raises `UnsupportedOption` or `TransferFailed`."""

    def check(self, request: UpdateRequest) -> None:
        """Raise `TransferFailed` at once for what must not be dialled."""

    def open(self, request: UpdateRequest, parts: Subset, rank: int, cancelled: Event) -> Incoming:
        """Come for the bytes, at least for what is kept of them. ``over`` is set when the push is called off.

        Raises `TransferFailed` or `PushTimeout`.
        """

    def confirm(self, push: str, verify_s: float) -> None:
        """Tell the sender that the push is ready to be committed."""

    def fail(self, push: str, error: BaseException) -> None:
        """Tell the sender that the push is over here."""

    def release(self, address: str) -> bool:
        """Give back what is held of the sender at ``address``, which has closed; false if nothing was."""

    def close(self) -> None:
        """Release everything; idempotent."""


@dataclass(frozen=True)
class TransportSpec:
    """A transport as `registry` finds it: all that others need to know of it.

    The *sources* of a push are the processes of the trainer that send the stream. Rank 0 is one, and alone it sends
    all. A transport with a ``rank_helper`` can use the others too, each for a share of the buckets that it chooses
    itself: its trainer end, in rank 0, finds them as `PeerRanks`.
    """

    name: str
    """As users and routes name it: ``update_weights_via_NAME``."""
    label: str
    """As errors and results call what it needs: "the engine has no LABEL"."""
    trainer_end: Callable[[torch.device, PeerRanks | None, str], TrainerEnd]
    """Makes a `TrainerEnd`: for arenas on this device, helped by these other sources if there are any, found by ranks
    at this address of the host's own if one is given."""
    engine_end: Callable[[torch.device], EngineEnd]
    """Makes an `EngineEnd`, for weights on this device."""
    rank_helper: Callable[[int], RankHelper] | None = None
    """Makes what the trainer's rank of this number does as a source, where others than rank 0 can be sources."""
    handshake: type[Handshake] | None = None
    """What its set-up method is sent, if it has one; see `registry`."""
    check_handshake: Callable[[Any, int], None] = lambda asked, ranks: None
    """Raise `UnsupportedOption` for a ``handshake`` that does not fit an engine of so many ranks."""
    local: bool = False
    """Whether ranks map the trainer's memory, arenas and shared parameters alike, and are met at private sockets."""
    preference: int | None = None
    """``transport="auto"`` takes the lowest that reaches an engine; it takes none that has none."""
    reason: str = ""
    """Why ``"auto"`` takes it, behind why it did not take those before."""
    lacks: Callable[[], str] = lambda: ""
    """What to install for it in this process; empty where it can be used."""
    apart: Callable[[http.OpenReply], tuple[str, str]] = lambda hello: ("", "")
    """Where an engine is that it cannot reach, and what can be done about that; empty if it can."""
    settings: Callable[[], dict[str, str]] = dict
    """The environment of this process that has to agree with that of the others."""
