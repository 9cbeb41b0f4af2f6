"""A follower's copy of a version, and how the next one is made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import BinaryIO, Final

import torch

from weightsync.errors import DigestMismatch, ManifestMismatch, TransferFailed
from weightsync.files.places import Place, reported
from weightsync.memory.arenas import ShmArena
from weightsync.protocol.version_files import StoredTensor, Version, is_data_of
from weightsync.tensors import delta
from weightsync.tensors.digest import digests
from weightsync.tensors.layout import Entry, Layout, listed

#: Bytes that are read, and hashed, at a time.
_READ_BYTES: Final = 4 << 20


class HeldVersion:
    """The last version that was read, in shared memory, where engines of this host can load it from.

    `take` replaces it in place. ``version`` is None before, and after a version that turned out to be damaged while it
    was put there.
    """

    def __init__(self) -> None:
        self.version: Version | None = None
        self._layout = Layout(())
        self._arena: ShmArena | None = None

    @property
    def number(self) -> int:
        """The number of the version; 0 if there is none."""
        return 0 if self.version is None else self.version.manifest.number

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name, views of what the next version will be written to."""
        return {entry.spec.name: entry.view(self._memory()) for entry in self._layout.entries}

    def take(self, place: Place, version: Version) -> None:
        """Read the version's file of bytes, verify it, and become that version.

        ``version`` has no parent, or this is it. Raises `TransferFailed`, naming the file, if it is not there, damaged
        or not what the manifest says; then this is the version before still, or, if that had no parent, none.
        """
        manifest, before = version.manifest, self.version
        layout = _checked(version)
        with reported(manifest.data):
            file = place.open(manifest.data)
        with file:
            content = _Content(file, version)
            if not manifest.parent:
                self.version = None
                self._make_room(layout)
                for entry, _ in _in_file(version, layout):
                    content.read_into(entry.raw(self._memory()))
                content.check()
                known: Iterable[StoredTensor] = ()
            else:
                assert before is not None, "deltas refer to a parent"
                assert before.sha256 == manifest.parent_sha256, "and to no other version"
                if layout.specs != self._layout.specs:
                    raise TransferFailed(f"{manifest.data} has other tensors than the version that it changes")
                # All of it before any of it is used: it may be damaged.
                changes = torch.empty(manifest.data_nbytes, dtype=torch.uint8)
                content.read_into(changes)
                content.check()
                self.version = None
                _change(self._memory(), changes, version, layout)
                known = before.manifest.tensors
        _check_digests(self._memory(), version, layout, known)
        self.version = version

    def close(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.close()
        self.version, self._arena, self._layout = None, None, Layout(())

    def _memory(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8) if self._arena is None else self._arena.bytes

    def _make_room(self, layout: Layout) -> None:
        if self._arena is None or self._arena.bytes.numel() != layout.nbytes:
            self.close()
            self._arena = ShmArena(layout.nbytes) if layout.nbytes else None
        self._layout = layout


class _Content:
    """A version's file of bytes, read from its start, and hashed."""

    def __init__(self, file: BinaryIO, version: Version):
        self._file, self._manifest = file, version.manifest
        self._sha256, self._nbytes = hashlib.sha256(), 0

    def read_into(self, target: torch.Tensor) -> None:
        """Fill ``target``, 1-D uint8. Raises `TransferFailed` if the file ends before that."""
        rest = target.numpy().data
        while len(rest):
            with reported(self._manifest.data):
                count = self._file.readinto(rest[:_READ_BYTES])  # type: ignore[attr-defined]  # raw and buffered ones
            if not count:
                raise TransferFailed(
                    f"{self._manifest.data} ends after {self._nbytes} of {self._manifest.data_nbytes} bytes"
                )
            self._sha256.update(rest[:count])
            self._nbytes, rest = self._nbytes + count, rest[count:]

    def check(self) -> None:
        """Raise `TransferFailed` unless the file ends here and is what the manifest says."""
        with reported(self._manifest.data):
            longer = bool(self._file.read(1))
        if longer or self._sha256.hexdigest() != self._manifest.data_sha256:
            raise TransferFailed(f"{self._manifest.data} is damaged: its SHA-256 is not that of its manifest")


def _checked(version: Version) -> Layout:
    """The layout of a version. Raises `TransferFailed` if its manifest does not describe one."""
    manifest = version.manifest
    try:
        layout = Layout([stored.spec for stored in manifest.tensors])
    except ManifestMismatch as error:
        raise _wrong(version, error.message) from error
    if len({spec.name for spec in layout.specs}) < len(layout.specs):
        raise _wrong(version, "two tensors have the same name")
    if not is_data_of(manifest.data, manifest.number):
        raise _wrong(version, f"{manifest.data!r} is no file of its bytes")
    at = 0
    for entry, stored in _in_file(version, layout):
        nbytes = {"dense": entry.nbytes, "delta": stored.nbytes, "same": 0}[stored.way]
        if (stored.offset, stored.nbytes) != (at, nbytes) or not (manifest.parent or stored.way == "dense"):
            raise _wrong(version, f"{stored.nbytes} bytes of {stored.spec.name} ({stored.way}) at {stored.offset}")
        at += nbytes
    if at != manifest.data_nbytes:
        raise _wrong(version, f"its tensors take {at} of {manifest.data_nbytes} bytes")
    return layout


def _in_file(version: Version, layout: Layout) -> list[tuple[Entry, StoredTensor]]:
    """The tensors in the order of their bytes in the file."""
    pairs = zip(layout.entries, version.manifest.tensors, strict=True)
    return sorted(pairs, key=lambda pair: (pair[1].offset, pair[1].nbytes))


def _wrong(version: Version, why: str) -> TransferFailed:
    return TransferFailed(f"the manifest of version {version.manifest.number} contradicts itself: {why}")


def _change(memory: torch.Tensor, changes: torch.Tensor, version: Version, layout: Layout) -> None:
    """Turn the parent in ``memory`` into ``version``."""
    for entry, stored in zip(layout.entries, version.manifest.tensors, strict=True):
        content, target = changes[stored.offset : stored.offset + stored.nbytes], entry.raw(memory)
        if stored.way == "dense":
            target.copy_(content)
        elif stored.way == "delta":
            delta.apply(content.numpy().data, target, entry.dtype.itemsize)


def _check_digests(memory: torch.Tensor, version: Version, layout: Layout, known: Iterable[StoredTensor]) -> None:
    """Compare every tensor with its digest; of one that has not changed, its digest with the parent's, ``known``."""
    before = {stored.spec.name: stored.digest for stored in known}
    pairs = list(zip(layout.entries, version.manifest.tensors, strict=True))
    found = digests(version.manifest.digest, (entry.raw(memory) for entry, stored in pairs if stored.way != "same"))
    differing = [
        stored.spec.name
        for _, stored in pairs
        if stored.digest != (before.get(stored.spec.name) if stored.way == "same" else next(found))
    ]
    if differing:
        raise DigestMismatch(f"{version.manifest.data}: not what was written, by their digests: {listed(differing)}")
