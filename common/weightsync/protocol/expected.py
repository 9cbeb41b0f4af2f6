"""The messages in which an engine says what a complete push is. JSON over HTTP, as in `http`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from weightsync.protocol.codec import Text
from weightsync.protocol.http import LOOK_S, Message, TensorSpec, Timeout

#: The protocol's minor version from which engines answer `ExpectedRequest`.
SINCE_MINOR: Final = 1


class ExpectedRequest(Message, frozen=True):
    """Ask for the tensors of a complete push; ``timeout_s``: seconds to wait for the ranks."""

    timeout_s: Timeout = LOOK_S


class ExpectedReply(Message, frozen=True):
    """The tensors of a complete push, as they are in the checkpoint that the engine was started with.

    ``optional`` may be left out. ``served`` has the dtype of the parameter, by the tensor's name, where it is another
    and the tensor is only copied there. Without such a checkpoint ``tensors`` is empty, and ``why`` says why.
    """

    tensors: tuple[TensorSpec, ...] = ()
    optional: tuple[Text, ...] = ()
    served: dict[Text, Text] = msgspec.field(default_factory=dict)
    why: str = ""


def one_list(ranks: Sequence[ExpectedReply]) -> ExpectedReply:
    """The engine's reply, from those of its ranks."""
    first = next((rank for rank in ranks if rank.tensors), ranks[0])
    served: dict[str, set[str]] = {}
    for rank in ranks:
        for name, dtype in rank.served.items():
            served.setdefault(name, set()).add(dtype)
    alike = {name: dtype for name, dtypes in served.items() for dtype in dtypes if len(dtypes) == 1}
    return ExpectedReply(first.tensors, first.optional, alike, first.why)
