"""The engines' own ways to update weights, each timed as its user would see it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from benchmarks.from_disk import load_saved
from benchmarks.trainer import ROOT, Trainer
from tools import servers

TIMEOUT_S = 120.0
TENSOR = "SGLang update_weights_from_tensor"
DISTRIBUTED = "SGLang update_weights_from_distributed, gloo"
RELOAD = "vLLM reload_weights, tensors in the worker"
DISK = {"sglang": "save + SGLang update_weights_from_disk", "vllm": "save + vLLM reload_weights from disk"}

Peer = Callable[[int], dict[str, float]]
"""Brings one of the two sets of weights into the engine; returns "seconds", and those of its steps by name."""


@contextlib.contextmanager
def peers(server: servers.Server, trainer: Trainer, folders: list[Path]) -> Iterator[dict[str, Peer]]:
    """The peers of an engine by name, ready to run."""
    if server.engine == "vllm":
        yield _vllm(server, trainer, folders)
        return
    with _Helper(folders) as helper:
        yield {
            TENSOR: lambda index: helper.ask({"push": index, "url": server.url}),
            DISTRIBUTED: lambda index: helper.ask({"push": index, "url": server.url, "group": True}),
            DISK["sglang"]: lambda index: _from_disk(server, trainer, index),
        }


def _vllm(server: servers.Server, trainer: Trainer, folders: list[Path]) -> dict[str, Peer]:
    held = _call(server, "weightsync_bench_hold", args=[str(folder) for folder in folders])
    if held != [str(len(folders))]:
        raise RuntimeError(f"vLLM's worker holds {held} sets of weights")

    def reload(index: int) -> dict[str, float]:
        (seconds,) = _call(server, "weightsync_bench_reload", args=[str(index)])
        return {"seconds": float(seconds)}

    return {RELOAD: reload, DISK["vllm"]: lambda index: _from_disk(server, trainer, index)}


def _call(server: servers.Server, method: str, **arguments: Any) -> list[Any]:
    """Run a method on vLLM's workers through its developers' route."""
    answer = requests.post(f"{server.url}/collective_rpc", json={"method": method, **arguments}, timeout=TIMEOUT_S)
    if not answer.ok:
        raise RuntimeError(f"{method} answered {answer.status_code}: {answer.text[:500]}")
    results: list[Any] = answer.json()["results"] if answer.content else []
    return results


def _from_disk(server: servers.Server, trainer: Trainer, index: int) -> dict[str, float]:
    start = time.perf_counter()
    folder = trainer.save(index)
    saved = time.perf_counter()
    load_saved(server.engine, server.url, folder, TIMEOUT_S)
    end = time.perf_counter()
    shutil.rmtree(folder)
    return {"seconds": end - start, "save": saved - start, "load": end - saved}


class _Helper:
    """The process of `peer_sglang`."""

    def __init__(self, folders: list[Path]):
        log = ROOT / ".work" / "logs" / "peer_sglang.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [ROOT / ".venv-sglang" / "bin" / "python", Path(__file__).with_name("peer_sglang.py")],
                env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._log = log
        try:
            self.ask({"hold": [str(folder) for folder in folders]})
        except BaseException:
            self._stop()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, float]:
        """Send one request; returns the reply."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the helper ended; {self._log} ends with:\n{self._log.read_text()[-2000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> _Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
