"""The versions that a rank keeps: the one that it has loaded and the one before, if the pushes asked for that.

Without being asked, a standby holds the version before until the next push is loaded there.
"""

from __future__ import annotations

from collections.abc import Iterator

from weightsync.engine.stage import Staged
from weightsync.tensors.layout import Layout


class Labels:
    """The label of the version that a rank serves, and of the one before; empty if they are unknown."""

    def __init__(self) -> None:
        self.served = self.before = ""
        #: The last commit that was begun, and both labels before it.
        self._begun = ("", "", "")

    def begin(self, push: str) -> None:
        """The commit of ``push``, or a rollback, begins."""
        self._begun = push, self.served, self.before

    def applied(self, version: str) -> None:
        """This version is served from now on."""
        self.served, self.before = version, self.served

    def restored(self, push: str) -> None:
        """The version that was served before ``push`` is served again."""
        begun, *labels = self._begun
        if begun == push:
            self.served, self.before = labels

    def lost(self) -> None:
        """No version is served."""
        self.served = self.before = ""


class Kept:
    """Two slots, each emptied on its own when its memory is reused.

    `forget` is called by the thread that receives a push, everything else by the engine's loop.
    """

    def __init__(self) -> None:
        self.labels = Labels()
        self.current: Staged | None = None
        self.previous: Staged | None = None
        #: The last commit that was begun, and the values of the two above before it.
        self._before: tuple[str, Staged | None, Staged | None] = ("", None, None)

    @property
    def label(self) -> str:
        """The version before, if it is kept; otherwise empty."""
        kept = self.previous  # the receiving thread may forget it
        return "" if kept is None else kept.version

    def begin(self, push: str) -> None:
        """The commit of ``push`` begins."""
        self._before = (push, self.current, self.previous)
        self.labels.begin(push)

    def loaded(self, staged: Staged | None) -> None:
        """A push was loaded; ``staged`` is its version if that is to be kept."""
        if staged is None:
            self.clear()
        else:
            self.current, self.previous = staged, self.current

    def before(self, push: str) -> tuple[Staged | None, Staged | None]:
        """The two slots before the commit of ``push``."""
        begun, current, previous = self._before
        return (current, previous) if begun == push else (self.current, self.previous)

    def restored(self, slots: tuple[Staged | None, Staged | None]) -> None:
        """The version in the first of these `before` a commit was loaded again."""
        self._before = ("", None, None)
        self.current, self.previous = slots

    def prepare(self, new: Layout | None) -> None:
        """A push begins; ``new`` is its layout if it is to be kept.

        Drops the kept versions, unless loading them again would undo it: of what it writes they lack nothing.
        """
        names = {spec.name for spec in new.specs} if new is not None else set()

        def stays(kept: Staged | None) -> Staged | None:
            lacks = new is None or kept is None or names - {spec.name for spec in kept.layout.specs}
            return None if lacks else kept

        self.current, self.previous = stays(self.current), stays(self.previous)
        self._before = ("", None, None)

    def forget(self, arena: str | None) -> None:
        """Drop what lies in ``arena``, to which the sender writes now; in any arena if it is None."""
        if self.previous is not None and (arena is None or self.previous.arena in ("", arena)):
            self.previous = None
        if self.current is not None and self.current.arena and arena in (None, self.current.arena):
            self.current = None

    def disown(self, owner: str) -> bool:
        """Drop all if some lies in the memory of a sender other than ``owner``, which holds the lease now: a sender
        without the lease may overwrite it. Returns whether it did."""
        kept = self.current, self.previous, *self._before[1:]
        if foreign := any(one is not None and one.arena and one.owner != owner for one in kept):
            self.clear()
        return foreign

    def clear(self) -> None:
        """Keep nothing."""
        self.restored((None, None))

    def __iter__(self) -> Iterator[Staged]:
        return (kept for kept in (self.current, self.previous) if kept is not None)
