"""A process that has imported everything and quickly forks engines and trainers on request.

``python -m tests.scenarios.nursery DESCRIPTOR`` serves the other end of the socket with that descriptor.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import psutil

from tools import servers

SITE = servers.ROOT / "tests" / "faults" / "site"
_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 1 << 20
#: Descriptors per message; Linux allows 253.
_MOST_FILES = 128


class Nursery:
    """The client of the process that starts all engines and trainers of scenarios."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH"), str(servers.ROOT)]))
        with theirs, (scratch / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.scenarios.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "FAULT_FILE": str(scratch / "none"), "OMP_NUM_THREADS": "1"},
            )
        assert self.channel.recv(16) == b"ready", (scratch / "log").read_text()

    def start(self, role: str, fault_file: Path, files: list[int] = (), **more: object) -> Child:
        """Fork a child for ``role``; ``fault_file`` orders its faults, and it inherits the descriptors ``files``."""
        order = {"role": role, "faults": str(fault_file), "log": str(fault_file.with_suffix(".log")), **more}
        socket.send_fds(self.channel, [json.dumps(order).encode()], list(files))
        return Child(int(self.channel.recv(32)))

    def close(self) -> None:
        """End the process and all its children."""
        self.channel.close()
        self._process.wait(30)


class Child:
    """A process that the nursery forked and reaps."""

    def __init__(self, pid: int):
        self.pid = pid
        self._file = os.pidfd_open(pid)

    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not select.select([self._file], [], [], 0)[0]

    def stopped(self) -> bool:
        """Whether a signal has stopped the process."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def send(self, what: int) -> None:
        """Send a signal if the process has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, what)

    def kill(self) -> None:
        """End it now."""
        self.send(signal.SIGKILL)
        select.select([self._file], [], [], 30)

    def close(self) -> None:
        """End the process and close its descriptor."""
        self.kill()
        os.close(self._file)


def receive(channel: socket.socket) -> tuple[dict, list[int]]:
    """Receive an order and its descriptors; the order is empty when the other end has closed."""
    text, files, _, _ = socket.recv_fds(channel, _MOST_BYTES, _MOST_FILES)
    return json.loads(text) if text else {}, list(files)


def _child(order: dict, files: list[int]) -> None:
    import sitecustomize

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sitecustomize.FILE = order["faults"]
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order["role"] == "engine":
        from tests.scenarios.engine import run
    else:
        from tests.scenarios.trainer import run
    run(order, files)


def main() -> None:
    """Fork children on request until the socket closes."""
    from tests.scenarios import engine, trainer  # noqa: F401 - what children would import

    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    channel.send(b"ready")
    while True:
        order, files = receive(channel)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            try:
                channel.close()
                _child(order, files)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        for file in files:
            os.close(file)
        channel.send(str(pid).encode())


if __name__ == "__main__":
    main()
