"""Parameters that engine ranks can read where they are: nothing is packed, the trainer's memory is the stage.

That is host memory shared by file descriptor, as ``model.share_memory()`` makes it, or memory of a GPU that trainer
and ranks share.

They are an arena that is full from the start, only that its tensors lie apart: it is sliced by the same offsets of the
same stream, a tensor at a time. What was made ready for it holds as long as the parameters stay where they are, and the
trainer looks that they do before each push. Memory that torch shares in any other way, by files that are not open here,
is packed: it is never moved to share it.

A trainer may change its parameters once a push is over. So a push that is given up first sets a byte that every rank
has mapped. A rank looks at it, and whether the process that pushed lives, before it loads and after.
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
from weightsync.memory import cuda_ipc
from weightsync.memory.mappings import Mappings, OpenFile
from weightsync.memory.processes import ENDED, process_state, started
from weightsync.protocol.handles import CudaHandle, FileHandle, SharedParametersHandle
from weightsync.tensors.layout import Layout, align
from weightsync.tensors.scattered import Scattered

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
    """The tensors, if each lies in one piece and can be read by another process where it is; None otherwise.

    ``device`` is where arenas are: on a GPU it is the ranks' own. Those at the addresses of ``known`` are taken to be
    as they were.
    """
    if device.type == "cuda" and cuda_ipc.expandable():
        return None
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
    """The file of shared host memory that ranks take (see `attach`); None if the memory is in none.

    torch is not asked: sharing what is shared in another way than torch would now moves it to a new file, and whoever
    has mapped the old one goes on writing there.
    """
    file = mappings.file(storage.data_ptr(), storage.nbytes())
    return file if file is not None and _is_shared_memory(os.fstat(file.descriptor)) else None


def _is_shared_memory(info: os.stat_result) -> bool:
    """Whether a file is shared memory of this user's."""
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_dev == os.stat("/dev/shm").st_dev


def _is_shared_gpu(tensor: torch.Tensor) -> bool:
    # torch says of all memory of a GPU that it is shared, and keeps a record of each time that it is: one is tried.
    try:
        cuda_ipc.share(tensor.untyped_storage())
    except (OSError, UnsupportedOption):
        return False
    return True


class SharedParameters:
    """``tensors``, for which `find` vouches, as one stream of ``layout``.

    ``bytes`` is their own memory. ``addresses`` are where ``tensors`` were when this was made.
    """

    def __init__(self, layout: Layout, tensors: list[torch.Tensor]):
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
        self._layout = layout
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        #: As long as they live nothing else can be at their addresses.
        self.tensors = tensors
        self._revoked = torch.UntypedStorage._new_using_fd_cpu(1)  # of zeros
        mappings = Mappings()
        self._files = [_file_of(one, mappings) if one.device.type == "cpu" else None for one in self._storages]
        self._revoked_file = _handle(_file_of(self._revoked, mappings))
        parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        self.bytes = _stream(parts, torch.empty(0, dtype=torch.uint8).set_(self._revoked))

    def holds(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this was made of tensors that lie there, and laid out like that."""
        same = tensors is self.tensors or self.addresses == [tensor.data_ptr() for tensor in tensors]
        return layout is self._layout and same

    def handle(self) -> SharedParametersHandle:
        """What one rank needs to map the arena."""
        storages = tuple(
            _handle(file) if storage.device.type == "cpu" else cuda_ipc.share(storage)
            for storage, file in zip(self._storages, self._files, strict=True)
        )
        return SharedParametersHandle(storages=storages, parts=self._places, revoked=self._revoked_file)

    def revoke(self) -> None:
        """The memory is the trainer's again: a rank that still reads it finds out, and does not serve what it read."""
        self._revoked[0] = 1

    def close(self) -> None:
        """Let go."""
        self.revoke()
        self.tensors, self._storages = [], []
        del self.bytes


def _stream(
    parts: Sequence[torch.Tensor], revoked: torch.Tensor, owner_lives: Callable[[], bool] = lambda: True
) -> Scattered:
    ends = list(itertools.accumulate(align(part.numel()) for part in parts))
    return Scattered([0, *ends[:-1]], parts, ends[-1], revoked, owner_lives)


def _life_of(pid: int) -> Callable[[], bool]:
    """Tells whether a process of this process space that runs now still does. Raises `TransferFailed` if it does not.

    Who is killed cannot say that its parameters are another process's again, a learner's that it pushed for.
    """
    if not (since := started(pid)):
        raise TransferFailed(f"the trainer's process {pid} cannot be found")
    return lambda: process_state(pid, since) != ENDED


def _handle(file: OpenFile | None) -> FileHandle:
    if file is None:
        raise TransferFailed("the parameters are not in the shared memory any more that they were found in; push again")
    return FileHandle(os.getpid(), file.descriptor, file.inode)


def attach(handle: SharedParametersHandle) -> Scattered:
    """Map a trainer's parameters into this process, to be read. Raises `TransferFailed`."""
    spans: dict[int, tuple[int, int]] = {}
    for number, start, nbytes in handle.parts:
        if not (0 <= number < len(handle.storages) and start >= 0 < nbytes):
            raise TransferFailed(f"refused to map {nbytes} bytes at {start} of memory {number}: they cannot be there")
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
    """Memory of the trainer's that holds its bytes ``first`` to ``end``, and the first that it holds."""
    if isinstance(storage, CudaHandle):
        memory = cuda_ipc.attach(storage)
        if end > memory.numel():
            raise TransferFailed(f"refused to map bytes {first} to {end} of {memory.numel()} on the trainer's GPU")
        return 0, memory
    path = f"/proc/{storage.pid:d}/fd/{storage.descriptor:d}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise TransferFailed(
            f"the trainer's parameters at {path} cannot be opened: {error.strerror}; pass bucket_bytes to have them "
            "copied to an arena instead"
        ) from error
    try:
        info = os.fstat(descriptor)
        if not _is_shared_memory(info) or info.st_ino != storage.inode:
            raise TransferFailed(f"refused to map {path}: not shared memory of this user's, or not what was offered")
        if end > info.st_size:
            raise TransferFailed(f"refused to map bytes {first} to {end} of {path}, which has {info.st_size}")
        begin = first - first % mmap.PAGESIZE
        return begin, _map(descriptor, begin, end - begin)
    finally:
        os.close(descriptor)


def _map(descriptor: int, begin: int, nbytes: int) -> torch.Tensor:
    """Part of a file, from a page on. Python's own mmap would keep the file open, of which a process may have few."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    # A loader that writes to what it loads would change the trainer's weights: it must not be able to.
    found: int | None = _libc.mmap(None, nbytes, mmap.PROT_READ, flags, descriptor, begin)
    if found is None or found == _FAILED:
        raise TransferFailed(f"{nbytes} bytes of shared parameters cannot be mapped: {os.strerror(ctypes.get_errno())}")
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(found)
    # At exit a thread may still be reading.
    weakref.finalize(memory, _libc.munmap, found, nbytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)
