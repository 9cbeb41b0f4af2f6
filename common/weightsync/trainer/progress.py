"""What ``Sender(progress=True)`` shows of a push: its phase, the engines that it waits for, and the bytes sent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm.auto import tqdm  # a widget in a notebook

#: Engines that are named; of the others the number is shown.
_NAMED = 2


class _Unfailing:
    """Standard error, without its errors: after one, of a pipe that nobody reads for example, tqdm keeps its lock."""

    def __init__(self) -> None:
        self._file = sys.stderr

    def write(self, text: str) -> None:
        with suppress(Exception):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(Exception):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Shown:
    """A bar; calls come from the threads of several engines. Nothing that it cannot draw fails a push."""

    def __init__(self, bar: tqdm[None] | None = None):
        self._bar = bar
        self._lock = threading.Lock()
        self._phase = ""
        self._waiting: dict[str, None] = {}

    def phase(self, name: str, engines: Iterable[str] = ()) -> None:
        """A phase has begun; it waits for ``engines``, by URL."""
        with self._lock:
            self._phase, self._waiting = name, dict.fromkeys(engines)
            self._refresh()

    def heard(self, engine: str) -> None:
        """An engine has answered."""
        with self._lock:
            self._waiting.pop(engine, None)
            self._refresh()

    def sent(self, nbytes: int) -> None:
        """So many bytes of the push were sent."""
        if self._bar is not None:
            with self._lock, suppress(Exception):
                self._bar.update(nbytes - self._bar.n)

    def _refresh(self) -> None:
        if self._bar is None:
            return
        with suppress(Exception):
            named = list(self._waiting)[:_NAMED]
            more = f" and {len(self._waiting) - _NAMED} more" if len(self._waiting) > _NAMED else ""
            self._bar.set_postfix_str(f"{self._phase}, waits for {', '.join(named)}{more}" if named else self._phase)


@contextmanager
def shown(what: str, nbytes: int, wanted: bool) -> Iterator[Shown]:
    """A bar for ``what``, which moves so many bytes; one that nobody sees unless it is ``wanted``."""
    if not wanted:
        yield Shown()
        return
    bar = tqdm(total=nbytes, unit="B", unit_scale=True, desc=what, file=_Unfailing())
    try:
        yield Shown(bar)
    finally:
        with suppress(Exception):
            bar.close()
