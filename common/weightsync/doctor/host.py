"""The trainer's host: key, shared memory, transports."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Final

import torch

from weightsync.errors import WeightSyncError
from weightsync.memory import arenas, cuda_ipc
from weightsync.protocol import auth
from weightsync.protocol.diagnosis import Finding
from weightsync.protocol.directories import SHM_DIRECTORY
from weightsync.transports import registry

#: Bytes: two of the smallest buckets of a large model.
_LEAST_BYTES: Final = 32 << 20


def findings(used: Collection[str] | None) -> Iterator[Finding]:
    """What hinders a trainer here. What hinders a transport is wrong if it is in ``used``, or that is None."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield auth.check()
    yield shared_memory()
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call] # before that, not every version of torch tells its settings
        if cuda_ipc.expandable():
            text = "torch's allocator has expandable segments, so parameters on the GPU cannot be read in place"
            yield Finding("allocator", "note", text, "unset PYTORCH_CUDA_ALLOC_CONF, if copies take too long")
    for finding in registry.findings(device, 0):
        tried = _try(finding.check, device) if finding.level == "ok" else finding
        yield of_transport(tried or finding, used)


def of_transport(finding: Finding, used: Collection[str] | None) -> Finding:
    """``finding``, which is not wrong if it is about a transport that is not ``used``."""
    if finding.level != "wrong" or used is None or finding.check in used or finding.check not in registry.names():
        return finding
    return Finding(finding.check, "note", f"{finding.text}; it is not used", finding.mend)


def shared_memory() -> Finding:
    """Whether an arena fits into shared memory; those that senders have here already count as free."""
    try:
        mount, free = os.statvfs(SHM_DIRECTORY), arenas.free_shared_bytes() + arenas.held_bytes()
    except OSError as error:
        text = f"{SHM_DIRECTORY} cannot be used: {error.strerror}"
        return Finding("shared memory", "wrong", text, f"mount -t tmpfs tmpfs {SHM_DIRECTORY}")
    size = _shown(mount.f_blocks * mount.f_frsize)
    if not os.access(SHM_DIRECTORY, os.W_OK | os.X_OK):
        text = f"this user may not write to {SHM_DIRECTORY}"
        return Finding("shared memory", "wrong", text, f"chmod 1777 {SHM_DIRECTORY}")
    text = f"{_shown(free)} of {size} in {SHM_DIRECTORY} can be used for an arena"
    if free >= _LEAST_BYTES:
        return Finding("shared memory", "ok", text)
    if mount.f_bavail * mount.f_frsize >= _LEAST_BYTES:
        mend = "free memory of this host or container, or docker run --memory with more"
        return Finding("shared memory", "wrong", f"{text}: memory is short, or the container's limit is reached", mend)
    return Finding("shared memory", "wrong", text, f"df -h {SHM_DIRECTORY}, or docker run --shm-size=8g")


def _shown(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"


def _try(name: str, device: torch.device) -> Finding | None:
    """Make a sender's end of the transport, and close it; returns what went wrong."""
    try:
        registry.spec(name).trainer_end(device, None, "").close()
    except WeightSyncError as error:
        return Finding(name, "wrong", str(error), f'Sender(transport=...) with another one than "{name}"')
    except Exception as error:  # of the library below; a diagnosis must go on
        return Finding(name, "wrong", f"{type(error).__name__}: {error}", f"pip install --upgrade {name}")
    return None
