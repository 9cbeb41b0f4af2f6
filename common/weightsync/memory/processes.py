"""What can be seen of another process of this process space: whether it runs, and whether it still is the same one."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from pathlib import Path
from typing import Final

import psutil

ENDED: Final = "has ended"


def started(pid: int) -> int:
    """When a process was started, in clock ticks since its host was; 0 if there is none of this number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # its name, in brackets, may hold spaces and brackets


def process_state(pid: int, since: int = 0) -> str:
    """What can be seen of a process that does not answer; empty if it runs.

    ``since`` is when it was `started`: a process of its number that was started at another time is not the same one.
    """
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ENDED
    if status == psutil.STATUS_ZOMBIE or (since and started(pid) != since):
        return ENDED
    return "is stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""


def this_process() -> str:
    """What others are told of a trainer: whose it is, where, and which program."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container whose user has a number alone
        user = f"user {os.getuid()}"
    program = os.path.basename(sys.argv[0]) or "python"
    return f"{user} on {socket.gethostname()}, process {os.getpid()} ({program})"
