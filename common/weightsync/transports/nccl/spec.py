"""The `TransportSpec` of nccl."""

from __future__ import annotations

from typing import Final

from weightsync.transports.base import TransportSpec
from weightsync.transports.nccl import engine, findings, groups, parallel_broadcast, trainer
from weightsync.transports.nccl.messages import InitNcclGroup

SPEC: Final = TransportSpec(
    name=findings.NAME,
    label="torch.distributed",
    trainer_end=trainer.NcclTrainerEnd,
    engine_end=engine.NcclEngineEnd,
    rank_helper=parallel_broadcast.BroadcastHelper,
    several_hosts=True,
    handshake=InitNcclGroup,
    check_handshake=groups.check_world,
    preference=30,
    settings=groups.settings,
    findings=findings.findings,
)
