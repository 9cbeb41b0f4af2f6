"""Say what goes on while something slow does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def alive(what: str) -> Iterator[None]:
    """Print what is done, and every five seconds that it still is."""
    done = threading.Event()
    start = time.monotonic()

    def tell() -> None:
        while not done.wait(5.0):
            print(f"  ... {what}: {time.monotonic() - start:.0f} s", flush=True)

    print(what, flush=True)
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(10.0)
