"""The server process at a URL, if it runs on this host as this user: what its environment says about plugins."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from weightsync.protocol.diagnosis import Finding
from weightsync.protocol.names import START_LINES

_PORTS: Final = {"http": 80, "https": 443}
_PACKAGES: Final = re.compile(r"\s(/.*?/(?:site|dist)-packages)/", re.MULTILINE)


class Server:
    """A Python process of this user that listens on this host; ``folders`` are where its packages come from."""

    def __init__(self, process: psutil.Process):
        self.pid = process.pid
        maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
        self.folders = sorted(set(_PACKAGES.findall(maps)))
        self.python = next(iter(process.cmdline()), "")
        #: Empty if the process has overwritten it.
        self.environment = process.environ() if "PATH" in process.environ() else {}

    def why_not_loaded(self, kind: str) -> Finding:
        """Why this server, an engine of ``kind``, has no routes of weightsync."""
        variable, line = f"{kind.upper()}_PLUGINS", START_LINES[kind].format(model="MODEL")
        if not any(next(Path(folder).glob("weightsync-*.dist-info"), None) for folder in self.folders):
            text = f"weightsync is not installed in the environment of process {self.pid} ({', '.join(self.folders)})"
            return _not_loaded(kind, text, f"{self.python} -m pip install weightsync, then {line}")
        named = self.environment.get(variable)
        if named and "weightsync" not in named.split(","):
            text = f"{variable}={named} of process {self.pid} does not name weightsync"
            return _not_loaded(kind, text, line.replace("=weightsync", f"={named},weightsync"))
        if named is None and self.environment and kind == "vllm":
            return _not_loaded(kind, f"{variable} of process {self.pid} is not set", f"start it as {line}")
        return _not_loaded(kind, f"the log of process {self.pid} says why", f"start it as {line}")


def _not_loaded(kind: str, text: str, mend: str) -> Finding:
    return Finding("plugin", "wrong", f"a {kind} server answers without weightsync: {text}", mend)


def listening(url: str) -> Server | None:
    """The server process at ``url``; None if it is on another host, another user's, or no Python program."""
    split = urlsplit(url)
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        found = ipaddress.ip_address(socket.gethostbyname(split.hostname or ""))
        own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        if not found.is_loopback and str(found) not in own:
            return None
        port = split.port or _PORTS[split.scheme]
        for entry in psutil.net_connections("tcp"):
            if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port and entry.pid:
                process = psutil.Process(entry.pid)
                if process.uids().effective == os.geteuid():
                    server = Server(process)
                    return server if server.folders else None
    return None
