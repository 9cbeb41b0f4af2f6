"""The messages in which an engine says what a complete push is. JSON over HTTP, as in `http`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from weightsync.protocol.codec import Text
from weightsync.protocol.draft import DraftList
from weightsync.protocol.handles import ShmHandle
from weightsync.protocol.http import LOOK_S, Message, TensorSpec, Timeout

#: The protocol's minor version from which engines answer `ExpectedRequest`.
SINCE_MINOR: Final = 1
#: The method of a rank that handles a `StandbyRequest`.
MAKE_STANDBY: Final = "weightsync_make_standby"


class Lent(Message, frozen=True):
    """Arenas of the sender at ``address``, for the first push over this ``transport``."""

    transport: Text
    address: Text
    arenas: tuple[ShmHandle, ...]


class ExpectedRequest(Message, frozen=True):
    """Ask for the tensors of a complete push; ``timeout_s``: seconds to wait for the ranks.

    With ``standby`` the engine also makes what its first push needs, see `StandbyRequest`.
    """

    timeout_s: Timeout = LOOK_S
    standby: bool | msgspec.UnsetType = msgspec.UNSET
    lent: Lent | msgspec.UnsetType = msgspec.UNSET


class StandbyRequest(Message, frozen=True):
    """Have a rank record its loader and make its standby, before a push is there, in at most ``timeout_s`` seconds.

    ``name`` tells one request from another. What is ``lent`` is mapped.
    """

    name: Text
    timeout_s: Timeout
    lent: Lent | msgspec.UnsetType = msgspec.UNSET


class ExpectedReply(Message, frozen=True):
    """The tensors of a complete push, as they are in the checkpoint that the engine was started with.

    ``optional`` may be left out. ``served`` has the dtype of the parameter, by the tensor's name, where it is another
    and the tensor is only copied there. Without such a checkpoint ``tensors`` is empty, and ``why`` says why.
    ``quantization`` is the ``quantization_config`` of its ``config.json``, if that has one. ``draft`` has the tensors
    that a push of a draft model adds; ``served`` has these too.
    """

    tensors: tuple[TensorSpec, ...] = ()
    optional: tuple[Text, ...] = ()
    served: dict[Text, Text] = msgspec.field(default_factory=dict)
    why: str = ""
    quantization: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    draft: DraftList | msgspec.UnsetType = msgspec.UNSET

    def likely(self) -> tuple[TensorSpec, ...]:
        """What every push has, in the dtypes to which a trainer casts."""
        optional = frozenset(self.optional)
        required = (spec for spec in self.tensors if spec.name not in optional)
        return tuple(msgspec.structs.replace(spec, dtype=self.served.get(spec.name, spec.dtype)) for spec in required)


def one_list(ranks: Sequence[ExpectedReply]) -> ExpectedReply:
    """The engine's reply, from those of its ranks."""
    first = next((rank for rank in ranks if rank.tensors), ranks[0])
    served: dict[str, set[str]] = {}
    for rank in ranks:
        for name, dtype in rank.served.items():
            served.setdefault(name, set()).add(dtype)
    alike = {name: dtype for name, dtypes in served.items() for dtype in dtypes if len(dtypes) == 1}
    return msgspec.structs.replace(first, served=alike)
