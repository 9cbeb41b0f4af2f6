"""Handles with which another process maps a sender's memory: fields of messages, each decoded by one function."""

from __future__ import annotations

import msgspec


class ShmHandle(msgspec.Struct, frozen=True, tag="shm"):
    """A file of ``nbytes`` bytes in the shared-memory mount."""

    path: str
    nbytes: int


class FileHandle(msgspec.Struct, frozen=True, tag="file"):
    """Shared memory that process ``pid`` has open, by descriptor and inode; every tensor may have its own."""

    pid: int
    descriptor: int
    inode: int


class CudaHandle(msgspec.Struct, frozen=True, tag="cuda"):
    """What CUDA needs to map another process's allocation; the fields are as torch returns them."""

    device_uuid: str
    handle: bytes
    storage_nbytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class SharedParametersHandle(msgspec.Struct, frozen=True, tag="in_place"):
    """A trainer's parameters, read in place.

    ``parts`` lists the tensors in the order of the stream: (index in ``storages``, first byte there, number of bytes).
    ``revoked`` is one byte, which is not zero once the trainer may change the parameters again.
    """

    storages: tuple[FileHandle | CudaHandle, ...]
    parts: tuple[tuple[int, int, int], ...]
    revoked: FileHandle


Handle = ShmHandle | CudaHandle | SharedParametersHandle
"""What a rank that maps a sender's memory is given."""
