"""The messages between the processes of one trainer, which are JSON; `control` sends and receives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import SourceError, TransferFailed, Weights, WeightSyncError
from weightsync.protocol.handles import Handle, SharedParametersHandle, ShmHandle
from weightsync.protocol.http import Message
from weightsync.tensors.held import HeldShards
from weightsync.trainer.ranks.assembly import HashPart, Orders, Work
from weightsync.trainer.ranks.assignment import Assignment


class RemoteError(Message, frozen=True):
    """An error of one rank, which another rank raises again."""

    error: str
    message: str
    weights: Weights
    engines: dict[str, Weights]
    phase: str = ""


class Greeting(Message, frozen=True):
    """rank -> 0: this rank has been called to do ``what``; ``nonce`` names its conversation.

    Its deadline is ``moment``, by its host's `time.monotonic`, ``left_s`` seconds after the greeting. ``held`` is what
    it holds; None if that is the same as in the last push, or if the call sends nothing. ``options`` are those of a
    sender that is being built, ``address`` is that of its host on the way to the store, and ``gpu`` names its GPU.
    """

    nonce: str
    what: str
    pid: int
    host: str
    space: str
    moment: float
    held: tuple[HeldShards, ...] | None = None
    failure: RemoteError | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict)
    left_s: float = 0.0
    address: str = ""
    gpu: str = ""


class Called(Message, frozen=True):
    """What can be read of the greeting of a rank of another release, see `Greeting`."""

    nonce: str
    options: dict[str, str] = msgspec.field(default_factory=dict)


class Welcome(Message, frozen=True, tag="welcome"):
    """0 -> rank: the session that names later conversations, and rank 0's process."""

    session: str
    pid: int
    space: str


class Provide(Message, frozen=True, tag="provide"):
    """0 -> lowest rank of another domain: make an arena for its ranks.

    It has the name of rank 0's, see `Fill`, and is in the host's memory or ``on_gpu``.
    """

    arena: str
    nbytes: int
    alive: tuple[str, ...]
    on_gpu: bool = False


class Lend(Message, frozen=True, tag="lend"):
    """0 -> lowest rank of another domain: give one engine rank a handle of what you provide for this arena."""

    arena: str


class Fill(Message, frozen=True, tag="fill"):
    """0 -> rank: write into the arena; without ``orders``, those of the last push hold.

    ``arena`` is the name of rank 0's; ``handle`` is that of the arena on the rank's host, None if that host provides
    nothing, or if the rank has made it on its GPU. ``alive`` names the arenas that are still in use, ``algorithm`` is
    the digest, empty for none.
    """

    arena: str
    handle: ShmHandle | None
    alive: tuple[str, ...]
    algorithm: str
    orders: Orders | None = None


class Share(Message, frozen=True, tag="share"):
    """0 -> rank: offer ``pieces`` of your parameters to be read in place; None if they are the same as last time.

    ``known`` is the name of the offer that rank 0 has. They are in the host's memory or ``on_gpu``.
    """

    known: str
    pieces: tuple[Assignment, ...] | None
    on_gpu: bool = False


class Shared(Message, frozen=True):
    """The offer: no name if the rank offers nothing, and no handle if rank 0 has it, or for a GPU, see `Lend`."""

    name: str = ""
    handle: SharedParametersHandle | None = None


class Hash(Message, frozen=True, tag="hash"):
    """0 -> rank: all ranks have written; hash. Or hash what you offer: ``parts``, None if they are the same as last
    time."""

    algorithm: str = ""
    parts: tuple[HashPart, ...] | None = None


class Compare(Message, frozen=True, tag="compare"):
    """0 -> rank: hash ``copies``, which other ranks hold too, with the digest ``algorithm``."""

    algorithm: str
    copies: tuple[Assignment, ...]


class Iterate(Message, frozen=True, tag="iterate"):
    """0 -> rank: read everything that the iterator yields, so that rank 0's can yield it."""


class Release(Message, frozen=True, tag="release"):
    """0 -> rank: the tensors of all ranks are read; whoever waits for that in `sender.Sender.push_async` may go on."""


class Assist(Message, frozen=True, tag="assist"):
    """0 -> rank: help ``transport``; ``body`` is that transport's own message."""

    transport: str
    body: msgspec.Raw


class Outcome(Message, frozen=True, tag="over"):
    """0 -> rank: how the call ended."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: RemoteError | None = None


class WorkDone(Message, frozen=True):
    """rank -> 0: the request is done, or has failed. ``left_s`` is what is left of the rank's deadline.

    ``body`` is a transport's own message, see `Assist`; ``lent`` is the reply to `Lend`.
    """

    work: Work | None = None
    failure: RemoteError | None = None
    handle: ShmHandle | None = None
    left_s: float | None = None
    shared: Shared | None = None
    lent: Handle | None = None
    body: msgspec.Raw = msgspec.Raw(b"null")


Asked = Provide | Lend | Fill | Share | Hash | Compare | Iterate | Release | Assist
ToRank = Welcome | Asked | Outcome
Replies = Callable[[str, Deadline, Sequence[int]], Mapping[int, WorkDone]]
"""Waits until these ranks have done what they were asked to do; their replies. Raises what a rank has raised."""


def remote_error_of(error: BaseException) -> RemoteError:
    """An error in the form in which it is sent to another rank."""
    if isinstance(error, WeightSyncError):
        return RemoteError(type(error).__name__, error.message, error.weights, error.engines, error.phase)
    kind = SourceError if isinstance(error, Exception) else TransferFailed
    return RemoteError(kind.__name__, f"{type(error).__name__}: {error}", "unchanged", {})


def as_exception(failure: RemoteError, prefix: str = "") -> WeightSyncError:
    """The error that another rank sent, as an exception to raise here."""
    kind = errors.named(failure.error)
    error = kind(f"{prefix}{failure.message}", weights=failure.weights, engines=failure.engines)
    error.phase = failure.phase
    return error
