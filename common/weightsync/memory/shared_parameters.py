"""Shared parameters: engine ranks read them in place. Nothing is packed, and the trainer's memory is the stage.

They are in host memory that is shared by file descriptor, as ``model.share_memory()`` makes it, or on a GPU that
trainer and ranks share.

They form an arena that is always full, but whose tensors are not adjacent: it is sliced by the offsets of the same
stream, one tensor at a time. It is reused as long as the parameters do not move, which the trainer checks before each
push. Memory that torch shares by files that are not open in this process is packed instead; it is never moved in order
to share it.

A trainer may change its parameters once a push has ended. So a sender that cancels a push first sets a byte that every
rank has mapped. A rank checks this byte, and that the trainer's process lives, before it loads and afterwards.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import cuda_ipc, forks
from weightsync.memory.mappings import Mappings, OpenFile
from weightsync.memory.processes import ENDED, process_state, started
from weightsync.protocol.handles import CudaHandle, FileHandle, SharedParametersHandle
from weightsync.tensors.layout import align
from weightsync.tensors.scattered import Parts

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED: Final = ctypes.c_void_p(-1).value


def find(
    tensors: Iterable[torch.Tensor], device: torch.device, known: SharedParameters | None = None
) -> list[torch.Tensor] | None:
    """The tensors as a list, if all are contiguous and another process can read them in place; None otherwise.

    ``device`` is the device of arenas; if it is a GPU, the ranks use the same one. A tensor at the same address as in
    ``known`` is not checked again.
    """
    found: list[torch.Tensor] = []
    before = [] if known is None else known.addresses
    mappings: Mappings | None = None
    tried = False
    for number, tensor in enumerate(tensors):
        found.append(tensor)
        if not tensor.numel():
            continue
        if not tensor.is_contiguous() or tensor.is_neg():
            return None
        if number < len(before) and tensor.data_ptr() == before[number]:
            continue
        if tensor.device != device:
            return None
        if device.type == "cpu":
            mappings = Mappings() if mappings is None else mappings
            if _file_of(tensor.untyped_storage(), mappings) is None:
                return None
        elif not (tried or _is_shared_gpu(tensor)):
            return None
        tried = True
    return found if any(tensor.numel() for tensor in found) else None


def _file_of(storage: torch.UntypedStorage, mappings: Mappings) -> OpenFile | None:
    """The file of shared host memory that ranks can map (see `attach`); None if the storage is not in one.

    torch is not asked. If the storage is shared in another way than torch would share it now, torch would move it to a
    new file, and other processes that have mapped the old file would go on writing there.
    """
    file = mappings.file(storage.data_ptr(), storage.nbytes())
    return file if file is not None and _is_shared_memory(os.fstat(file.descriptor)) else None


def _is_shared_memory(info: os.stat_result) -> bool:
    """Whether a file is shared memory that belongs to this user."""
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_dev == os.stat("/dev/shm").st_dev


def _is_shared_gpu(tensor: torch.Tensor) -> bool:
    # torch calls all GPU memory shared, so sharing is tried; with one tensor only, since torch keeps a record of each.
    if cuda_ipc.expandable():
        return False
    try:
        cuda_ipc.share(tensor.untyped_storage())
    except (OSError, UnsupportedOption):
        return False
    return True


class SharedParameters:
    """An arena of ``tensors`` that `find` has returned, as the stream of ``what``: a layout, or a rank's part of one.

    ``bytes`` is the tensors' own memory; ``addresses`` are the tensors' addresses when the arena was made.
    """

    def __init__(self, what: object, tensors: list[torch.Tensor]):
        numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        places: list[tuple[int, int, int]] = []
        for tensor in tensors:
            if tensor.numel():
                storage = tensor.untyped_storage()
                number = numbers.setdefault(storage.data_ptr(), len(numbers))
                if number == len(self._storages):
                    self._storages.append(storage)
                places.append((number, int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes))
        self._places = tuple(places)
        self.name = f"weightsync-{os.getpid()}-{secrets.token_hex(8)}"
        self._what = what
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        #: Kept alive, so that nothing else can take their addresses.
        self.tensors = tensors
        self._revoked = torch.UntypedStorage._new_using_fd_cpu(1)  # one byte, zero
        mappings = Mappings()
        self._files = [
            _file_of(storage, mappings) if storage.device.type == "cpu" else None for storage in self._storages
        ]
        self._revoked_file = _handle(_file_of(self._revoked, mappings))
        parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self.bytes = _stream(parts, torch.empty(0, dtype=torch.uint8).set_(self._revoked))

    def holds(self, what: object, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this arena is the stream of ``what``, made from ``tensors`` or others at the same addresses."""
        same = tensors is self.tensors or self.addresses == [tensor.data_ptr() for tensor in tensors]
        return what is self._what and same

    def handle(self) -> SharedParametersHandle:
        """A handle with which one rank can map the arena.

        Raises `TransferFailed` if the parameters are no longer in shared memory.
        """
        storages = tuple(
            _handle(file) if storage.device.type == "cpu" else cuda_ipc.share(storage)
            for storage, file in zip(self._storages, self._files, strict=True)
        )
        return SharedParametersHandle(storages=storages, parts=self._places, revoked=self._revoked_file)

    def revoke(self) -> None:
        """Set the byte that tells ranks that the trainer may write again: they do not serve what they read."""
        self._revoked[0] = 1

    def close(self) -> None:
        """Revoke the arena and release the tensors."""
        self.revoke()
        self.tensors, self._storages = [], []
        del self.bytes


def _stream(
    parts: Sequence[torch.Tensor], revoked: torch.Tensor, owner_lives: Callable[[], bool] = lambda: True
) -> Parts:
    ends = list(itertools.accumulate(align(part.numel()) for part in parts))
    return Parts([0, *ends[:-1]], parts, ends[-1], revoked, owner_lives)


def _life_of(pid: int) -> Callable[[], bool]:
    """A function that tells whether process ``pid``, which runs now, still does.

    A trainer that is killed cannot revoke its parameters, which may belong to another process, such as the learner that
    it pushed for. Raises `TransferFailed` if there is no such process now.
    """
    if not (since := started(pid)):
        raise TransferFailed(f"the trainer's process {pid} cannot be found")
    return lambda: process_state(pid, since) != ENDED


def _handle(file: OpenFile | None) -> FileHandle:
    if file is None:
        raise TransferFailed("the parameters are no longer in the shared memory where they were found; push again")
    return FileHandle(os.getpid(), file.descriptor, file.inode)


def attach(handle: SharedParametersHandle) -> Parts:
    """Map a trainer's parameters into this process, read-only.

    Raises `TransferFailed` if they cannot be mapped or are not this user's shared memory.
    """
    spans: dict[int, tuple[int, int]] = {}
    for number, start, nbytes in handle.parts:
        if not (0 <= number < len(handle.storages) and start >= 0 < nbytes):
            raise TransferFailed(f"refused to map {nbytes} bytes at {start} of storage {number}: not a valid range")
        first, end = spans.get(number, (start, start))
        spans[number] = min(first, start), max(end, start + nbytes)
    if not spans:
        raise TransferFailed("refused to map the trainer's parameters: there are none")
    mapped = {number: _attach(handle.storages[number], *span) for number, span in spans.items()}
    parts = []
    for number, start, nbytes in handle.parts:
        first, memory = mapped[number]
        parts.append(memory[start - first : start - first + nbytes])
    owner_lives = _life_of(handle.revoked.pid)
    return _stream(parts, _attach(handle.revoked, 0, 1)[1], owner_lives)


def _attach(storage: FileHandle | CudaHandle, first: int, end: int) -> tuple[int, torch.Tensor]:
    """Map at least bytes ``first`` to ``end`` of a storage; returns the first byte that is mapped, and the memory."""
    if isinstance(storage, CudaHandle):
        memory = cuda_ipc.attach(storage)
        if end > memory.numel():
            raise TransferFailed(f"refused to map bytes {first} to {end} of {memory.numel()} on the trainer's GPU")
        return 0, memory
    path = f"/proc/{storage.pid:d}/fd/{storage.descriptor:d}"
    try:
        file = forks.opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise TransferFailed(
            f"the trainer's parameters at {path} cannot be opened: {error.strerror}; pass bucket_bytes to have them "
            "copied to an arena instead"
        ) from error
    with file:
        info = os.fstat(file.fileno())
        if not _is_shared_memory(info) or info.st_ino != storage.inode:
            raise TransferFailed(f"refused to map {path}: not this user's shared memory, or not the file offered")
        if end > info.st_size:
            raise TransferFailed(f"refused to map bytes {first} to {end} of {path}, which has {info.st_size}")
        begin = first - first % mmap.PAGESIZE
        return begin, _map(file.fileno(), begin, end - begin)


def _map(descriptor: int, begin: int, nbytes: int) -> torch.Tensor:
    """Map part of a file, from a page boundary on, read-only.

    Python's own mmap would keep a descriptor for each mapping, and a process may have only so many.
    """
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    # Read-only, because a loader that writes to its input would change the trainer's weights.
    found: int | None = _libc.mmap(None, nbytes, mmap.PROT_READ, flags, descriptor, begin)
    if found is None or found == _FAILED:
        raise TransferFailed(f"{nbytes} bytes of shared parameters cannot be mapped: {os.strerror(ctypes.get_errno())}")
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(found)
    # Not unmapped at exit, when a thread may still be reading.
    weakref.finalize(memory, _libc.munmap, found, nbytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)
