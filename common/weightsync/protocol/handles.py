"""What another process needs to reach a sender's memory: fields of messages, each rebuilt by one function."""

from __future__ import annotations

import msgspec


class ShmHandle(msgspec.Struct, frozen=True, tag="shm"):
    """A file of the shared-memory mount."""

    path: str
    nbytes: int


class FileHandle(msgspec.Struct, frozen=True, tag="file"):
    """Shared memory that the process ``pid`` has open, by descriptor and inode; there may be one for every tensor."""

    pid: int
    descriptor: int
    inode: int


class CudaHandle(msgspec.Struct, frozen=True, tag="cuda"):
    """What CUDA needs to map another process's allocation, each field as torch hands it out."""

    device_uuid: str
    handle: bytes
    storage_nbytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class SharedParametersHandle(msgspec.Struct, frozen=True, tag="in_place"):
    """The trainer's own memory: ``storages``, and of them ``parts``: (storage, its first byte, bytes) in the order of
    the stream. ``revoked`` has one byte, which is not zero once the trainer may write there again."""

    storages: tuple[FileHandle | CudaHandle, ...]
    parts: tuple[tuple[int, int, int], ...]
    revoked: FileHandle
