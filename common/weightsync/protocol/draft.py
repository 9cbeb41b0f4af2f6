"""A draft model in a push: its tensors travel beside those of the model, under names of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from weightsync.protocol.codec import Text
from weightsync.protocol.http import Message, TensorSpec

#: The protocol's minor version from which engines take a draft model with the model.
DRAFT_MINOR: Final = 8
#: What stands before the names of a draft model's tensors in a push.
PREFIX: Final = "draft:"


class DraftList(Message, frozen=True):
    """The tensors of the draft model that an engine was started with, as `expected.ExpectedReply` has those of its
    model, under their names in a push. Empty if they are unknown: ``why``."""

    tensors: tuple[TensorSpec, ...] = ()
    optional: tuple[Text, ...] = ()
    why: str = ""

    def names(self) -> tuple[str, ...]:
        """The names, or a pattern for all of them if they are unknown."""
        return tuple(spec.name for spec in self.tensors) or (f"{PREFIX}*",)


def in_push(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The tensors of a draft model, under their names in a push."""
    return tuple(msgspec.structs.replace(spec, name=PREFIX + spec.name) for spec in specs)


def of_draft(name: str) -> bool:
    """Whether a tensor of a push belongs to a draft model."""
    return name.startswith(PREFIX)
