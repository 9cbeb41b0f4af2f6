"""``weightsync follow``: pushes each version that appears in a folder, from a copy of its own, with a `Sender`.

Whatever is damaged, unsigned or without its base is refused by name, and the newest version that is none of that is
pushed. Engines learn nothing of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.errors import AuthenticationFailed, TransferFailed, WeightSyncError
from weightsync.files.held import HeldVersion
from weightsync.files.places import Unreachable, open_place, reported
from weightsync.files.shelf import numbers, read_version
from weightsync.protocol.version_files import Version, manifest_name, signing_key
from weightsync.trainer.sender import Sender

Say = Callable[[str, dict[str, Any]], None]
"""Tells a user something: as text, and as fields."""


class Follower:
    """Brings engines to the newest good version of the folder or store ``where``: call `step` again and again.

    ``timeout_s`` is for each call of the `Sender`. Raises `AuthenticationFailed` without a key, and `UnsupportedOption`
    if ``where`` cannot be opened.
    """

    def __init__(self, where: str, engines: Sequence[object], say: Say, timeout_s: float = 300.0):
        self._key = signing_key()
        self._where, self._engines, self._say, self._timeout_s = where, list(engines), say, timeout_s
        self._place, self._held = open_place(where), HeldVersion()
        #: Manifests that were verified, and why the bytes of some were refused, which are not read again.
        self._versions: dict[int, Version] = {}
        self._refused: dict[int, WeightSyncError] = {}
        self._sender: Sender | None = None
        #: The number of the version that all engines were brought to.
        self._pushed = 0
        #: What went wrong in this step and in the last one, which is not told again.
        self._told: set[str] = set()
        self._again: set[str] = set()

    def step(self) -> bool:
        """Look once, and push if there is something to push.

        Returns whether all engines serve the newest version, and no newer one was refused. Failures are told, not
        raised: the next step tries again.
        """
        self._again, self._told = self._told, set()
        try:
            with reported(f"{self._where} cannot be read"):
                there = numbers(self._place.names())
            complete = self._read_newest(there)
            self._bring_engines()
        except WeightSyncError as error:
            self._tell(error)
            return False
        if not there:
            self._tell(TransferFailed(f"{self._where} holds no version"))
        return complete and bool(self._pushed) and self._pushed == self._held.number

    def close(self) -> None:
        """Give the engines' leases back, and memory."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._held.close()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _read_newest(self, there: Sequence[int]) -> bool:
        """Hold the newest version that can be read; returns whether it is the newest of all."""
        self._versions = {number: version for number, version in self._versions.items() if number in there}
        self._refused = {number: why for number, why in self._refused.items() if number in there}
        failed = dict(self._refused)
        for number in reversed(there):
            if number < self._pushed or number == self._held.number:
                break
            chain = None if number in failed else self._chain(number, there, failed)
            if chain is not None and self._take(chain, failed):
                break
        if there and there[-1] < self._pushed:
            old = f"{self._where} holds version {there[-1]} at most, and version {self._pushed} was pushed already"
            self._tell(TransferFailed(f"{old}; to go back to it, start this command again"))
        return bool(there) and there[-1] == self._held.number

    def _chain(self, number: int, there: Sequence[int], failed: dict[int, WeightSyncError]) -> list[Version] | None:
        """The versions to read, one after the other, to hold version ``number``; None, told, if that is impossible."""
        chain: list[Version] = []
        at, wanted = number, ""
        while True:
            try:
                if at in failed:
                    raise failed[at]
                # A listing while files come and go may lack some.
                if at not in there and at not in numbers(self._place.names()):
                    raise TransferFailed(f"it is not in {self._where}")
                if at not in self._versions:
                    self._versions[at] = read_version(self._place, at, self._key)
                if wanted not in ("", self._versions[at].sha256):
                    raise TransferFailed("the one that is there is another")
            except (AuthenticationFailed, TransferFailed) as error:
                base = f"{manifest_name(number)} needs version {at}: " if at != number else ""
                failed[number] = type(error)(base + error.message)
                self._tell(failed[number], number)
                return None
            version = self._versions[at]
            if self._held.version is not None and self._held.version.sha256 == version.sha256:
                return chain
            chain.insert(0, version)
            at, wanted = version.manifest.parent, version.manifest.parent_sha256
            if not at:
                return chain

    def _take(self, chain: Sequence[Version], failed: dict[int, WeightSyncError]) -> bool:
        """Read versions one after the other; returns whether all of them could be read, and tells which was not."""
        for version in chain:
            try:
                self._held.take(self._place, version)
            except TransferFailed as error:
                number = version.manifest.number
                failed[number] = error
                if not isinstance(error, Unreachable):
                    self._refused[number] = error
                self._tell(error, number)
                return False
        return True

    # ---- pushing -----------------------------------------------------------------------------------------------------

    def _bring_engines(self) -> None:
        """Have every engine serve the version that is held. Raises what `Sender` does."""
        version = self._held.version
        if version is None:
            return
        number, label = version.manifest.number, version.manifest.label
        if self._sender is None:
            self._sender = Sender(self._engines, token=self._key, timeout_s=self._timeout_s)
        if number == self._pushed:
            # Only now does the memory that engines are caught up from hold what they were pushed.
            for url, result in self._sender.catch_up().items():
                text = f"{url}: caught up with version {label}"
                self._say(text, {"event": "caught up", "url": url, "version": label, "pause_s": result.pause_s})
            if all(reply.version == label for reply in self._sender.status().values()):
                return
        pushed = self._sender.push(self._held.weights(), version=label)
        self._pushed = number
        seconds = pushed.seconds["total"]
        text = f"version {label} ({manifest_name(number)}): pushed in {seconds:.3f} s"
        self._say(text, {"event": "pushed", "version": label, "number": number, "seconds": seconds})

    def _tell(self, error: WeightSyncError, number: int = 0) -> None:
        refused = number and not isinstance(error, Unreachable)
        text = f"refused: {error}" if refused else str(error)
        self._told.add(text)
        if text not in self._again:
            event = {"event": "refused", "number": number} if refused else {"event": "failed"}
            self._say(text, {**event, "error": type(error).__name__, "message": error.message})


def follow(where: str, engines: Sequence[object], say: Say, *, once: bool, every_s: float, timeout_s: float) -> bool:
    """Push what appears in ``where`` until interrupted; with ``once``, what is there, and return as `Follower.step`."""
    follower = Follower(where, engines, say, timeout_s)
    try:
        while True:
            complete = follower.step()
            if once:
                return complete
            time.sleep(every_s)
    finally:
        follower.close()
