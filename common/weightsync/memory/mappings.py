"""Finds the open file that is mapped at an address of this process, from Linux's ``/proc``."""

from __future__ import annotations

import bisect
import contextlib
import os
from typing import NamedTuple


class OpenFile(NamedTuple):
    """A file that this process has open, by descriptor and inode."""

    descriptor: int
    inode: int


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    device: tuple[int, int]
    inode: int


class Mappings:
    """A snapshot of this process's shared mappings and open files."""

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []
        with open("/proc/self/maps") as lines:
            for line in lines:
                span, access, offset, device, inode, *_ = line.split(maxsplit=5)
                if access.endswith("s"):  # a shared mapping, not a private one
                    start, end = (int(number, 16) for number in span.split("-"))
                    major, minor = (int(number, 16) for number in device.split(":"))
                    self._mappings.append(_Mapping(start, end, int(offset, 16), (major, minor), int(inode)))
        self._starts = [mapping.start for mapping in self._mappings]
        self._open: dict[tuple[int, int, int], int] = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
                info = os.fstat(int(name))
                key = os.major(info.st_dev), os.minor(info.st_dev), info.st_ino
                self._open.setdefault(key, int(name))

    def file(self, address: int, nbytes: int) -> OpenFile | None:
        """The open file whose first ``nbytes`` bytes are mapped at ``address``; None if there is none."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        found = self._mappings[at]
        if address + nbytes > found.end or found.offset + address - found.start != 0:
            return None
        descriptor = self._open.get((*found.device, found.inode))
        return None if descriptor is None else OpenFile(descriptor, found.inode)
