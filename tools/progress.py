"""What is done again and again beside something slow, such as to say that it goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def beside(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """A thread calls ``act`` after every so many seconds inside the context."""
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(seconds):
            act()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10.0)


@contextlib.contextmanager
def alive(what: str) -> Iterator[None]:
    """Print what is done, and every five seconds that it still is."""
    start = time.monotonic()
    print(what, flush=True)
    with beside(5.0, lambda: print(f"  ... {what}: {time.monotonic() - start:.0f} s", flush=True)):
        yield
