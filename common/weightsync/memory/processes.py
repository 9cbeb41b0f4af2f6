"""Other processes in the same process space: whether one runs, and whether it is still the same process."""

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
    """Start time of process ``pid``, in clock ticks since its host was booted; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # the name, in brackets, may contain spaces and brackets


def process_state(pid: int, since: int = 0) -> str:
    """Why a process does not answer: it `ENDED`, or "is stopped"; empty if it runs.

    ``since`` is its start time, see `started`: a process of the same number with another start time is a different one.
    """
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ENDED
    if status == psutil.STATUS_ZOMBIE or (since and started(pid) != since):
        return ENDED
    return "is stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""


def this_process() -> str:
    """Public name of a trainer: its user, host, process number and program."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container whose user has no name
        user = f"user {os.getuid()}"
    program = os.path.basename(sys.argv[0]) or "python"
    return f"{user} on {socket.gethostname()}, process {os.getpid()} ({program})"
