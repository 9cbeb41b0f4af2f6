"""The messages that cross processes: JSON over HTTP here, msgpack over ZMQ in `control`. Each is defined once.

Rules for changes: a field added later has a default, a tag is never reused, bulk bytes never travel in a message.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from weightsync.errors import Weights, WeightSyncError
from weightsync.protocol import codec
from weightsync.protocol.codec import Shape, Text
from weightsync.protocol.deltas import DeltaSpec
from weightsync.protocol.lockstep import Lockstep
from weightsync.protocol.lora import LoraSpec
from weightsync.protocol.model_status import ModelStatus

#: (major, minor). Majors must match; both sides speak the lower minor.
PROTOCOL: Final[tuple[int, int]] = (1, 9)

UPDATE: Final = "update_weights_via_"  #: Prefix of the name of every method that announces a push.
PREFIX: Final = "/weightsync"  #: Prefix of the admin routes of every engine.

#: What happens to requests in flight when a version commits; see the README.
PauseMode = Literal["retract", "wait", "abort", "keep"]
#: What is verified: each tensor in every rank's stage; that and the weights the engine then computes with; nothing.
Verify = Literal["digest", "deep", "off"]
#: What an engine, or one of its ranks, is doing; `states.ENGINE` has the transitions. An ``unsynced`` engine was
#: started with the option not to serve before its first push.
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

#: Largest HTTP body accepted, in bytes; a manifest of 100,000 tensors takes about 12 MB.
MAX_BODY_BYTES: Final = 64 << 20
MAX_FRAME_BYTES: Final = 16 << 20  #: Largest ZMQ message, in bytes; the digests of 100,000 tensors take less than 1 MB.
MAX_TIMEOUT_S: Final = 86400.0  #: Longest timeout that a message may ask for, in seconds.
LOOK_S: Final = 5.0  #: Default timeout of requests that only read a state or drop a push, in seconds.
Timeout = Annotated[float, msgspec.Meta(ge=0.01, le=MAX_TIMEOUT_S)]


@functools.cache
def package_version() -> str:
    """Version of this package; the two sides exchange it for error messages only."""
    from importlib.metadata import version  # slow: it would double the start time of the command line

    return version("weightsync")


class Message(msgspec.Struct, frozen=True):
    """Base of all messages. Decoding ignores unknown fields, so that a newer minor version can add some."""


from_json, to_json = codec.from_json, codec.to_json

# --- plain data -------------------------------------------------------------------------------------------------------


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a checkpoint; ``dtype`` is torch's name without the prefix (``"bfloat16"``)."""

    name: Text
    dtype: Text
    shape: Shape


class RankInfo(Message, frozen=True):
    """One rank of an engine: a process that holds all or part of the weights.

    ``device`` is a torch device type (``"cpu"``, ``"cuda"``); ``device_uuid`` names the accelerator under any remapping
    of visible devices. ``free_bytes`` is the memory that a stage could take on that device. ``transports`` are those
    whose dependencies the rank has, ``settings`` the environment variables on which both ends should agree. The other
    fields identify the process ``pid``, see `arenas.host_id`, `arenas.process_space` and `processes.started`; if they
    are empty, nothing checks whether it still lives.
    """

    rank: int
    pid: int
    device: str
    device_uuid: str = ""
    free_bytes: int = 0
    transports: tuple[Text, ...] = ("ipc_zmq",)  # the only transport before this field was added
    settings: dict[Text, Text] = {}
    process_space: str = ""
    host: Text = ""
    started: int = 0


# --- HTTP: trainer -> engine front end --------------------------------------------------------------------------------


class OpenRequest(Message, frozen=True):
    """First message of a sender to an engine. ``timeout_s``, here and below: seconds to wait for the ranks."""

    protocol: tuple[int, int]
    package_version: str = ""
    timeout_s: Timeout = LOOK_S


class OpenReply(Message, frozen=True):
    """Identity and capabilities of an engine.

    ``pause_refused`` maps each pause mode that the engine does not support to the reason. ``host`` is its
    `arenas.host_id`, ``user`` its `directories.meeting`, ``network`` its `arenas.network_id`; each equals the trainer's
    if the two share it. ``stopped``: it serves nothing, because it is dirty or waits for its first push. ``lockstep``:
    its part in that of several engines; pushes reach all of them or none. ``adapters`` as in `StatusReply`.
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
    lockstep: Lockstep | None = None
    adapters: dict[Text, Text] | msgspec.UnsetType = msgspec.UNSET


class UpdateRequest(Message, frozen=True):
    """Ask every rank to check the manifest and to fetch the bytes from the sender at ``address``.

    The same for all transports. The checkpoint crosses as one stream of bytes (see `layout.Layout`) in buckets of
    ``bucket_bytes``; bucket k lies in slot k modulo ``slots`` of the sender's arena. ``secret`` proves to the sender,
    over ZMQ, that a rank was asked by this request; ``server_key`` is the sender's CURVE key if ``address`` is TCP.
    ``owner`` takes the engine's lease, ``holder`` is its public name, ``instance`` the engine that the sender opened.
    Unless ``verify`` is off, tensors are verified by the ``digest`` of this name in `digest.ALGORITHMS`. ``keep``: the
    ranks keep the version before. ``stream``: they fetch the bytes in the commit, for lack of memory for a stage.
    ``known`` is `layout.Layout.name`; an empty ``manifest`` is the one of that name in the push before. ``parts``:
    ranks may fetch and verify only their subsets. ``kept`` names expected tensors that stay as the engine has them.
    ``any_order``: each `control.BucketReady` names the tensors that begin in its bucket. ``domains``: what each host of
    the trainer holds of the stream, if several do, see `layout.Table`. ``adapter``: what crosses is no checkpoint but
    this adapter, and the model's weights stay as they are. ``content`` names the bytes, if they were sent before, as
    another push; otherwise ``push`` does. ``delta``: what crosses is what changed since bytes that the ranks have.
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
    kept: tuple[Text, ...] = ()
    any_order: bool = False
    domains: Annotated[tuple[tuple[tuple[int, tuple[Shape, Shape]], ...], ...], msgspec.Meta(max_length=1024)] = ()
    adapter: LoraSpec | msgspec.UnsetType = msgspec.UNSET
    content: Text | msgspec.UnsetType = msgspec.UNSET
    delta: DeltaSpec | msgspec.UnsetType = msgspec.UNSET

    @property
    def lora(self) -> str | msgspec.UnsetType:
        """The name of the adapter, if the push is one."""
        return self.adapter if self.adapter is msgspec.UNSET else self.adapter.name

    def by_name(self) -> UpdateRequest:
        """The request with the name of its manifest alone, for an engine that has it."""
        return msgspec.structs.replace(self, manifest=(), domains=())


class Handshake(Message, frozen=True):
    """Base of the requests that set a transport up before the first push; each transport derives its own.

    All of them have ``timeout_s``, the ``address`` of the sender, the ``owner`` that takes the engine's lease, its
    public name ``holder``, and the ``instance`` of the engine that the sender opened.
    """

    if TYPE_CHECKING:

        @property
        def timeout_s(self) -> float:
            """How long the engine waits for its ranks, in seconds."""

        @property
        def address(self) -> str:
            """Address of the sender, also its name in `AbortRequest.release`."""

        @property
        def owner(self) -> str:
            """Secret that identifies the owner of the lease."""

        @property
        def holder(self) -> str:
            """Public name of the owner."""

        @property
        def instance(self) -> str:
            """The engine instance that the sender opened; empty if the sender does not check it."""


class RankJoined(Message, frozen=True):
    """One rank's answer to a `Handshake`: the ``device`` and network ``interface`` that will move the bytes, the name
    of its end of the transport (``agent``), and what the trainer's end has to know about that end (``metadata``).
    ``written``: the trainer writes to it, so that it can pass on what it gets, see `control.PassOn`."""

    rank: int
    device: str = ""
    interface: str = ""
    agent: str = ""
    metadata: bytes = b""
    written: bool = False


class JoinReply(Message, frozen=True):
    """The answers of all ranks to a `Handshake`."""

    ranks: tuple[RankJoined, ...]
    instance: str = ""


class UpdateReply(Message, frozen=True):
    """The version that the engine serves now, of the adapter if one is pushed. It serves nothing if it is ``stopped``:
    dirty, or waiting for its first push. ``record_s`` is that of its slowest rank, ``kept`` those of all ranks, see
    `Accepted`.
    """

    version: str = ""
    instance: str = ""
    stopped: bool = False
    record_s: float | msgspec.UnsetType = msgspec.UNSET
    kept: tuple[dict[str, str], ...] | msgspec.UnsetType = msgspec.UNSET


class CommitRequest(Message, frozen=True):
    """Serve the prepared push ``push`` as ``version``; ``timeout_s`` bounds the wait for requests in flight.

    With ``rollback`` the engine serves its kept version again, and ``push`` is a new identifier for this step.
    ``instance`` is the engine instance that prepared the push. ``lora`` names the adapter, if the push is one.
    """

    push: Text
    version: Text
    pause: PauseMode
    timeout_s: Timeout
    owner: Text = ""
    rollback: bool = False
    instance: Text = ""
    lora: Text | msgspec.UnsetType = msgspec.UNSET


class CommitReply(Message, frozen=True):
    """The engine serves ``version``. ``seconds`` has the time of each step (``pause``, ``apply``, ``caches``,
    ``resume``); ``pause_s`` is how long the engine did not generate. ``asleep`` are the engine's tags of memory that
    still sleeps. ``loading`` are the ways in which its ranks load, as in `RankStatus`, each once."""

    version: str
    pause_s: float
    seconds: dict[str, float]
    asleep: tuple[str, ...] = ()
    loading: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class LeaseRequest(Message, frozen=True):
    """The owner of the lease is alive and in the middle of a push."""

    owner: Text


class AddEngine(Message, frozen=True):
    """engine's side -> trainer: bring the engine at ``url`` to the version that the other engines serve."""

    url: Text


class EngineAdded(Message, frozen=True):
    """The engine now serves ``version``; empty if it has to wait for the next push."""

    version: str = ""


class AbortRequest(Message, frozen=True):
    """Drop the push ``push``, or any that is under way if ``push`` is empty.

    ``release`` is the address of a sender that closes: ranks release what they hold of it. An ``owner`` can abort only
    its own push; an empty one, sent by the command line, aborts any push and ends the lease.
    """

    push: Text = ""
    release: Text = ""
    owner: Text = ""
    timeout_s: Timeout = LOOK_S


class StatusRequest(Message, frozen=True):
    """Ask for an engine's state; with ``digest`` also for a hash of the weights of each rank, which reads all of them.

    ``timeout_s`` is how long the engine waits for its ranks, in seconds; the engine chooses if it is None.
    """

    digest: bool = False
    timeout_s: Timeout | None = None


class RankStatus(Message, frozen=True):
    """What one rank does. ``digest`` is a BLAKE2b hash in hex, empty unless it was asked for; ``previous`` the kept
    version before, ``standby`` the same if it is kept only until the next push is loaded. ``failed`` is the last push
    that ended here without being applied, ``detail`` the reason. ``loading`` says how pushes are loaded, ``model`` what
    they load. ``stage_bytes`` is the memory of its own in which it keeps versions as they crossed: one for changes to
    refer to, and one to go back to if that is asked for. ``longest_call`` is the longest call for which the engine
    stood still when its standby was made or loaded last, with its seconds, if these are more than a slice takes.
    ``adapters``: the kept versions of adapters.
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
    standby: str | msgspec.UnsetType = msgspec.UNSET
    longest_call: str | msgspec.UnsetType = msgspec.UNSET
    adapters: dict[Text, Text] | msgspec.UnsetType = msgspec.UNSET
    stage_bytes: int | msgspec.UnsetType = msgspec.UNSET


class StatusReply(Message, frozen=True):
    """What an engine serves and what its ranks are doing.

    ``committed`` is the push that was committed last, ``holder`` the public name of the lease's owner, ``detail`` why
    the engine does not generate or which ranks do not answer. ``off`` maps what the engine cannot do, and what a push
    leaves unchanged in it, to the reasons. ``adapters`` has the versions of pushed adapters that it serves, by name.
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
    adapters: dict[Text, Text] | msgspec.UnsetType = msgspec.UNSET


class Done(Message, frozen=True):
    """Empty reply."""


class AbortReply(Message, frozen=True):
    """``refused``: a commit of the aborted push that still arrives will be refused.

    Engines without this field make no such promise for a rollback.
    """

    refused: bool = False


class ErrorReply(Message, frozen=True):
    """A refusal: ``error`` names a class of `weightsync.errors`, ``weights`` says what the engine serves after it."""

    error: str
    message: str
    weights: Weights = "unchanged"


class _Verified(Message, frozen=True):
    verify: Verify = "off"


def verify_of(payload: bytes | str) -> Verify:
    """The field ``verify`` of an encoded `UpdateRequest`, without decoding its manifest."""
    return from_json(payload, _Verified).verify


def error_reply(error: BaseException) -> ErrorReply:
    """Encode an error for another process; one that is no `WeightSyncError` leaves the weights ``"unknown"``."""
    if isinstance(error, WeightSyncError):
        return ErrorReply(error=type(error).__name__, message=str(error), weights=error.weights)
    return ErrorReply(error="WeightSyncError", message=f"{type(error).__name__}: {error}", weights="unknown")
