"""A trainer in its own process, or one of its ranks: orders come over a socket, outcomes go back."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.helpers import keen
from tests.scenarios.nursery import receive
from tests.scenarios.resources import held, left
from weightsync import LocalShard, Sender
from weightsync.errors import WeightSyncError
from weightsync.memory import arenas
from weightsync.transports.nixl import agents

#: How a process finds out which host it is on.
HOST_ID, PROCESSES_ID = arenas.host_id, arenas.processes_id


def describe_shared(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], list[int]]:
    """Describe shared tensors for another process; returns the descriptions and the descriptors of their memory."""
    shared = [one.untyped_storage()._share_fd_cpu_() for one in tensors.values()]
    described = [
        (name, str(one.dtype).removeprefix("torch."), tuple(one.shape), nbytes)
        for (name, one), (_, nbytes) in zip(tensors.items(), shared, strict=True)
    ]
    return described, [file for file, _ in shared]


def map_shared(described: list[Any], files: list[int]) -> dict[str, torch.Tensor]:
    """Map the tensors that `describe_shared` described."""
    found = {}
    for (name, dtype, shape, nbytes), file in zip(described, files, strict=True):
        storage = torch.UntypedStorage._new_shared_fd_cpu(file, nbytes)
        found[name] = torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, 0, shape)
    return found


def move(host: str) -> None:
    """From now on this process is on another host, for all that it says; on its own again if none is named."""
    arenas.host_id = (lambda: host) if host else HOST_ID
    arenas.processes_id = (lambda: host) if host else PROCESSES_ID


class Trainer:
    """Executes orders; holds the learner's shared parameters."""

    def __init__(self) -> None:
        self._states: list[dict[str, torch.Tensor]] = []
        self._parameters: dict[str, torch.Tensor] = {}
        self._sender: Sender | None = None
        #: Before there was any sender.
        self._before = held()

    def take_parameters(self, order: dict, files: list[int]) -> dict:
        """Take the learner's parameters."""
        self._parameters = map_shared(order["tensors"], files)
        self._before = held(set(files))
        return {}

    def group(self, order: dict, _: list[int]) -> dict:
        """Become one of several ranks, each of which reads all contents from their folders."""
        self._states = [load_file(f"{folder}/model.safetensors") for folder in order["folders"]]
        address = f"tcp://127.0.0.1:{order['port']}"
        dist.init_process_group("gloo", init_method=address, rank=order["rank"], world_size=order["size"])
        if agents.available():  # NIXL allocates what a process needs once, which takes as long as a push may
            agents.Agent(torch.device("cpu"), order["rank"]).close()
        self._before = held()
        return {}

    def push(self, order: dict, _: list[int]) -> dict:
        """Push, with a new sender or with the one of the push before; returns the outcome."""
        said: dict[str, Any] = {"error": "", "message": "", "engines": {}}
        try:
            if "host" in order:
                move(order["host"])
                self._sender = Sender(order["urls"], **order["options"])
            assert self._sender is not None
            what = self._parameters if order["content"] is None else self._shards(order["content"])
            result = self._sender.push(what, version=order["label"])
            said["engines"] = dict.fromkeys(result.engines, "committed")
        except WeightSyncError as error:
            said.update(error=type(error).__name__, message=str(error), engines=error.engines)
        return {**said, "has_sender": self._sender is not None}

    def close(self, *_: object) -> dict:
        """Close the sender, if there is one."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
        return {}

    def left(self, *_: object) -> dict:
        """What is still used of senders, once they are closed."""
        return {"left": left(self._before)}

    def _shards(self, content: int) -> dict[str, LocalShard]:
        """This rank's rows of each tensor, which do not divide evenly."""
        rank, size = dist.get_rank(), dist.get_world_size()
        shards = {}
        for name, one in self._states[content].items():
            each = len(one) // size + 1
            start = min(rank * each, len(one))
            rows = one[start : start + each]
            if len(rows):
                shards[name] = LocalShard(rows.clone(), tuple(one.shape), (start, *[0] * (one.ndim - 1)))
        return shards


def run(_: dict, files: list[int]) -> None:
    """Execute orders until the other end of the socket closes."""
    with socket.socket(fileno=files[0]) as channel, keen():
        trainer = Trainer()
        while True:
            asked, descriptors = receive(channel)
            if not asked:
                return
            said = getattr(trainer, asked["do"])(asked, descriptors)
            for file in descriptors:
                with contextlib.suppress(OSError):
                    os.close(file)
            channel.send(json.dumps(said).encode())
