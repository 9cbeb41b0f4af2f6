"""Engines whose replicas take every step together, as plain data: the field ``lockstep`` of `http.OpenReply`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from weightsync.protocol.codec import Text


class Lockstep(msgspec.Struct, frozen=True):
    """One engine of several in lockstep: it has ``count`` of their ``replicas``, from number ``first`` on.

    ``name`` is the same for all of them, and for no other engine.
    """

    name: Text
    first: Annotated[int, msgspec.Meta(ge=0)]
    count: Annotated[int, msgspec.Meta(ge=1)]
    replicas: Annotated[int, msgspec.Meta(ge=1)]
