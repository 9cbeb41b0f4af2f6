"""Memory limits of this process's container: control groups of versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

#: In bytes. Version 1 reports a missing limit as the largest possible number of pages, which is more than this.
_UNLIMITED: Final = 1 << 60


class _Names(NamedTuple):
    """File names of the limit and the usage in one version, and the key of reclaimable memory in ``memory.stat``."""

    limit: str
    used: str
    reclaimable: str


_V1: Final = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = _Names("memory.max", "memory.current", "inactive_file")


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can allocate before it reaches a limit; None without a limit. ``root`` is for tests."""
    found = [free for folder, names in _groups(root) if (free := _free(folder, names)) is not None]
    return min(found, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Folders of this process's memory control groups, and of all visible groups above them."""
    own = dict(_own(root))
    for kind, top, mounted in _mounts(root):
        names = _V1 if kind == "cgroup" else _V2
        if names not in own:
            continue
        # In a container the top of the mount is the container's own group, whatever the path says.
        below = own[names].removeprefix(top.rstrip("/")) if own[names].startswith(top) else ""
        mount = root / mounted.lstrip("/")
        folder = mount / below.strip("/")
        if ".." in folder.parts or not folder.is_dir():
            folder = mount
        yield folder, names
        while folder != mount:
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
    """For each hierarchy that may limit memory: its kind, the group at its top, and its mount point."""
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
