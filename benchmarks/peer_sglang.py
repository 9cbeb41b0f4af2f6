"""A trainer that uses SGLang's own ways, as a process of SGLang's environment.

It reads requests as lines of JSON on stdin and replies to each with one on stdout: ``{"hold": [folder, ...]}`` reads
checkpoints into private memory, ``{"push": index, "url": ...}`` pushes one by ``update_weights_from_tensor``, with
``"group": true`` by ``update_weights_from_distributed`` over gloo, and replies with the seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

Weights = list[tuple[str, torch.Tensor]]
_LOOPBACK = "127.0.0.1"


def hold(folder: str) -> Weights:
    """Read a checkpoint into private memory."""
    return [(name, value.clone()) for name, value in load_file(Path(folder) / "model.safetensors").items()]


def push(session: requests.Session, url: str, weights: Weights) -> dict[str, float]:
    """Push over SGLang's routes; returns the seconds from the state dict to the last reply, and those of each step."""
    marks = [time.perf_counter()]
    bucket = FlattenedTensorBucket(named_tensors=weights)
    content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    marks.append(time.perf_counter())
    payload = MultiprocessingSerializer.serialize(content, output_str=True)
    marks.append(time.perf_counter())
    post(session, f"{url}/begin_weight_update", {})
    body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "flush_cache": True}
    post(session, f"{url}/update_weights_from_tensor", body)
    post(session, f"{url}/end_weight_update", {})
    marks.append(time.perf_counter())
    flatten, share, update = (after - before for before, after in pairwise(marks))
    return {"seconds": marks[-1] - marks[0], "flatten": flatten, "share": share, "update": update}


class Group:
    """The gloo group of this process and the server's only rank, in which SGLang broadcasts."""

    NAME = "bench"

    def __init__(self, session: requests.Session, url: str):
        with socket.create_server((_LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        body = {"master_address": _LOOPBACK, "master_port": port, "rank_offset": 1, "world_size": 2}
        with ThreadPoolExecutor(1) as pool:
            asked = {**body, "group_name": self.NAME, "backend": "gloo"}
            joined = pool.submit(post, session, f"{url}/init_weights_update_group", asked)
            self.group: Any = init_custom_process_group(
                backend="gloo", init_method=f"tcp://{_LOOPBACK}:{port}", world_size=2, rank=0, group_name=self.NAME
            )
            joined.result()

    def push(self, session: requests.Session, url: str, weights: Weights) -> dict[str, float]:
        """As `push`, by one broadcast of all weights, flattened."""
        marks = [time.perf_counter()]
        flat = FlattenedTensorBucket(named_tensors=weights).get_flattened_tensor()
        marks.append(time.perf_counter())
        body = {
            "names": [name for name, _ in weights],
            "dtypes": [str(value.dtype).removeprefix("torch.") for _, value in weights],
            "shapes": [list(value.shape) for _, value in weights],
            "group_name": self.NAME,
            "load_format": "flattened_bucket",
        }
        post(session, f"{url}/begin_weight_update", {})
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(post, session, f"{url}/update_weights_from_distributed", body)
            torch.distributed.broadcast(flat, src=0, group=self.group)
            asked.result()
        post(session, f"{url}/end_weight_update", {})
        marks.append(time.perf_counter())
        flatten, update = (after - before for before, after in pairwise(marks))
        return {"seconds": marks[-1] - marks[0], "flatten": flatten, "update": update}


def post(session: requests.Session, url: str, body: dict[str, Any]) -> None:
    """Post JSON; raises RuntimeError unless the server reports success."""
    answer = session.post(url, json=body, timeout=120.0)
    if not answer.ok or not answer.json().get("success"):
        raise RuntimeError(f"{url} answered {answer.status_code}: {answer.text[:500]}")


def main() -> None:
    """Serve until stdin ends."""
    # Everything that is printed goes to stderr, so that stdout has the replies only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    # In its favour: with torch's default on two cores, one of which SGLang's idle loop takes, it is 3 times slower.
    torch.set_num_threads(1)
    session = requests.Session()
    session.trust_env = False
    sets: list[Weights] = []
    groups: dict[str, Group] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "hold" in asked:
            sets = [hold(folder) for folder in asked["hold"]]
            answer = {"held": float(len(sets))}
        elif asked.get("group"):
            url = asked["url"]
            if url not in groups:
                groups[url] = Group(session, url)
            answer = groups[url].push(session, url, sets[asked["push"]])
        else:
            answer = push(session, asked["url"], sets[asked["push"]])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
