"""The `TransportSpec` of rdt."""

from __future__ import annotations

from typing import Final

from weightsync.transports.base import TransportSpec
from weightsync.transports.rdt import compat, engine, trainer

SPEC: Final = TransportSpec(
    name=compat.NAME,
    label="Ray Direct Transport",
    trainer_end=trainer.RdtTrainerEnd,
    engine_end=engine.RdtEngineEnd,
    lacks=compat.lacks,
)
