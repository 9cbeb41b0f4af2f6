"""Ray Direct Transport in this process, and every name of Ray that this transport uses. Source: Ray 2.60.

A READ goes through the interface that Ray has for tensor transports, below ``ray.get`` and ``ray.put``. When the time
of a ``ray.get`` is up, it drops a READ that is under way, and nobody knows whether that still writes; until then it
cannot be cancelled. And what was put in an actor without ``enable_tensor_transport`` is freed only when the method that
pushes has returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import logging
import secrets
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.transports.nixl import agents
from weightsync.transports.rdt.messages import RdtHandle

NAME: Final = "rdt"
_NEEDED: Final = "pip install 'ray>=2.60'"
_TRANSPORT: Final = "NIXL"
#: What is used of Ray's transport, and what its metadata are made of.
_METHODS: Final = (
    "extract_tensor_transport_metadata",
    "fetch_multiple_tensors",
    "garbage_collect",
    "get_nixl_agent",
    "wait_fetch_complete",
)
_FIELDS: Final = {
    "nixl_agent_meta",
    "nixl_agent_meta_version",
    "nixl_agent_name",
    "nixl_serialized_descs",
    "tensor_device",
    "tensor_meta",
}
#: Ray's transport keeps what it knows of other agents without a lock, and ranks may share a process.
_lock: Final = threading.RLock()
#: Different in each process. An actor that Ray starts again has the agent's name of the one before, and would also have
#: its version: others would go on with what they know of that one.
_LIFE: Final = secrets.randbits(31) << 32
#: Memory that this process shows, by its address and size: NIXL does not connect an agent to itself.
_shown: Final[dict[tuple[int, int], torch.Tensor]] = {}
#: READs that nobody waits for, whose memory may be written to until this process ends.
_kept: Final[list[Read]] = []

Span = tuple[int, torch.Tensor]
"""What is read at this offset of the sender's memory, and where it goes (1-D uint8)."""


def lacks() -> str:
    """How to install what is missing in this process; empty if nothing is. Does not import Ray."""
    found = importlib.util.find_spec("ray")
    folders = [Path(folder) for folder in (found.submodule_search_locations or ())] if found is not None else []
    if not any((folder / "experimental" / "rdt" / "nixl_tensor_transport.py").is_file() for folder in folders):
        return _NEEDED
    return "" if agents.available() else "pip install 'weightsync[nixl]'"


class Direct:
    """Ray's NIXL agent of this process, which lives as long as that. ``who`` names the process in errors.

    Raises `UnsupportedOption` if Ray is another than is needed, or if the process has to be ``in_cluster`` and is not.
    Ranks may be in processes that their engine has started, which Ray does not know.
    """

    def __init__(self, who: str, *, in_cluster: bool):
        try:
            import nixl._api  # noqa: F401 - sets up the logger
            import ray
            from ray import experimental
            from ray._private import auto_init_hook
            from ray.experimental.rdt import nixl_tensor_transport, util

            self._types = nixl_tensor_transport
            self._register, self._deregister = experimental.register_nixl_memory, experimental.deregister_nixl_memory
            manager = util.get_tensor_transport_manager(_TRANSPORT)
            missing = [name for name in _METHODS if not hasattr(manager, name)]
            fields = {field.name for field in dataclasses.fields(nixl_tensor_transport.NixlTransportMetadata)}
            missing += sorted(_FIELDS - fields)
            missing += [name for name in ("enable_auto_connect",) if not hasattr(auto_init_hook, name)]
        except (ImportError, AttributeError, ValueError) as error:
            raise UnsupportedOption(_unfit(who, str(error))) from error
        if missing:
            raise UnsupportedOption(_unfit(who, f"{', '.join(missing)} not found"))
        if in_cluster and not ray.is_initialized():
            raise UnsupportedOption(
                f"{who} is not part of a Ray cluster, and transport {NAME} takes a driver or an actor: call ray.init() "
                "first, or use another transport"
            )
        self._manager: Any = manager
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout, which belongs to the application
        try:
            with _lock, _not_connecting():
                self._agent: Any = manager.get_nixl_agent()
        except Exception as error:  # Ray's and NIXL's errors are of no kind here
            raise UnsupportedOption(f"{who}: Ray could not make its NIXL agent: {agents.explained(error)}") from error

    def register(self, memory: torch.Tensor) -> None:
        """Register memory (1-D uint8) until `deregister` is called as often."""
        with _lock, agents.translated(f"{memory.numel()} bytes on {memory.device} could not be registered"):
            self._register(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""
        with _lock:
            self._deregister(memory)

    def show(self, name: str, memory: torch.Tensor) -> Shown:
        """Let others read registered memory, under a name of its own, until `Shown.end` is called."""
        with _lock, agents.translated(f"Ray could not show {memory.numel()} bytes on {memory.device}"):
            return Shown(self._manager, name, memory)

    def read(self, name: str, handle: RdtHandle, spans: Sequence[Span]) -> Read:
        """Start to read spans of what another process shows; ``name`` is that of this READ. Raises `TransferFailed`."""
        if handle.agent == self._agent.name:
            source = _shown.get((handle.address, handle.nbytes))
            if source is None:
                raise TransferFailed("the memory of the arena is no longer there; push again")
            for at, place in spans:
                arenas.copy(place, source[at : at + place.numel()])
            return Read(self._manager, None)
        there = [(handle.address + at, place.numel(), handle.device_id) for at, place in spans]
        places = [place for _, place in spans]
        metadata = agents.unsealed(handle.metadata, "the trainer's agent")
        with _lock, _translated():
            # Ray unpickles these: they are made here, and not sent.
            descriptions = self._agent.get_serialized_descs(self._agent.get_xfer_descs(there, mem_type=handle.device))
            described = self._types.NixlTransportMetadata(
                tensor_meta=[(place.shape, place.dtype) for place in places],
                tensor_device=handle.device,
                nixl_serialized_descs=descriptions,
                nixl_agent_meta=metadata,
                nixl_agent_name=handle.agent,
                nixl_agent_meta_version=handle.version,
            )
            to = self._types.NixlCommunicatorMetadata()
            return Read(self._manager, self._manager.fetch_multiple_tensors(name, described, to, places))


class Shown:
    """Memory that others may read; ``handle`` is what they need for that."""

    def __init__(self, manager: Any, name: str, memory: torch.Tensor):
        self._manager, self._name, self._memory = manager, name, memory
        self._described: Any = manager.extract_tensor_transport_metadata(name, [memory])
        self.handle = RdtHandle(
            agent=self._described.nixl_agent_name,
            metadata=agents.sealed(self._described.nixl_agent_meta),
            version=_LIFE + self._described.nixl_agent_meta_version,
            address=memory.data_ptr(),
            nbytes=memory.numel(),
            device_id=max(memory.get_device(), 0),
            device="cuda" if memory.is_cuda else "cpu",
        )
        _shown[self._place] = memory

    @property
    def _place(self) -> tuple[int, int]:
        return self.handle.address, self.handle.nbytes

    def end(self) -> None:
        """Show the memory no longer; idempotent."""
        if self._described is not None:
            with _lock:
                self._manager.garbage_collect(self._name, self._described, [self._memory])
            self._described = None
            _shown.pop(self._place, None)


class Read:
    """A READ that was started. As long as this is held, so is the memory that it writes to."""

    def __init__(self, manager: Any, request: Any):
        self._manager, self._request = manager, request

    @property
    def ended(self) -> bool:
        """Whether everything has arrived. Raises `TransferFailed` if it never will."""
        if self._request is None:
            return True
        try:
            with _lock, _translated():
                self._manager.wait_fetch_complete(self._request, timeout=0)
        except TimeoutError:
            return False
        except TransferFailed:
            self._drop()
            raise
        self._drop()
        return True

    def _drop(self) -> None:
        with _lock:
            self._request = None


def keep(read: Read) -> None:
    """Keep a READ, and the memory that it writes to, until this process ends."""
    _kept.append(read)


@contextlib.contextmanager
def _not_connecting() -> Iterator[None]:
    """Keep Ray from connecting this process, if it is not connected, to any cluster that can be found."""
    from ray._private import auto_init_hook

    connects, auto_init_hook.enable_auto_connect = auto_init_hook.enable_auto_connect, False
    try:
        yield
    finally:
        auto_init_hook.enable_auto_connect = connects


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn an error of Ray raised inside into `TransferFailed`, without the traceback that it has as text."""
    try:
        yield
    except TimeoutError:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold the memory of a READ
        raise TransferFailed(agents.hinted(str(error).strip().rpartition("\n")[2])) from error


def _unfit(who: str, why: str) -> str:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    return (
        f"{who} has Ray {version}, whose Ray Direct Transport is another than transport {NAME} takes ({why}): {_NEEDED}"
    )
