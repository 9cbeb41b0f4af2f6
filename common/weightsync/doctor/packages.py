"""Whether weightsync and what it needs are installed here. Loads torch."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from typing import Final

from weightsync.protocol.diagnosis import Finding

_INSTALL: Final = "pip install --force-reinstall weightsync"
#: Packages whose modules have another name.
_MODULES: Final = {"pyzmq": "zmq"}


def findings() -> Iterator[Finding]:
    """One finding if all is well; otherwise one for each package that is missing or broken."""
    try:
        needed = requires("weightsync") or []
    except PackageNotFoundError:
        yield Finding("packages", "wrong", "weightsync runs here, but is not installed", "pip install weightsync")
        return
    names = [re.match(r"[\w.-]+", line) for line in needed if "extra ==" not in line]
    broken = [finding for name in names if name for finding in _of_package(name[0])]
    if not broken and not entry_points(group="weightsync.transports"):
        broken = [Finding("packages", "wrong", "weightsync's entry points are not installed", _INSTALL)]
    ours = f"weightsync {version('weightsync')}, Python {platform.python_version()}"
    yield from broken or [Finding("packages", "ok", f"{ours}, torch {version('torch')}")]


def _of_package(name: str) -> Iterator[Finding]:
    try:
        importlib.import_module(_MODULES.get(name, name))
    except ImportError as error:
        yield Finding("packages", "wrong", f"{name} cannot be imported: {error}", _INSTALL)
