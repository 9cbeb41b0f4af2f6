"""Ray Direct Transport over NIXL in this process, and every name of Ray that this transport uses. Source: Ray 2.60.

A READ goes through Ray's own tensor transport, below ``ray.put`` and ``ray.get``. When the time of a ``ray.get`` is up,
it drops a READ that is under way, and nobody knows whether that still writes; until then it cannot be cancelled. What
was put in an actor without ``enable_tensor_transport`` is freed only when the method that pushes has returned. And the
agent that Ray shares among all of a process has a thread that spins on a core for ever. So each end has Ray's transport
for itself, with an agent without that thread, which can be ended.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import secrets
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.transports.nixl import agents
from weightsync.transports.rdt.messages import RdtHandle

NAME: Final = "rdt"
_NEEDED: Final = "pip install 'ray>=2.60'"
_CLASSES: Final = ("NixlTensorTransport", "NixlTransportMetadata", "NixlCommunicatorMetadata")
#: What is used of the first, and what the second is made of.
_METHODS: Final = (
    "_make_nixl_agent",
    "deregister_nixl_memory",
    "extract_tensor_transport_metadata",
    "fetch_multiple_tensors",
    "garbage_collect",
    "get_nixl_agent",
    "register_nixl_memory",
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
    """Ray's transport with an agent of its own. ``who`` names this process in errors.

    Raises `UnsupportedOption` if Ray is another than is needed, or if the process has to be ``in_cluster`` and is not.
    Ranks may be in processes that their engine has started, which Ray does not know.
    """

    def __init__(self, who: str, *, in_cluster: bool):
        try:
            import nixl._api  # noqa: F401 - sets up the logger
            import ray
            from ray.experimental.rdt import nixl_tensor_transport
        except ImportError as error:
            raise UnsupportedOption(_unfit(who, str(error))) from error
        names: dict[str, Any] = vars(nixl_tensor_transport)
        kind: Any = names.get(_CLASSES[0])
        self._metadata: Any = names.get(_CLASSES[1])
        self._communicator: Any = names.get(_CLASSES[2])
        fields = getattr(self._metadata, "__dataclass_fields__", {}).keys()
        missing = [name for name in _CLASSES if name not in names]
        missing += [name for name in _METHODS if not hasattr(kind, name)] + sorted(_FIELDS - fields)
        if missing:
            raise UnsupportedOption(_unfit(who, f"{', '.join(missing)} not found"))
        if in_cluster and not ray.is_initialized():
            raise UnsupportedOption(
                f"{who} is not part of a Ray cluster, and transport {NAME} takes a driver or an actor: call ray.init() "
                "first, or use another transport"
            )
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout, which belongs to the application
        try:
            #: None once it has ended.
            self._transport: Any = type("Transport", (kind,), {"_make_nixl_agent": _agent})()
            self._transport.get_nixl_agent()
        except Exception as error:  # Ray's and NIXL's errors are of no kind here
            raise UnsupportedOption(f"{who}: Ray could not make a NIXL agent: {agents.explained(error)}") from error

    def end(self) -> None:
        """End the agent, with its registrations: it no longer touches memory, for itself or for another. Idempotent."""
        if self._transport is not None:
            self._transport._nixl_agent = None
            self._transport = None

    def drive(self) -> None:
        """Serve the READs of others, as far as this process has to: over TCP."""
        with _translated():
            self._transport.get_nixl_agent().get_new_notifs()

    def register(self, memory: torch.Tensor) -> None:
        """Register memory (1-D uint8) until `deregister` is called as often."""
        with agents.translated(f"{memory.numel()} bytes on {memory.device} could not be registered"):
            self._transport.register_nixl_memory(memory)

    def deregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""
        if self._transport is not None:
            self._transport.deregister_nixl_memory(memory)

    def show(self, name: str, memory: torch.Tensor) -> Shown:
        """Let others read registered memory, under a name of its own, until `Shown.end` is called."""
        with agents.translated(f"Ray could not show {memory.numel()} bytes on {memory.device}"):
            return Shown(self._transport, name, memory)

    def read(self, name: str, handle: RdtHandle, spans: Sequence[Span]) -> Read:
        """Start to read spans of what another process shows; ``name`` is that of this READ. Raises `TransferFailed`."""
        there = [(handle.address + at, place.numel(), handle.device_id) for at, place in spans]
        places = [place for _, place in spans]
        metadata = agents.unsealed(handle.metadata, "the trainer's agent")
        with _translated():
            agent = self._transport.get_nixl_agent()
            described = self._metadata(
                tensor_meta=[(place.shape, place.dtype) for place in places],
                tensor_device=handle.device,
                # Ray unpickles these: they are made here, and not sent.
                nixl_serialized_descs=agent.get_serialized_descs(agent.get_xfer_descs(there, mem_type=handle.device)),
                nixl_agent_meta=metadata,
                nixl_agent_name=handle.agent,
                nixl_agent_meta_version=handle.version,
            )
            request = self._transport.fetch_multiple_tensors(name, described, self._communicator(), places)
            return Read(self._transport, request, places)


class Shown:
    """Memory that others may read; ``handle`` is what they need for that."""

    def __init__(self, transport: Any, name: str, memory: torch.Tensor):
        self._transport, self._name, self._memory = transport, name, memory
        self._described: Any = transport.extract_tensor_transport_metadata(name, [memory])
        self.handle = RdtHandle(
            agent=self._described.nixl_agent_name,
            metadata=agents.sealed(self._described.nixl_agent_meta),
            version=self._described.nixl_agent_meta_version,
            address=memory.data_ptr(),
            nbytes=memory.numel(),
            device_id=max(memory.get_device(), 0),
            device="cuda" if memory.is_cuda else "cpu",
        )

    def end(self) -> None:
        """Show the memory no longer; idempotent."""
        if self._described is not None:
            self._transport.garbage_collect(self._name, self._described, [self._memory])
            self._transport = self._described = None


class Read:
    """A READ that was started, into ``memory``."""

    def __init__(self, transport: Any, request: Any, memory: Sequence[torch.Tensor]):
        self._transport, self._request, self.memory = transport, request, memory

    @property
    def ended(self) -> bool:
        """Whether everything has arrived. Raises `TransferFailed` if it never will."""
        try:
            with _translated():
                self._transport.wait_fetch_complete(self._request, timeout=0)
        except TimeoutError:
            return False
        return True

    def drop(self) -> None:
        """Cancel the READ, as far as that is possible before the agent ends."""
        self._transport = self._request = None


def _agent(_transport: Any, backend: str) -> Any:
    """In place of Ray's method: an agent without a thread, whoever waits drives it."""
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = nixl_agent_config(enable_prog_thread=False, backends=[backend], sync_mode=strict)
    return nixl_agent(f"weightsync-{os.getpid()}-{secrets.token_hex(6)}", config)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn an error of Ray raised inside into `TransferFailed`, without the traceback that it has as text."""
    try:
        yield
    except TimeoutError:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold the memory of a READ, and the agent
        raise TransferFailed(agents.hinted(str(error).strip().rpartition("\n")[2])) from error


def _unfit(who: str, why: str) -> str:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    return (
        f"{who} has Ray {version}, whose Ray Direct Transport is another than transport {NAME} takes ({why}): {_NEEDED}"
    )
