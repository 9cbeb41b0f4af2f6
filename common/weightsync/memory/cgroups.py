"""What a container may still take of memory: the limits of this process's control groups, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

#: Without a limit version 1 says the largest number of pages that there is.
_UNLIMITED: Final = 1 << 60


class _Names(NamedTuple):
    """What one version calls its limit, what is in use, and, in ``memory.stat``, what the kernel gives back first."""

    limit: str
    used: str
    reclaimable: str


_V1: Final = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = _Names("memory.max", "memory.current", "inactive_file")


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may take before it meets a limit; None where it has none. ``root`` is for tests."""
    found = [free for folder, names in _groups(root) if (free := _free(folder, names)) is not None]
    return min(found, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """This process's groups that account for memory, each with all above it that can be seen from here."""
    own = dict(_own(root))
    for kind, top, mounted in _mounts(root):
        names = _V1 if kind == "cgroup" else _V2
        if names not in own:
            continue
        # In a container the mount shows the container's own group as its top, whatever the path says.
        below = own[names].removeprefix(top.rstrip("/")) if own[names].startswith(top) else ""
        there = root / mounted.lstrip("/")
        folder = there / below.strip("/")
        if ".." in folder.parts or not folder.is_dir():
            folder = there
        yield folder, names
        while folder != there:
            folder = folder.parent
            yield folder, names


def _own(root: Path) -> Iterator[tuple[_Names, str]]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _V2, path
        elif "memory" in controllers.split(","):
            yield _V1, path


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Of each hierarchy that may account for memory: its kind, the group it shows as its top, and where that is."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        top, mounted = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.rpartition(" ")[2].split(",")):
            yield kind, top, mounted.replace("\\040", " ")


def _free(folder: Path, names: _Names) -> int | None:
    limit, used = _number(folder / names.limit), _number(folder / names.used)
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    return max(0, limit - used + int(stat.get(names.reclaimable, "0")))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
