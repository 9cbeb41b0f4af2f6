"""The messages in which a rank answers its engine's front end, over the engine's own calls. JSON, as in `http`."""

from __future__ import annotations

import msgspec

from weightsync.protocol.http import ErrorReply, Message


class RankReply(Message, frozen=True):
    """One rank's answer to a call: ``body`` is the reply in JSON unless ``error`` is set.

    ``later``: the rank has done nothing, because it is still releasing the last push; repeat the call. With ``at_once``
    it has done a part of its work: repeat the call without waiting.
    """

    body: msgspec.Raw = msgspec.Raw(b"{}")
    error: ErrorReply | None = None
    later: bool = False
    at_once: bool = False


class Accepted(Message, frozen=True, omit_defaults=True):
    """One rank takes part in a push. ``unread`` names tensors that it does not use; another rank must use them.

    If the expected checkpoint is known, ``skipped`` has a bit for each tensor that the rank does not read, in the
    manifest's order, and ``unwritten`` maps each parameter that is not loaded in full to the bits of the tensors that
    could belong to it: no parameter may lack a tensor that all ranks skip. ``record_s`` is how long generation stopped
    while the loader was recorded, in seconds. ``kept`` has digests of `UpdateRequest.kept`, empty if unreadable.
    """

    unread: tuple[str, ...] = ()
    skipped: bytes = b""
    unwritten: dict[str, bytes] = msgspec.field(default_factory=dict)
    record_s: float = 0.0
    kept: dict[str, str] = msgspec.field(default_factory=dict)


class Ready(Message, frozen=True, omit_defaults=True):
    """One rank is ready to load. ``record_s`` as in `Accepted`, if the loader had to be recorded again.

    ``standby_s`` is how long generation stopped, in slices, while the standby was loaded; ``loading`` as in
    `http.RankStatus`.
    """

    record_s: float = 0.0
    standby_s: float = 0.0
    loading: str = ""
