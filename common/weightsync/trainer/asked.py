"""What a push was asked for, beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weightsync.errors import UnsupportedOption


class Asked(NamedTuple):
    """The arguments of `sender.Sender.push`, but for the model."""

    version: str | None
    expected: str | None
    allow_missing: tuple[str, ...]
    lora: str | None = None

    @classmethod
    def of(cls, version: str | None, expected: str | None, allow_missing: Sequence[str], lora: str | None) -> Asked:
        """Check the arguments. Raises `UnsupportedOption`."""
        if isinstance(allow_missing, str):
            raise UnsupportedOption("allow_missing: give a list of patterns")
        if lora is not None and allow_missing:
            raise UnsupportedOption("allow_missing is for weights; an adapter is pushed as a whole")
        return cls(version, expected, tuple(allow_missing), lora)
