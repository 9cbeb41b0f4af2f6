"""Where versions are kept: a folder, or an object store that fsspec knows."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from weightsync.errors import TransferFailed, UnsupportedOption, WeightSyncError


class Unreachable(TransferFailed):
    """A place could not be read or written now. That says nothing about its files."""

    mend = ""


class Place(Protocol):
    """A flat collection of files. Whatever a place cannot do raises `OSError`, or what its library raises."""

    def names(self) -> list[str]:
        """The names of all files; none if the place does not exist yet."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raises `FileNotFoundError`."""

    def create(self, name: str) -> BinaryIO:
        """Open a new file for writing."""

    def publish(self, name: str, part: str, content: bytes) -> None:
        """Write a file that appears whole or not at all; where that takes another name first, as ``part``."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


def open_place(where: str | Path) -> Place:
    """The folder ``where``, or the object store if it is a URL. Raises `UnsupportedOption` if nothing can open it."""
    if isinstance(where, Path) or "://" not in where:
        return _Folder(Path(where))
    try:
        import fsspec
    except ImportError as error:
        raise UnsupportedOption(
            f"{where}: URLs need fsspec; pip install 'weightsync[files]', or give a folder"
        ) from error
    try:
        return _Store(*fsspec.core.url_to_fs(where))
    except (ImportError, ValueError) as error:
        raise UnsupportedOption(f"{where}: fsspec cannot open it: {error}") from error


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Inside the context, whatever a place or its library raises becomes `Unreachable` with ``what``."""
    try:
        yield
    except WeightSyncError:
        raise
    except Exception as error:  # each library of fsspec has its own
        raise Unreachable(f"{what}: {getattr(error, 'strerror', None) or error or type(error).__name__}") from error


class _Folder:
    def __init__(self, path: Path):
        self._path = path

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def open(self, name: str) -> BinaryIO:
        # Whoever may write the folder may put there what cannot be read to its end, such as a pipe.
        file = io.FileIO(os.open(self._path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OSError(f"{name} is not a file")
        return cast(BinaryIO, file)

    def create(self, name: str) -> BinaryIO:
        self._path.mkdir(parents=True, exist_ok=True)
        return open(self._path / name, "xb", buffering=0)  # follows no link

    def publish(self, name: str, part: str, content: bytes) -> None:
        with open(self._path / part, "xb") as file:
            file.write(content)
        (self._path / part).rename(self._path / name)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class _Store:
    """In most object stores a file appears once it is closed, and all of it."""

    def __init__(self, system: Any, path: str):
        self._system, self._path = system, path.rstrip("/")

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            return [str(found).rpartition("/")[2] for found in self._system.ls(self._path, detail=False)]
        except FileNotFoundError:
            return []

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._system.open(f"{self._path}/{name}", "rb"))

    def create(self, name: str) -> BinaryIO:
        self._system.makedirs(self._path, exist_ok=True)
        return cast(BinaryIO, self._system.open(f"{self._path}/{name}", "wb"))

    def publish(self, name: str, part: str, content: bytes) -> None:
        self._system.pipe_file(f"{self._path}/{name}", content)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{name}")
