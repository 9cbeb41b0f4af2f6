"""Held shards: what a trainer rank holds of a tensor. That is all of it, boxes of it, or nothing."""

from __future__ import annotations

from typing import NamedTuple

from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box


class HeldShards(NamedTuple):
    """The ``boxes`` that one trainer rank holds of a tensor; ``spec`` describes the whole tensor.

    ``replicated`` promises that all ranks that hold an element hold the same value, as the replicas of a DTensor do.
    The work is then shared among them; otherwise the lowest rank sends what several ranks hold.
    """

    spec: TensorSpec
    boxes: tuple[Box, ...]
    replicated: bool = False
