"""The lease of an engine: one trainer at a time may push into it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from weightsync.errors import LeaseHeld, TransferFailed
from weightsync.protocol.addresses import owner_lives

#: Seconds after which a sender that is silent during a push loses its lease.
PUSH_TTL_S: Final = 10.0
#: Seconds that a sender keeps its lease between pushes: longer than a training step takes.
IDLE_TTL_S: Final = 600.0


class Lease:
    """One engine's lease, in the memory of its front end.

    It belongs to ``owner`` until released, until the owner's socket is gone, or until it has not been heard of for
    `PUSH_TTL_S` in the middle of a push, else for `IDLE_TTL_S`. Another then takes it without asking.

    ``taken`` is called with the time, in seconds since 1970, at which the owner took it, and with 0 when it was given
    back or was found to have no living owner.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        lives: Callable[[str], bool] = owner_lives,
        taken: Callable[[float], None] = lambda taken: None,
    ):
        self._clock, self._lives, self._tell = clock, lives, taken
        self._taken_at = 0.0
        self.owner = self.holder = self._address = ""
        self._until = self._heard = 0.0
        #: The address of an owner, and the running check whether it lives.
        self._probe: tuple[str, asyncio.Future[bool]] | None = None

    async def lapsed(self) -> bool:
        """Whether the lease has no owner, or one that is no longer alive."""
        while self.owner and self._clock() < self._until:
            asked = self._address
            if await self._is_alive(asked):
                return False
            if asked == self._address:
                break
        self._tell(0.0)
        return True

    async def _is_alive(self, address: str) -> bool:
        # In a thread, because another host may take a moment to answer; one check serves all callers.
        if self._probe is None or self._probe[0] != address:
            self._probe = address, asyncio.ensure_future(asyncio.to_thread(self._lives, address))
        probe = self._probe
        try:
            return await asyncio.shield(probe[1])
        except TransferFailed:
            return False  # something else is at that address now
        finally:
            if self._probe is probe:
                self._probe = None

    async def take(self, owner: str, holder: str, address: str) -> None:
        """Give the lease to ``owner`` at ``address``; ``holder`` names it to other senders. Raises `LeaseHeld`."""
        if self.owner != owner and not await self.lapsed():
            raise LeaseHeld(self._held())
        if self.owner != owner:
            self._taken_at = time.time()
        self.owner, self.holder, self._address = owner, holder, address
        self._hear()

    def renew(self, owner: str) -> None:
        """Extend the lease during a push. Raises `LeaseHeld` if ``owner`` no longer holds it."""
        self.check(owner)
        self._hear()

    def _hear(self) -> None:
        self._heard = self._clock()
        self._until = self._heard + PUSH_TTL_S
        self._tell(self._taken_at)

    @property
    def silent_s(self) -> float:
        """Seconds since the owner took or renewed the lease."""
        return self._clock() - self._heard

    def check(self, owner: str) -> None:
        """Raise `LeaseHeld` unless ``owner`` holds the lease."""
        if self.owner != owner:
            raise LeaseHeld(self._held() if self.owner else "the lease was taken from this sender; push again")

    def excuse(self, stalled_s: float) -> None:
        """Extend the lease by a time in which this process was too busy to handle renewals."""
        self._until += max(0.0, stalled_s)

    def idle(self) -> None:
        """Extend the lease after a push, so that its owner keeps it for the next."""
        self._until = self._clock() + IDLE_TTL_S

    def drop(self) -> None:
        """End the lease."""
        self.owner = self.holder = self._address = ""
        self._tell(0.0)

    def _held(self) -> str:
        return (
            f"another trainer pushes here: {self.holder or 'it did not say who'}; close its Sender, wait until it is "
            "gone, or end its lease with: weightsync abort URL"
        )
