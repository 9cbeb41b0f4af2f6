"""Descriptors that a forked child must not keep.

A listening socket or a locked file says that its owner lives. A child that inherits it, a data loader's worker for one,
would go on saying so after its parent was killed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

_held: Final[set[int]] = set()
#: Held across a fork, so that none happens between the opening of a descriptor and its being noted.
_turn: Final = threading.RLock()


def own(opened: Callable[[], int]) -> int:
    """A descriptor that ``opened`` returns, of which children that Python forks from now on get no copy."""
    with _turn:
        descriptor = opened()
        _held.add(descriptor)
        return descriptor


def disown(descriptor: int) -> None:
    """Forget a descriptor that is about to be closed."""
    with _turn:
        _held.discard(descriptor)


def _in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
    _turn.release()


os.register_at_fork(before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_in_child)
