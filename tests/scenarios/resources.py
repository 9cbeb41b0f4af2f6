"""What a process uses that senders must release: descriptors, threads, shared memory and sockets."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

import psutil

from weightsync.memory import arenas
from weightsync.protocol import directories


class OpenResources(NamedTuple):
    """The resources that this process uses."""

    files: list[str]
    threads: int
    shared: list[str]
    sockets: list[str]
    mapped: list[str]


def held(own: Set[int] = frozenset()) -> OpenResources:
    """The resources in use now, without the descriptors ``own``."""
    gc.collect()  # an error and the frame that raised it may refer to each other
    files = []
    for entry in os.scandir("/proc/self/fd"):
        if int(entry.name) not in own:
            try:
                files.append(os.readlink(entry.path).split(":")[0])
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
    names = f"weightsync-{os.getpid()}-*"
    shared = [path.name for path in arenas.SHM_DIRECTORY.glob(names)]
    sockets = [path.name for path in directories.directory().glob(names)]
    return OpenResources(sorted(files), psutil.Process().num_threads(), shared, sockets, mapped("self", "/weightsync-"))


def mapped(pid: int | str, *marks: str) -> list[str]:
    """The files that a process maps whose paths have one of these marks."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if any(mark in line for mark in marks)]


def left(before: OpenResources, own: Set[int] = frozenset()) -> str:
    """What is in use now beyond ``before``, when no sender was; empty if nothing is."""
    now = held(own)
    found = {
        "files": sorted((Counter(now.files) - Counter(before.files)).elements()),
        f"{now.threads} threads after {before.threads}": _threads() if now.threads > before.threads else [],
        "shared memory": now.shared,
        "sockets": now.sockets,
        "mapped": sorted((Counter(now.mapped) - Counter(before.mapped)).elements()),
    }
    return ", ".join(f"{what}: {', '.join(those)}" for what, those in found.items() if those)


def _threads() -> list[str]:
    """The names of this process's threads; those of libraries have none."""
    return sorted(thread.name for thread in threading.enumerate())
