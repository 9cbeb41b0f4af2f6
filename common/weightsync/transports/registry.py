"""The transports by name. A new one is a file beside these and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from weightsync.errors import AuthenticationFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol import directories, http
from weightsync.transports import ipc_zmq
from weightsync.transports.base import EngineEnd, PeerRanks, RankHelper, TrainerEnd
from weightsync.transports.nccl import engine as nccl_engine
from weightsync.transports.nccl import parallel_broadcast
from weightsync.transports.nccl import trainer as nccl
from weightsync.transports.nixl import agents
from weightsync.transports.nixl import engine as nixl_engine
from weightsync.transports.nixl import trainer as nixl

#: The device is where the trainer's arena is, the text this host's own address that ranks are to dial, if one is given.
TRAINER_ENDS: Final[dict[str, Callable[[torch.device, PeerRanks | None, str], TrainerEnd]]] = {
    "ipc_zmq": ipc_zmq.Trainer,
    "nccl": nccl.Trainer,
    "nixl": nixl.Trainer,
}
#: By transport, for those that are helped by the trainer's other ranks; the number is the rank's.
RANK_HELPERS: Final[dict[str, Callable[[int], RankHelper]]] = {nccl.NAME: parallel_broadcast.RankHelper}
#: The device is where the rank's weights are.
ENGINE_ENDS: Final[dict[str, Callable[[torch.device], EngineEnd]]] = {
    "ipc_zmq": ipc_zmq.Engine,
    "nccl": nccl_engine.Engine,
    "nixl": nixl_engine.Engine,
}


def available() -> tuple[str, ...]:
    """The transports that this process has what it needs for."""
    return tuple(name for name in TRAINER_ENDS if name != "nixl" or agents.available())


def _apart(hello: http.OpenReply) -> tuple[str, str]:
    """Why an engine cannot be reached through memory, and what can be done about it; empty if it can."""
    if hello.host != arenas.host_id():
        return "another host", (
            " (or in a container with its own /dev/shm): transport ipc_zmq needs engine and trainer to share one; run "
            "containers with --ipc=host"
        )
    try:
        directories.directory()
    except AuthenticationFailed as error:
        return f"the same host, but {error}", " (on the trainer's side)"
    ours, theirs = directories.meeting(), hello.user
    if theirs in ("", ours):  # an engine of before it said so refuses by itself what it must not dial
        return "", ""
    uid, own = theirs.partition(" ")[0], ours.partition(" ")[0]
    if uid != own:
        return f"the same host, but user {uid}'s and not user {own}'s", (
            ": transport ipc_zmq needs engine and trainer to be of one user; run both as the same"
        )
    return "the same host, but in another user namespace", (
        ": transport ipc_zmq needs a directory that both sides can trust; run containers with --userns=host"
    )


def pick(asked: str, url: str, hello: http.OpenReply) -> tuple[str, str]:
    """The transport to an engine, and why that one. Raises `UnsupportedOption` where the one asked for cannot be."""
    apart, advice = _apart(hello)
    there = set(TRAINER_ENDS).intersection(*(rank.transports for rank in hello.ranks))
    if asked == "ipc_zmq" and apart:
        raise UnsupportedOption(f'{url} runs on {apart}{advice}, or pass transport="nixl", "nccl" or "auto"')
    if asked not in ("auto", *there):
        raise UnsupportedOption(f"{url} has no transport {asked}, only {', '.join(sorted(there))}")
    if asked not in ("auto", *available()):
        raise UnsupportedOption(f"the trainer has no transport {asked}: pip install 'weightsync[{asked}]'")
    if asked != "auto":
        return asked, "asked for"
    if not apart:
        return "ipc_zmq", "the same host: the ranks read the trainer's memory where it is"
    if "nixl" in available() and "nixl" in there:
        return "nixl", f"{apart}, and both sides have NIXL"
    return "nccl", f"{apart}, and {'the engine' if 'nixl' in available() else 'the trainer'} has no NIXL"
