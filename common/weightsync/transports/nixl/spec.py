"""The `TransportSpec` of nixl."""

from __future__ import annotations

from typing import Final

from weightsync.transports.base import TransportSpec
from weightsync.transports.nixl import agents, engine, findings, helper, trainer
from weightsync.transports.nixl.messages import RegisterNixl

SPEC: Final = TransportSpec(
    name=findings.NAME,
    label="NIXL",
    trainer_end=trainer.NixlTrainerEnd,
    engine_end=engine.NixlEngineEnd,
    rank_helper=helper.NixlHelper,
    several_hosts=True,
    handshake=RegisterNixl,
    preference=20,
    reason="both sides have NIXL",
    lacks=lambda: "" if agents.available() else "pip install 'weightsync[nixl]'",
    findings=findings.findings,
)
