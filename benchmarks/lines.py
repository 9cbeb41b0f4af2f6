"""Line-based requests and replies between a benchmark and its child processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Mapping

#: Seconds; far more than any request takes.
LIMIT_S = 300.0


class Lines:
    """Exchanges lines with another process over two file descriptors."""

    def __init__(self, reading: int, writing: int):
        self._reading, self._writing, self._read = reading, writing, b""

    def say(self, verb: str, channel: str = "-", body: bytes = b"{}") -> None:
        """Send one line; ``channel`` has no spaces."""
        line = b" ".join((verb.encode(), channel.encode(), body)) + b"\n"
        while line:
            line = line[os.write(self._writing, line) :]

    def hear(self, timeout_s: float) -> tuple[str, str, bytes] | None:
        """The next line, split into its parts; None if none arrives in time. Raises EOFError at the end of input."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            if not select.select([self._reading], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = os.read(self._reading, 1 << 20)
            if not more:
                raise EOFError
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        verb, channel, body = line.split(b" ", 2)
        return verb.decode(), channel.decode(), body


def serve(lines: Lines, verbs: Mapping[str, Callable[[str, bytes], object]]) -> None:
    """Run a child: handle requests and reply until the input ends."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            heard = lines.hear(LIMIT_S)
            if heard is None:
                continue
            verb, channel, body = heard
            try:
                reply = verbs[verb](channel, body)
            except Exception as error:
                lines.say("error", channel, json.dumps(f"{verb} {channel}: {error!r}").encode())
                continue
            lines.say("done", channel, reply if isinstance(reply, bytes) else json.dumps(reply).encode())
