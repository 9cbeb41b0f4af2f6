"""Which versions a folder holds, and which of its files nobody needs any more."""

from __future__ import annotations

from typing import Final

from weightsync.errors import AuthenticationFailed, TransferFailed
from weightsync.files.places import Place, Unreachable, reported
from weightsync.protocol.version_files import (
    FILE_NAME,
    MAX_MANIFEST_BYTES,
    Version,
    VersionManifest,
    manifest_name,
    verified,
)

#: How many versions are kept, with all that they need: a follower that reads one finds it there when the next comes.
_KEPT: Final = 2


def numbers(names: list[str]) -> list[int]:
    """The numbers of the versions whose manifests are there, in order."""
    found = (FILE_NAME.fullmatch(name) for name in names)
    return sorted(int(one["number"]) for one in found if one and one["manifest"])


def read_version(place: Place, number: int, key: str) -> Version:
    """Read and verify a manifest. Raises what `verified` raises, and `Unreachable`."""
    name = manifest_name(number)
    with reported(name), place.open(name) as file:
        content = bytearray()
        while piece := file.read(1 << 20):
            content += piece
            if len(content) > MAX_MANIFEST_BYTES:
                raise TransferFailed(f"{name} has more than {MAX_MANIFEST_BYTES} bytes, which no manifest has")
    return verified(name, bytes(content), key)


class Shelf:
    """The versions of a folder, as their writer knows them.

    Files of versions that it cannot verify are left alone: others may know what they are.
    """

    def __init__(self, place: Place, key: str):
        self._place = place
        self._manifests: dict[int, VersionManifest] = {}
        there = numbers(place.names())
        self._newest = max(there, default=0)
        self._foreign: set[int] = set()
        for number in there:
            try:
                self._manifests[number] = read_version(place, number, key).manifest
            except Unreachable:
                raise
            except (AuthenticationFailed, TransferFailed):
                self._foreign.add(number)

    def take_number(self) -> int:
        """A number that no version has had; one that could not be written may be there nevertheless."""
        self._newest += 1
        return self._newest

    def add(self, version: Version) -> None:
        """Take note of a version that was published, and remove the files that nobody needs any more."""
        newest = version.manifest.number
        self._manifests[newest] = version.manifest
        needed: set[int] = set()
        for at in sorted(self._manifests)[-_KEPT:]:
            while at in self._manifests and at not in needed:
                needed.add(at)
                at = self._manifests[at].parent  # noqa: PLW2901 - from a version to its parent
        self._manifests = {number: self._manifests[number] for number in needed}
        kept = {manifest_name(number) for number in needed} | {one.data for one in self._manifests.values()}
        outdated = [
            name
            for name in self._place.names()
            if (found := FILE_NAME.fullmatch(name))
            and name not in kept
            and int(found["number"]) <= newest
            and int(found["number"]) not in self._foreign
        ]
        # Manifests first: whoever finds one finds its bytes, or learns that both are gone.
        for name in sorted(outdated, key=lambda name: (not name.endswith(".json"), name)):
            self._place.remove(name)
