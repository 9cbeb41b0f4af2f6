"""Checks that names of an engine exist which it does not document as stable.

Each engine package lists them by module in two tables: the names that every push needs, and those that
``verify="deep"`` needs too. A missing name of the second table prevents only pushes with ``verify="deep"``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weightsync.errors import UnsupportedOption
from weightsync.protocol.http import verify_of

#: Module -> attributes of it, with dots into classes.
Names = Mapping[str, Sequence[str]]


class PrivateNames:
    """Looks for names in the package ``module`` of ``engine``; versions ``oldest`` to ``newest`` are tested."""

    def __init__(self, engine: str, module: str, oldest: str, newest: str):
        self._engine, self._module, self._oldest, self._newest = engine, module, oldest, newest
        self.tested = f"{oldest} to {newest}"

    def version(self) -> str:
        """The installed version of the engine."""
        return str(importlib.import_module(self._module).__version__)

    def untested(self) -> str:
        """A warning if the installed version was never tested; empty if it was."""
        if self._nearest() == self.version():
            return ""
        return (
            f"weightsync was never tested with {self._engine} {self.version()}, only with {self.tested}; "
            "it is tried, because every name that it uses is there"
        )

    def _nearest(self) -> str:
        """The tested version that is nearest to the installed one."""
        installed, oldest, newest = map(_numbers, (self.version(), self._oldest, self._newest))
        if installed < oldest:
            return self._oldest
        return self._newest if installed[: len(newest)] > newest else self.version()

    def check(self, needed: Names) -> str:
        """Which of the ``needed`` names are missing, as an error message; empty if none."""
        return self._lacks(missing(needed))

    def check_object(self, found: object, paths: Iterable[str], needed: Names | None = None) -> str:
        """As `check`, for attribute ``paths`` of an object of the engine, and for ``needed`` names."""
        return self._lacks([*missing(needed or {}), *missing_below(found, paths)])

    def _lacks(self, gone: Sequence[str]) -> str:
        if not gone:
            return ""
        nearest = self._nearest()
        needs = nearest if nearest != self.version() else self.tested
        return f"weightsync needs {self._engine} {needs}; {self._engine} {self.version()} lacks {', '.join(gone)}"


def _numbers(version: str) -> list[int]:
    """The release numbers of a version: [0, 5, 23] for 0.5.23.post1."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in found[0].split(".")] if found else []


def missing(needed: Names) -> list[str]:
    """The needed names that do not exist, with their modules."""
    gone = []
    for module, names in needed.items():
        for name in names:
            try:
                found: Any = importlib.import_module(module)
                for part in name.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                gone.append(f"{module}.{name}")
    return gone


def missing_below(found: object, paths: Iterable[str]) -> list[str]:
    """The attribute ``paths`` that an object lacks, for attributes that only instances have."""
    gone = []
    for path in paths:
        inner = found
        for part in path.split("."):
            if not hasattr(inner, part):
                gone.append(f"{type(found).__name__}.{path}")
                break
            inner = getattr(inner, part)
    return gone


def check_deep(payload: bytes | str, lacking: Callable[[], str]) -> None:
    """Raise `UnsupportedOption` if a `http.UpdateRequest` asks for ``verify="deep"`` and something is ``lacking``."""
    if verify_of(payload) == "deep" and (reason := lacking()):
        raise UnsupportedOption(f'verify="deep" is not possible with this engine: {reason}; push with verify="digest"')
