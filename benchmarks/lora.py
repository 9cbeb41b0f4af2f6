"""Pushes of a LoRA adapter beside the engine's own way, a folder that is written and loaded: `make bench-lora`.

A model of the shape of Qwen3 0.6B with random weights, and an adapter of rank 16 for all of its projections, in float32
as PEFT trains it. Each round pushes it, and then writes a folder that vLLM is asked to load in place, and SGLang after
it has unloaded the one before. Of the pause, the engine's own share is what stopping, dropping caches and resuming
take; the rest replaces the adapter. Exit code 0 if everything was served.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests
from safetensors.torch import load_file, save_file

from benchmarks import report
from benchmarks.trainer import ROOT
from tests.lora.adapters import TARGETS, make_adapter
from tools import models, servers
from weightsync import Sender

MIN_ROUNDS, WARM_UP, RANK = 15, 3, 16
PROMPT, TOKENS = list(b"Once upon a time"), 8
OPTIONS = {
    "vllm": ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"),
    "sglang": (
        *("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras-per-batch", "3"),
        *("--lora-backend", "torch_native", "--lora-target-modules", *TARGETS),
    ),
}
Sample = dict[str, float]


def measure(engine: servers.Engine, root: Path, rounds: int) -> tuple[list[Sample], int, bool]:
    """What each round took, in seconds; the bytes of the adapter; whether the last pushed one was served."""
    model = models.make_model(root / "model", "qwen3_0_6b", seed=0)
    folders = [make_adapter(root / str(seed), model, seed=seed, rank=RANK) for seed in (1, 2)]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with servers.start(engine, model, args=OPTIONS[engine], env=env) as server, Sender([server.url]) as sender:
        samples = [_round(server, sender, folders[number % 2], root / "written") for number in range(WARM_UP + rounds)]
        nbytes = sum(tensor.nbytes for tensor in load_file(folders[0] / "adapter_model.safetensors").values())
        pushed, loaded = (
            servers.greedy(dataclasses.replace(server, adapter=name), PROMPT, TOKENS) for name in ("pushed", "loaded")
        )
    return samples[WARM_UP:], nbytes, pushed == loaded


def _round(server: servers.Server, sender: Sender, folder: Path, written: Path) -> Sample:
    start = time.perf_counter()
    result = sender.push(folder, lora="pushed")
    took = {"push": time.perf_counter() - start}
    (engine,) = result.engines.values()
    took |= {"pause": engine.pause_s, "replacing": engine.seconds["apply"], "transfer": result.seconds["transfer"]}
    tensors = load_file(folder / "adapter_model.safetensors")
    start = time.perf_counter()
    written.mkdir(exist_ok=True)
    save_file(tensors, written / "adapter_model.safetensors")
    (written / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    asked = {"lora_name": "loaded", "lora_path": str(written)}
    if server.engine == "vllm":
        _post(server, "v1/load_lora_adapter", {**asked, "load_inplace": True})
    else:
        with contextlib.suppress(requests.HTTPError):  # the first time there is none
            _post(server, "unload_lora_adapter", {"lora_name": "loaded"})
        _post(server, "load_lora_adapter", asked)
    return {**took, "folder": time.perf_counter() - start}


def _post(server: servers.Server, route: str, body: dict[str, Any]) -> None:
    requests.post(f"{server.url}/{route}", json=body, timeout=60).raise_for_status()


def table(record: report.Record) -> str:
    """The whole report."""
    lines = [
        f"{record['engine']}, {record['rounds']} rounds of {record['bytes'] / 1e6:.1f} MB; {report.machine(record)}",
        "ms: median (least to most)",
    ]
    for name in record["samples"][0]:
        found = [1e3 * sample[name] for sample in record["samples"]]
        lines.append(f"  {name:10} {statistics.median(found):7.1f} ({min(found):.1f} to {max(found):.1f})")
    lines.append(f"served: {'yes' if record['served'] else 'NO'}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=OPTIONS, default="vllm")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    args = parser.parse_args()
    os.environ.setdefault("WEIGHTSYNC_TOKEN", secrets.token_urlsafe(32))
    with tempfile.TemporaryDirectory() as root:
        samples, nbytes, served = measure(args.engine, Path(root), args.rounds)
    record: dict[str, Any] = {
        **report.here(),
        "engine": args.engine,
        "rounds": args.rounds,
        "bytes": nbytes,
        "samples": samples,
        "served": served,
    }
    path = report.save(
        record, kept=args.rounds >= MIN_ROUNDS, name="lora" if args.engine == "vllm" else f"lora-{args.engine}"
    )
    print(f"{table(record)}\nraw samples: {path.relative_to(ROOT)}")
    return 0 if served else 1


if __name__ == "__main__":
    sys.exit(main())
