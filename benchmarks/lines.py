"""Lines between a benchmark and its child processes: an order each, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Mapping

#: Nothing here takes so long, in seconds.
LIMIT_S = 300.0


class Lines:
    """Lines to and from another process over two file descriptors."""

    def __init__(self, reading: int, writing: int):
        self._reading, self._writing, self._read = reading, writing, b""

    def say(self, verb: str, lane: str = "-", body: bytes = b"{}") -> None:
        """Send one line; ``lane`` has no spaces."""
        line = b" ".join((verb.encode(), lane.encode(), body)) + b"\n"
        while line:
            line = line[os.write(self._writing, line) :]

    def hear(self, timeout_s: float) -> tuple[str, str, bytes] | None:
        """The next line, in the parts it was sent in; None if none comes in time. Raises EOFError where none will."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            if not select.select([self._reading], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = os.read(self._reading, 1 << 20)
            if not more:
                raise EOFError
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        verb, lane, body = line.split(b" ", 2)
        return verb.decode(), lane.decode(), body


def serve(lines: Lines, verbs: Mapping[str, Callable[[str, bytes], object]]) -> None:
    """A child: do what it is told, and say what comes of it, until the other side hangs up."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            heard = lines.hear(LIMIT_S)
            if heard is None:
                continue
            verb, lane, body = heard
            try:
                reply = verbs[verb](lane, body)
            except Exception as error:
                lines.say("error", lane, json.dumps(f"{verb} {lane}: {error!r}").encode())
                continue
            lines.say("done", lane, reply if isinstance(reply, bytes) else json.dumps(reply).encode())
