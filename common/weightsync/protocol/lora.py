"""A LoRA adapter as plain data: the field ``adapter`` of `http.UpdateRequest`."""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec

from weightsync.protocol.codec import Text

#: The protocol's minor version from which engines take adapters.
LORA_MINOR: Final = 7
#: What an engine calls an adapter: vLLM a number, SGLang a text.
AdapterId = int | Text
_Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class LoraSpec(msgspec.Struct, frozen=True):
    """What PEFT's ``adapter_config.json`` says of a LoRA adapter that is served as the model ``name``.

    ``rank`` and ``alpha`` hold for every module but those that match a pattern of ``ranks`` or ``alphas``, PEFT's
    ``rank_pattern`` and ``alpha_pattern``. A module's output is scaled by alpha / rank, or with ``rslora`` by alpha /
    sqrt(rank). ``number`` is what the engine itself calls the adapter; the engine's front end sets it.
    """

    name: Text
    rank: _Rank
    alpha: float
    rslora: bool = False
    ranks: dict[Text, _Rank] = {}
    alphas: dict[Text, float] = {}
    number: AdapterId = 0

    @property
    def scaling(self) -> float:
        """What the output of a module is scaled by that matches no pattern."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
