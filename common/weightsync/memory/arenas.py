"""Arenas: memory that a sender fills and engine ranks map, kept as long as the sender.

An arena holds buckets side by side. It is touched once when made, mapped once by each rank, and reused by every
push; nothing of it is allocated, opened or registered again while the model keeps its size.

Where the free memory, at the trainer and at the ranks beside it, has room for the whole stream, the arena is the stage:
nobody on this host copies it out. Otherwise it holds two buckets, and the sender packs one while the ranks copy the
other into stages of their own. What a killed sender leaves is removed by the next: its file is no longer locked. A
login manager may remove files when their user logs out; the next push makes new ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import time
import weakref
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
#: Between making and locking its file an owner looks dead; that takes far less than this.
_SWEEP_AFTER_S: Final = 10.0


def host_id() -> str:
    """Equal for two processes of one user that can share memory: same boot, same shared-memory mount."""
    return f"{_boot()}:{SHM_DIRECTORY.stat().st_dev}"


def network_id() -> str:
    """Equal for two processes that have the same network interfaces, the loopback too; empty where none can tell."""
    try:
        return f"{_boot()}:{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_space() -> str:
    """Equal for two processes that know each other by the same process numbers."""
    return os.readlink("/proc/self/ns/pid")


def free_bytes(device: torch.device) -> int:
    """Memory that a stage could take on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_host_bytes()


def _free_host_bytes() -> int:
    limit = cgroups.free_bytes()
    available = int(psutil.virtual_memory().available)
    return available if limit is None else min(limit, available)


def free_shared_bytes() -> int:
    """Memory that an arena could take, in bytes: free in the mount, in the machine and in the container."""
    mount = os.statvfs(SHM_DIRECTORY)
    return min(mount.f_bavail * mount.f_frsize, _free_host_bytes())


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    # MAP_POPULATE takes every page now: a first touch during a push would cost ten times the copy.
    memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(memory, dtype=torch.uint8)


class ShmArena:
    """Shared memory of ``nbytes`` made by the sender; ``bytes`` is a 1-D uint8 CPU tensor.

    Its file is locked as long as its owner lives, so that the next sender can tell and remove what a dead one left.
    """

    def __init__(self, nbytes: int):
        sweep()
        path = SHM_DIRECTORY / f"{_SHM_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = forks.own(lambda: os.open(path, flags, 0o600))
        #: Removes the file; also runs when the arena is forgotten and when the interpreter exits.
        self.close = weakref.finalize(self, _remove, path, descriptor, os.getpid())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Reserves the pages, so that a full mount is an error here and not a SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, nbytes)
            # By a descriptor of its own: Python's mmap keeps one, and a forked child would inherit that with the lock.
            mapped = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self.bytes = _map(mapped, nbytes)
            finally:
                os.close(mapped)
        except OSError as error:
            self.close()
            raise TransferFailed(
                f"{nbytes} bytes of shared memory could not be had from {SHM_DIRECTORY}: {error.strerror}; "
                "free some, or pass a smaller bucket_bytes"
            ) from error
        self.name = path.name
        self._handle = ShmHandle(path=str(path), nbytes=nbytes)

    def handle(self) -> ShmHandle:
        """What a rank needs to map the arena."""
        return self._handle


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a forked child that forgets what is its parent's
        path.unlink(missing_ok=True)
        forks.disown(descriptor)
        os.close(descriptor)


def sweep(older_than_s: float = _SWEEP_AFTER_S) -> None:
    """Remove this user's arenas whose owners have died; nothing that a sender has not made."""
    for path in SHM_DIRECTORY.iterdir():
        if not OWN_NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                info = os.fstat(descriptor)
                ours = info.st_uid == os.geteuid() and info.st_mode == stat.S_IFREG | 0o600
                if ours and time.time() - info.st_ctime >= older_than_s:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
                    path.unlink()
            finally:
                os.close(descriptor)


def plain(nbytes: int, device: torch.device) -> torch.Tensor:
    """New memory of zeros, 1-D uint8, which other processes can be lent and a transport can register, on a GPU too."""
    with cuda_ipc.unexpandable():
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class CudaArena:
    """Device memory of ``nbytes`` made by the sender; ``bytes`` is a 1-D uint8 CUDA tensor."""

    def __init__(self, nbytes: int, device: torch.device):
        self.bytes = plain(nbytes, device)
        self.name = f"{_SHM_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"

    def handle(self) -> CudaHandle:
        """What one rank needs to map the arena."""
        return cuda_ipc.share(self.bytes.untyped_storage())

    def close(self) -> None:
        """Give the memory back to torch."""
        del self.bytes


Arena = ShmArena | CudaArena | SharedParameters


def reachable(arena: Arena) -> bool:
    """Whether a rank could still map it: login managers remove a user's shared memory once it has logged out."""
    return not isinstance(arena, ShmArena) or os.path.lexists(arena.handle().path)


def attach(handle: ShmHandle | CudaHandle) -> torch.Tensor:
    """Map a sender's arena into this process as a 1-D uint8 tensor. Raises `TransferFailed`."""
    return _attach_shm(handle) if isinstance(handle, ShmHandle) else cuda_ipc.attach(handle)


def _attach_shm(handle: ShmHandle) -> torch.Tensor:
    path = Path(handle.path)
    ours = path.parent == SHM_DIRECTORY and path.name.startswith(_SHM_PREFIX) and handle.path.isprintable()
    if not ours or handle.nbytes <= 0:
        raise TransferFailed(f"refused to map {handle.path!r}: not a sender's arena")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransferFailed(f"the sender's arena {path} cannot be opened: {error.strerror}") from error
    try:
        info = os.fstat(descriptor)
        private = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
        if not private or info.st_size != handle.nbytes:
            raise TransferFailed(f"refused to map {path}: not this user's alone, or not of {handle.nbytes} bytes")
        return _map(descriptor, handle.nbytes)
    finally:
        os.close(descriptor)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of one shape and dtype, of which ``target`` is contiguous.

    Within host memory as one memcpy in this thread: torch would wake all its threads for every tensor and wait for the
    slowest, which takes several times as long where something else uses a core, an engine's idle loop for one.
    """
    plain = source.is_contiguous() and not source.is_neg() and target.dtype == source.dtype
    assert target.nbytes == source.nbytes, "a copy must not write past its target"
    if plain and target.device.type == source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def synchronize(device: torch.device) -> None:
    """Wait for copies queued on an accelerator; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
