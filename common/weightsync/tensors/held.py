"""What a process holds of a tensor: all of it, boxes of it, or nothing."""

from __future__ import annotations

from typing import NamedTuple

from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box


class HeldShards(NamedTuple):
    """What one rank holds of a tensor whose whole is ``spec``: some boxes, or none.

    ``alike`` promises that whoever else holds an element holds the same value, as the replicas of a DTensor do. The
    work is spread over them then; without it the lowest rank provides what several hold.
    """

    spec: TensorSpec
    boxes: tuple[Box, ...]
    replicated: bool = False
