"""Device memory of one process, mapped by others through CUDA IPC, as torch does it for tensors that it sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.protocol.handles import CudaHandle

_EXPANDABLE: Final = "expandable_segments:True"
#: Number of counters in one of the files in which torch counts the users of shared memory.
_COUNTERS: Final = 10_000
#: Held while the allocator's settings are changed: a second thread would take the change for the original settings.
_SETTING: Final = threading.Lock()


def device_uuid(device: torch.device) -> str:
    """Name of an accelerator under any remapping of visible devices; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def gpu_here() -> torch.device | None:
    """The GPU that torch uses in this process unless told otherwise; None if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def uuid_here() -> str:
    """The name of that GPU, see `device_uuid`; empty if there is none."""
    gpu = gpu_here()
    return device_uuid(gpu) if gpu is not None else ""


def settings() -> str:
    """Settings of torch's allocator; empty if it does not tell: up to torch 2.11 it does once CUDA was used."""
    getter: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if getter is not None:
        return getter()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        known: dict[str, str] = torch.cuda.memory._snapshot()["allocator_settings"]
        return known["PYTORCH_CUDA_ALLOC_CONF"]
    except (KeyError, RuntimeError):
        return ""  # another version, or another allocator


def expandable() -> bool:
    """Whether torch's allocator uses expandable segments, which can be neither shared nor registered."""
    return _EXPANDABLE in settings()


@contextlib.contextmanager
def unexpandable() -> Iterator[None]:
    """Context in which torch's allocator makes no expandable segments, if this version of torch can change that."""
    with _SETTING:
        before = settings()
        if _EXPANDABLE not in before:
            yield
            return
        # The settings are one string, and setting it resets all that it leaves out: so all others are repeated.
        _set(before.replace(_EXPANDABLE, "expandable_segments:False"))
        try:
            yield
        finally:
            _set(before)


def _set(settings: str) -> None:
    setter: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (setter or torch.cuda.memory._set_allocator_settings)(settings)


def share(storage: torch.UntypedStorage) -> CudaHandle:
    """A handle with which one other process can map ``storage``. torch counts users, so each needs its own handle.

    Raises `UnsupportedOption` if the memory cannot be shared.
    """
    try:
        shared = storage._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UnsupportedOption(
            f"memory on {storage.device} cannot be shared through CUDA IPC: {error}; if torch in the trainer is set to "
            "use a custom allocator, or expandable segments that it cannot turn off, unset that; to have parameters "
            "copied instead of shared in place, pass bucket_bytes"
        ) from error
    _, handle, nbytes, offset, counter, counter_offset, event, event_sync = shared
    return CudaHandle(
        device_uuid=device_uuid(storage.device),
        handle=handle,
        storage_nbytes=nbytes,
        storage_offset_bytes=offset,
        ref_counter_handle=counter,
        ref_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=event_sync,
    )


def attach(handle: CudaHandle) -> torch.Tensor:
    """Map another process's storage as a 1-D uint8 tensor. Raises `TransferFailed`."""
    visible = {device_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    if handle.device_uuid not in visible:
        raise TransferFailed(f"the sender's GPU {handle.device_uuid} is not visible here (visible: {list(visible)})")
    index = visible[handle.device_uuid]
    if min(handle.storage_nbytes, handle.storage_offset_bytes) < 0 or not 0 <= handle.ref_counter_offset < _COUNTERS:
        raise TransferFailed("refused to map memory of the sender's GPU: the handle is not one that torch makes")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            index,
            handle.handle,
            handle.storage_nbytes,
            handle.storage_offset_bytes,
            handle.ref_counter_handle,
            handle.ref_counter_offset,
            handle.event_handle,
            handle.event_sync_required,
        )
    except RuntimeError as error:
        raise TransferFailed(
            f"the sender's memory on GPU {handle.device_uuid} cannot be mapped: {error}; if torch in the trainer is "
            "set to use a custom allocator, unset that"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
