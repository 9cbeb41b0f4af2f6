"""Every message that crosses a process, once: JSON over HTTP here, msgpack over ZMQ in `control`.

Rules of evolution: a field added later has a default, a tag is never reused, bulk bytes never ride in a message.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from weightsync.errors import Weights, WeightSyncError
from weightsync.protocol import codec
from weightsync.protocol.codec import Shape, Text
from weightsync.protocol.model_status import ModelStatus

#: (major, minor). Majors must match; the lower minor is spoken.
PROTOCOL: Final[tuple[int, int]] = (1, 0)

UPDATE: Final = "update_weights_via_"  #: What begins the name of every method that announces a push.

PREFIX: Final = "/weightsync"  #: Where every engine carries its admin routes.

#: What happens to requests in flight when a version commits; see the README.
PauseMode = Literal["retract", "wait", "abort", "keep"]
#: What is compared: each tensor in every rank's stage, also what the engine then computes with, nothing.
Verify = Literal["digest", "deep", "off"]
#: What one rank, or the whole of an engine, is doing; `states.ENGINE` says what leads where. ``unsynced`` is an
#: engine that was started so that it must not serve before its first push.
State = Literal[
    "serving",
    "receiving",
    "prepared",
    "applying",
    "dirty",
    "dirty_receiving",
    "dirty_prepared",
    "dirty_applying",
    "unsynced",
]

#: Largest control message accepted over HTTP, in bytes; a manifest of 100,000 tensors takes about 12 MB.
MAX_BODY_BYTES: Final = 64 << 20
MAX_FRAME_BYTES: Final = 16 << 20  #: Largest message over ZMQ; the digests of 100,000 tensors take less than 1 MB.
MAX_TIMEOUT_S: Final = 86400.0  #: Longest that anything may be asked to take, in seconds.
LOOK_S: Final = 5.0  #: For what only looks or forgets, where nobody says how long it may take, in seconds.
Timeout = Annotated[float, msgspec.Meta(ge=0.01, le=MAX_TIMEOUT_S)]


@functools.cache
def package_version() -> str:
    """Of this package, which the sides tell each other for error messages alone."""
    from importlib.metadata import version  # takes a command line as long as all else together

    return version("weightsync")


class Message(msgspec.Struct, frozen=True):
    """Base of all messages; unknown fields are ignored, so that a newer minor version can add some."""


from_json, to_json = codec.from_json, codec.to_json

# --- plain data -------------------------------------------------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a checkpoint: ``dtype`` as torch spells it without the prefix (``"bfloat16"``)."""

    name: Text
    dtype: Text
    shape: Shape


class RankInfo(Message, frozen=True):
    """One rank of an engine: a process that holds a full or partial copy of the weights.

    ``device`` is a torch device type (``"cpu"``, ``"cuda"``), ``device_uuid`` names the accelerator under any
    remapping of visible devices. ``free_bytes`` is the memory a stage could take on that device. ``transports`` are
    those it has what it needs for, ``settings`` the environment variables that both ends should agree on,
    ``process_space`` the name of the space in which ``pid`` is unique, on the ``host`` that `arenas.host_id` names;
    ``started`` is when that process was, see `processes.started`. Where these are empty, nobody looks for the process.
    """

    rank: int
    pid: int
    device: str
    device_uuid: str = ""
    free_bytes: int = 0
    transports: tuple[Text, ...] = ("ipc_zmq",)  # all there was before ranks said so
    settings: dict[Text, Text] = {}
    process_space: str = ""
    host: Text = ""
    started: int = 0


# --- HTTP: trainer -> engine front end --------------------------------------------------------------------------------


class OpenRequest(Message, frozen=True):
    """First message of a sender to an engine; ``timeout_s``, here and below, is how long it waits for the ranks."""

    protocol: tuple[int, int]
    package_version: str = ""
    timeout_s: Timeout = LOOK_S


class OpenReply(Message, frozen=True):
    """Who the engine is. ``pause_refused`` maps each mode that the engine lacks to the reason.

    ``host`` is where it runs, as `arenas.host_id` names it, ``user`` whose directory it meets trainers in there, as
    `auth.meeting` does, ``network`` its network interfaces, as `arenas.network_id` does. ``stopped``: it serves
    nothing, being dirty or waiting for its first push.
    """

    protocol: tuple[int, int]
    engine: str
    engine_version: str
    package_version: str
    host: str
    model: str
    version: str
    ranks: tuple[RankInfo, ...]
    pause_refused: dict[str, str] = {}
    instance: str = ""
    user: str = ""
    network: str = ""
    stopped: bool = False


class UpdateRequest(Message, frozen=True):
    """Ask every rank to check the manifest and to fetch the bytes from the sender at ``address``.

    The same for every transport. ``secret`` proves to the sender, over ZMQ, that a rank was asked by it; ``server_key``
    is the sender's CURVE key, where the address is one of TCP. The checkpoint crosses as one stream of bytes (see
    `layout.Layout`) in buckets, bucket k in slot k modulo ``slots`` of the sender's arena. ``owner`` takes the engine's
    lease, ``holder`` names it to others. ``instance`` is the engine that the sender opened. Tensors are checked by the
    digest of that name (`digest.ALGORITHMS`) unless ``verify`` is off. ``keep`` asks for the version before to be kept,
    ``stream`` for the bytes to be fetched by the commit, where memory has no room for a stage.
    ``known`` is `layout.Layout.name`; where ``manifest`` is empty, it is the one of this name in the push before.
    ``parts`` allows ranks to fetch and verify what they keep of the tensors, and nothing else.
    """

    push: Text
    address: Text
    secret: Text
    bucket_bytes: Annotated[int, msgspec.Meta(ge=512, le=1 << 50, multiple_of=512)]
    timeout_s: Timeout
    manifest: tuple[TensorSpec, ...]
    owner: Text = ""
    holder: Text = ""
    instance: Text = ""
    verify: Verify = "off"
    digest: Text = ""
    keep: bool = False
    stream: bool = False
    server_key: Text = ""
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2
    known: Text = ""
    parts: bool = False


class Handshake(Message, frozen=True):
    """What a transport's set-up method tells an engine before the first push: a transport derives its own from this.

    Every one has ``timeout_s``, the ``address`` of the sender, the ``owner`` that takes the engine's lease, the
    ``holder`` that others know it by, and the ``instance`` of the engine that the sender opened.
    """

    if TYPE_CHECKING:

        @property
        def timeout_s(self) -> float:
            """Seconds."""

        @property
        def address(self) -> str:
            """Where the sender is found, and what names it to `AbortRequest`."""

        @property
        def owner(self) -> str:
            """Secret."""

        @property
        def holder(self) -> str:
            """Public."""

        @property
        def instance(self) -> str:
            """Empty where the sender does not say."""


class RankJoined(Message, frozen=True):
    """One rank's answer: ``device`` and ``interface`` will move the bytes; ``agent`` names its end of the transport,
    and ``metadata`` is what the trainer's end has to know of it, where there is something."""

    rank: int
    device: str = ""
    interface: str = ""
    agent: str = ""
    metadata: bytes = b""


class JoinReply(Message, frozen=True):
    """Every rank's answer."""

    ranks: tuple[RankJoined, ...]
    instance: str = ""


class UpdateReply(Message, frozen=True):
    """What the engine serves now; nothing, if it is ``stopped``: dirty, or waiting for its first push.

    ``record_s``: of its slowest rank, as in `Accepted`.
    """

    version: str = ""
    instance: str = ""
    stopped: bool = False
    record_s: float | msgspec.UnsetType = msgspec.UNSET


class CommitRequest(Message, frozen=True):
    """Make the prepared push ``push`` the served version; ``timeout_s`` bounds the wait for requests in flight.

    With ``rollback`` it is the kept version before that is served again, and ``push`` a new name for that. ``instance``
    is the engine that prepared it.
    """

    push: Text
    version: Text
    pause: PauseMode
    timeout_s: Timeout
    owner: Text = ""
    rollback: bool = False
    instance: Text = ""


class CommitReply(Message, frozen=True):
    """``seconds`` per step (``pause``, ``apply``, ``caches``, ``resume``); ``pause_s`` from stop to go.

    ``asleep`` are the engine's tags of its memory that sleeps, so that it does not generate before it is woken.
    """

    version: str
    pause_s: float
    seconds: dict[str, float]
    asleep: tuple[str, ...] = ()


class LeaseRequest(Message, frozen=True):
    """The owner of the lease is alive, and in the middle of a push."""

    owner: Text


class AddEngine(Message, frozen=True):
    """engine's side -> trainer: the engine at ``url`` is to serve what the others do."""

    url: Text


class EngineAdded(Message, frozen=True):
    """It now serves ``version``; empty where it has to wait for the next push."""

    version: str = ""


class AbortRequest(Message, frozen=True):
    """Forget the push ``push``, or whichever is under way where it is empty.

    ``release`` is the address of a sender that closes: ranks give back what they hold of it. An ``owner`` can abort
    nothing but its own; an empty one, as the command line sends it, ends the lease of whoever holds it.
    """

    push: Text = ""
    release: Text = ""
    owner: Text = ""
    timeout_s: Timeout = LOOK_S


class StatusRequest(Message, frozen=True):
    """``digest`` asks each rank for a hash of the weights it computes with, which reads all of them.

    ``timeout_s`` is how long the ranks are waited for; by default as long as the engine thinks fit.
    """

    digest: bool = False
    timeout_s: Timeout | None = None


class RankStatus(Message, frozen=True):
    """``digest`` is a BLAKE2b hash in hex, empty where none was asked for; ``previous`` the version kept before.

    ``failed`` is the push that ended here without being applied, ``detail`` says why, ``loading`` how pushes get in,
    ``model`` what they fill.
    """

    rank: int
    state: State
    push: str = ""
    detail: str = ""
    digest: str = ""
    previous: str = ""
    failed: str = ""
    loading: str = ""
    model: ModelStatus | msgspec.UnsetType = msgspec.UNSET


class StatusReply(Message, frozen=True):
    """What an engine serves and what its ranks are doing.

    ``committed`` is the push that the served weights came with, ``holder`` who holds the lease, ``detail`` why the
    engine does not generate, or which ranks do not answer. ``off`` is what the engine lacks or what of it a push leaves
    as it is, by name, and why.
    """

    engine: str
    version: str
    state: State
    ranks: tuple[RankStatus, ...]
    instance: str = ""
    committed: str = ""
    holder: str = ""
    detail: str = ""
    off: dict[str, str] = {}


class Done(Message, frozen=True):
    """Empty reply."""


class AbortReply(Message, frozen=True):
    """``refused``: a commit of the aborted push that still arrives will be refused.

    Engines without this field make no such promise for a rollback.
    """

    refused: bool = False


class ErrorReply(Message, frozen=True):
    """A refusal: ``error`` is a class name of `weightsync.errors`, ``weights`` what the engine serves after it."""

    error: str
    message: str
    weights: Weights = "unchanged"


class _Verified(Message, frozen=True):
    verify: Verify = "off"


def verify_of(payload: bytes | str) -> Verify:
    """``verify`` of an `UpdateRequest`, without reading its manifest."""
    return from_json(payload, _Verified).verify


def error_reply(error: BaseException) -> ErrorReply:
    """An error as it crosses a process."""
    if isinstance(error, WeightSyncError):
        return ErrorReply(error=type(error).__name__, message=str(error), weights=error.weights)
    return ErrorReply(error="WeightSyncError", message=f"{type(error).__name__}: {error}", weights="unknown")


# --- engine front end -> its ranks, over the engine's own means -------------------------------------------------------


class RankReply(Message, frozen=True):
    """What one rank answers to a call: ``body`` is the JSON of the reply, unless ``error`` is set.

    ``later``: it has done nothing, for it still lets go of the push before; it is to be asked again.
    """

    body: msgspec.Raw = msgspec.Raw(b"{}")
    error: ErrorReply | None = None
    later: bool = False


class Accepted(Message, frozen=True, omit_defaults=True):
    """One rank takes part in a push. ``unread`` names tensors that it has no use for; some other rank must have.

    Where a checkpoint says what is expected, ``skipped`` has a bit for each tensor that it does not read, in the
    manifest's order, and ``unwritten`` the parameters that are not loaded as a whole, each with the bits of those
    tensors that could be for it: no parameter may lack what all ranks skip. ``record_s`` is how long the engine stood
    still while its loader was recorded.
    """

    unread: tuple[str, ...] = ()
    skipped: bytes = b""
    unwritten: dict[str, bytes] = {}
    record_s: float = 0.0


class Ready(Message, frozen=True, omit_defaults=True):
    """One rank can load. ``record_s`` as in `Accepted`, if its loader had to be recorded again."""

    record_s: float = 0.0
