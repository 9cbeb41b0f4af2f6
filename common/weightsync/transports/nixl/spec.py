"""The `TransportSpec` of nixl."""

from __future__ import annotations

from typing import Final

from weightsync.transports.base import TransportSpec
from weightsync.transports.nixl import agents, engine, findings, trainer
from weightsync.transports.nixl.messages import RegisterNixl

SPEC: Final = TransportSpec(
    name=findings.NAME,
    label="NIXL",
    trainer_end=trainer.NixlTrainerEnd,
    engine_end=engine.NixlEngineEnd,
    handshake=RegisterNixl,
    preference=20,
    reason="both sides have NIXL",
    lacks=lambda: "" if agents.available() else "pip install 'weightsync[nixl]'",
    findings=findings.findings,
)
