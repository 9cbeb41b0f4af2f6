"""Arenas: memory that a sender fills and engine ranks map. An arena lives as long as its sender.

An arena holds adjacent buckets. Its pages are touched once when it is made, each rank maps it once, and every push
reuses it; nothing is allocated, opened or registered again while the model keeps its size.

If the free memory suffices for the whole stream, for the trainer and the ranks on its host, the arena is the stage: no
rank on this host copies it. Otherwise the arena holds two buckets, and the sender packs one while the ranks copy the
other into their own stages. The next sender removes the files of a killed one, which are no longer locked. A login
manager may remove a user's files at logout; the next push then makes new ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import secrets
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import psutil
import torch

from weightsync.errors import TransferFailed
from weightsync.memory import cgroups, cuda_ipc, forks
from weightsync.memory.shared_parameters import SharedParameters
from weightsync.protocol.directories import OWN_NAME, SHM_DIRECTORY
from weightsync.protocol.handles import CudaHandle, ShmHandle

_SHM_PREFIX: Final = "weightsync-"
#: The unit of ``st_blocks``.
_BLOCK_BYTES: Final = 512
#: Of Linux: the flag of mmap and the advice with which every page is mapped; and of how many bytes at a time, so that
#: other threads can map memory in between.
_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 1 << 20
#: In seconds: the owner of a younger file may not have locked it yet.
_SWEEP_AFTER_S: Final = 10.0


def host_id() -> str:
    """Equal for two processes of one user that can share memory: same boot and same shared-memory mount."""
    return f"{_boot()}:{SHM_DIRECTORY.stat().st_dev}"


def network_id() -> str:
    """Equal for two processes with the same network interfaces, loopback included; empty if that is unknown."""
    try:
        return f"{_boot()}:{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_space() -> str:
    """Equal for two processes in the same process namespace, where process numbers mean the same."""
    return os.readlink("/proc/self/ns/pid")


def processes_id() -> str:
    """As `process_space`, and different on different hosts."""
    return f"{_boot()}:{process_space()}"


def free_bytes(device: torch.device) -> int:
    """Memory that a stage could take on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_host_bytes()


def trim(device: torch.device) -> None:
    """Give the system back what this process has freed: glibc keeps it, in pieces that large tensors do not fit in, and
    torch what was freed on a GPU.

    Takes some milliseconds, without Python's lock.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


def _free_host_bytes() -> int:
    limit = cgroups.free_bytes()
    available = int(psutil.virtual_memory().available)
    return available if limit is None else min(limit, available)


def free_shared_bytes() -> int:
    """Memory that an arena could take, in bytes: the least of what the mount, the machine and the container have."""
    mount = os.statvfs(SHM_DIRECTORY)
    return min(mount.f_bavail * mount.f_frsize, _free_host_bytes())


def held_bytes() -> int:
    """Shared memory that the arenas of this user's senders on this host take, in bytes."""
    found = 0
    for path in SHM_DIRECTORY.iterdir():
        with contextlib.suppress(OSError):
            info = path.lstat()
            ours = OWN_NAME.fullmatch(path.name) and stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
            found += info.st_blocks * _BLOCK_BYTES if ours else 0
    return found


def _map(descriptor: int, nbytes: int, *, in_part: bool) -> torch.Tensor:
    memory = torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    # Every page now: a first touch during a push would take ten times as long as the copy.
    if not in_part and not populate(memory):
        memory = torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _POPULATE), dtype=torch.uint8)
    return memory


def populate(memory: torch.Tensor, between: Callable[[], object] = lambda: None) -> bool:
    """Map every page of new host memory, 1-D and contiguous, in bytes; returns whether the system, Linux 5.14 or later,
    can. ``between`` is called every few milliseconds.

    Without Python's lock, which mmap would hold meanwhile, and an engine could do nothing.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    start, end = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, memory.data_ptr() + memory.numel()
    for at in range(start, end, _POPULATE_BYTES):
        if madvise(at, min(_POPULATE_BYTES, end - at), _MADV_POPULATE_WRITE):
            return False
        between()
    return True


class ShmArena:
    """Shared host memory of ``nbytes``, made by the sender; ``bytes`` is a 1-D uint8 CPU tensor.

    Its file stays locked as long as its owner lives, so that the next sender can remove the files of a dead one.
    ``in_part``: several processes write it, and each maps what it touches. Raises `TransferFailed` if the memory cannot
    be allocated.
    """

    def __init__(self, nbytes: int, *, in_part: bool = False):
        sweep()
        path = SHM_DIRECTORY / f"{_SHM_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        file = forks.own_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        #: Removes the file; also runs when the arena is garbage-collected and at exit.
        self.close = weakref.finalize(self, _remove, path, file, os.getpid())
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Reserves the pages, so that a full mount is an error here and not a SIGBUS at the first write.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            # With another descriptor: Python's mmap keeps a copy, and a forked child would inherit that with the lock.
            with forks.opened(path, os.O_RDWR | os.O_NOFOLLOW) as mapped:
                self.bytes = _map(mapped.fileno(), nbytes, in_part=in_part)
        except OSError as error:
            self.close()
            raise TransferFailed(
                f"{nbytes} bytes of shared memory could not be allocated in {SHM_DIRECTORY}: {error.strerror}; "
                "free some, or pass a smaller bucket_bytes"
            ) from error
        self.name = path.name
        self._handle = ShmHandle(path=str(path), nbytes=nbytes)

    def handle(self) -> ShmHandle:
        """The handle with which ranks map the arena."""
        return self._handle


def _remove(path: Path, file: io.FileIO, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, whose copy of the arena goes while the parent still uses the file
        path.unlink(missing_ok=True)
        file.close()


def sweep(older_than_s: float = _SWEEP_AFTER_S) -> None:
    """Remove the files of this user's arenas whose owners have died. Leaves alone whatever no sender has created."""
    for path in SHM_DIRECTORY.iterdir():
        if not OWN_NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError), forks.opened(path, os.O_RDWR | os.O_NOFOLLOW) as file:
            info = os.fstat(file.fileno())
            ours = info.st_uid == os.geteuid() and info.st_mode == stat.S_IFREG | 0o600
            if ours and time.time() - info.st_ctime >= older_than_s:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
                path.unlink()


def plain(nbytes: int, device: torch.device) -> torch.Tensor:
    """A new 1-D uint8 tensor of zeros that can be shared with other processes and registered, also on a GPU."""
    with cuda_ipc.unexpandable():
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class CudaArena:
    """Device memory of ``nbytes``, made by the sender; ``bytes`` is a 1-D uint8 CUDA tensor."""

    def __init__(self, nbytes: int, device: torch.device):
        self.bytes = plain(nbytes, device)
        self.name = f"{_SHM_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"

    def handle(self) -> CudaHandle:
        """A handle with which one rank can map the arena."""
        return cuda_ipc.share(self.bytes.untyped_storage())

    def close(self) -> None:
        """Return the memory to torch's allocator."""
        del self.bytes


Arena = ShmArena | CudaArena | SharedParameters


def make(nbytes: int, device: torch.device, *, in_part: bool = False) -> ShmArena | CudaArena:
    """An arena on a device; ``in_part`` as in `ShmArena`. Raises `TransferFailed`."""
    return CudaArena(nbytes, device) if device.type == "cuda" else ShmArena(nbytes, in_part=in_part)


def is_shared(device: torch.device) -> bool:
    """Whether all processes of a host can write into one arena on a device."""
    return device.type == "cpu"


def reachable(arena: Arena) -> bool:
    """Whether a rank can still map the arena: a login manager may have removed its file at logout."""
    return not isinstance(arena, ShmArena) or os.path.lexists(arena.handle().path)


def attach(handle: ShmHandle | CudaHandle, *, in_part: bool = False) -> torch.Tensor:
    """Map a sender's arena into this process, as a 1-D uint8 tensor; ``in_part`` as in `ShmArena`.

    Raises `TransferFailed` if it cannot be mapped or is not private to this user.
    """
    return _attach_shm(handle, in_part) if isinstance(handle, ShmHandle) else cuda_ipc.attach(handle)


def _attach_shm(handle: ShmHandle, in_part: bool) -> torch.Tensor:
    path = Path(handle.path)
    ours = path.parent == SHM_DIRECTORY and path.name.startswith(_SHM_PREFIX) and handle.path.isprintable()
    if not ours or handle.nbytes <= 0:
        raise TransferFailed(f"refused to map {handle.path!r}: not a sender's arena")
    try:
        file = forks.opened(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise TransferFailed(f"the sender's arena {path} cannot be opened: {error.strerror}") from error
    with file:
        info = os.fstat(file.fileno())
        private = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
        if not private or info.st_size != handle.nbytes:
            raise TransferFailed(f"refused to map {path}: not private to this user, or not {handle.nbytes} bytes long")
        return _map(file.fileno(), handle.nbytes, in_part=in_part)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target``, which has the same shape and dtype and is contiguous.

    Between contiguous host tensors of one dtype this is one memcpy in this thread. torch would wake all its threads for
    every tensor and wait for the slowest, which takes several times as long if a core is busy, for example with an
    engine's idle loop.
    """
    plain = source.is_contiguous() and not source.is_neg() and target.dtype == source.dtype
    assert target.nbytes == source.nbytes, "a copy must not write past its target"
    if plain and target.device.type == source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def selected(device: torch.device) -> AbstractContextManager[object]:
    """Context in which ``device`` is the current one of its kind in this thread."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def synchronize(device: torch.device) -> None:
    """Wait for copies that are queued on an accelerator; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
