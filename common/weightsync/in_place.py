"""Parameters that are shared memory already, offered where they are: nothing is packed, the trainer's memory is read.

Every tensor's pages are mapped one after the other into one range of addresses, in the trainer and in every rank. To
all others that is an arena like any other, filled from the start.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed
from weightsync.handles import InPlaceHandle
from weightsync.layout import Layout, align

#: Tensors are laid out at multiples of this, so that their pages can be mapped side by side.
PAGE_BYTES: Final = mmap.PAGESIZE

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED: Final = ctypes.c_void_p(-1).value
_FIXED: Final = 0x10
_NO_ACCESS: Final = 0


def find(tensors: Iterable[torch.Tensor], known: InPlaceArena | None = None) -> list[torch.Tensor] | None:
    """The tensors, if each can be read by another process where it is; None otherwise.

    That takes host memory shared by file descriptor, as ``model.share_memory()`` makes it, in which each tensor is
    contiguous and begins at a page. Those at the addresses of ``known`` are taken to be so still.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return None
    found: list[torch.Tensor] = []
    before = [] if known is None else known.addresses
    for number, tensor in enumerate(tensors):
        same = number < len(before) and tensor.data_ptr() == before[number] and tensor.is_contiguous()
        if not same and tensor.numel() and not _readable(tensor):
            return None
        found.append(tensor)
    return found


def _readable(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
    shared = plain and tensor.is_shared()  # type: ignore[no-untyped-call]
    return shared and tensor.storage_offset() * tensor.itemsize % PAGE_BYTES == 0


class InPlaceArena:
    """``tensors``, for which `find` vouches, as one stream of ``layout``, whose tensors begin at pages.

    ``bytes`` is 1-D uint8 and the tensors' own memory. ``addresses`` are where ``tensors`` were when this was made.
    """

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]):
        files: dict[int, int] = {}
        parts: list[tuple[int, int, int]] = []
        for entry, tensor in zip(layout.entries, tensors, strict=True):
            if entry.nbytes == 0:
                continue
            descriptor = tensor.untyped_storage()._share_fd_cpu_()[0]
            number = files.setdefault(descriptor, len(files))
            start, nbytes = int(tensor.storage_offset()) * tensor.itemsize, align(entry.nbytes, PAGE_BYTES)
            if parts and parts[-1][0] == number and parts[-1][1] + parts[-1][2] == start:
                number, start, before = parts.pop()
                nbytes += before
            parts.append((number, start, nbytes))
        self.name = f"weightsync-{os.getpid()}-{secrets.token_hex(8)}"
        self._layout = layout
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        #: As long as they live nothing else can be at their addresses.
        self.tensors = list(tensors)
        inodes = tuple((descriptor, os.fstat(descriptor).st_ino) for descriptor in files)
        self._handle = InPlaceHandle(pid=os.getpid(), files=inodes, parts=tuple(parts))
        self.bytes = _map(list(files), parts, mmap.PROT_READ | mmap.PROT_WRITE)

    def holds(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this was made of tensors that lie there, and laid out like that."""
        same = tensors is self.tensors or self.addresses == [tensor.data_ptr() for tensor in tensors]
        return layout is self._layout and same

    def handle(self) -> InPlaceHandle:
        """What a rank needs to map the arena."""
        return self._handle

    def close(self) -> None:
        """Unmap; the memory is the trainer's."""
        self.tensors.clear()
        del self.bytes


def attach(handle: InPlaceHandle) -> torch.Tensor:
    """Map a trainer's parameters into this process as a 1-D uint8 tensor, to be read. Raises `TransferFailed`."""
    descriptors: list[int] = []
    try:
        sizes = []
        for number, inode in handle.files:
            path = f"/proc/{handle.pid:d}/fd/{number:d}"
            try:
                descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                raise TransferFailed(
                    f"the trainer's parameters at {path} cannot be opened: {error.strerror}; pass bucket_bytes to have "
                    "them copied to an arena instead"
                ) from error
            info = os.fstat(descriptors[-1])
            ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_ino == inode
            if not ours or info.st_dev != os.stat("/dev/shm").st_dev:
                raise TransferFailed(
                    f"refused to map {path}: not shared memory of this user's, or not what was offered"
                )
            sizes.append(align(info.st_size, PAGE_BYTES))
        for file, start, nbytes in handle.parts:
            aligned = start % PAGE_BYTES == nbytes % PAGE_BYTES == 0
            if not (0 <= file < len(sizes) and aligned and start >= 0 < nbytes and start + nbytes <= sizes[file]):
                raise TransferFailed(f"refused to map {nbytes} bytes at {start} of file {file}: they are not there")
        # A loader that writes to what it loads would change the trainer's weights: it must not be able to.
        return _map(descriptors, handle.parts, mmap.PROT_READ)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map(descriptors: Sequence[int], parts: Sequence[tuple[int, int, int]], access: int) -> torch.Tensor:
    """The parts, (file, start, bytes) in whole pages, one after the other."""
    total = sum(nbytes for _, _, nbytes in parts)
    if not total:
        return torch.empty(0, dtype=torch.uint8)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _mapped(None, total, _NO_ACCESS, private, -1, 0)
    memory: Any = (ctypes.c_uint8 * total).from_address(base)
    weakref.finalize(memory, _libc.munmap, base, total)
    at = base
    shared = mmap.MAP_SHARED | _FIXED | getattr(mmap, "MAP_POPULATE", 0)
    for file, start, nbytes in parts:
        _mapped(at, nbytes, access, shared, descriptors[file], start)
        at += nbytes
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mapped(at: int | None, nbytes: int, access: int, flags: int, descriptor: int, start: int) -> int:
    found: int | None = _libc.mmap(at, nbytes, access, flags, descriptor, start)
    if found is None or found == _FAILED:
        raise TransferFailed(f"{nbytes} bytes of shared parameters cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return found
