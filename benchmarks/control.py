"""What a push costs that moves nothing, into a real engine: `make bench-sizes ARGS="--engine vllm"`.

A model of 299 small tensors, in a server and in an engine of the trainer's process, on this machine's CPU. Each round
pushes it as it is, and measures beside it what the engine takes by itself: its own pause and resume, the calls to its
ranks, and what it does to load: in vLLM the reload of the model (of the same push), in SGLang the steps around a load.
The control cost is the time of the push without these. What remains in it of the engine's own are the flush of its
caches and, in vLLM, five of its eleven calls, which are not measured alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.control_inside import CALLS, Beside, Sample, measure, session_s
from benchmarks.peers import TIMEOUT_S
from benchmarks.trainer import ROOT, model_folders
from tools import models, servers
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.protocol import auth, http
from weightsync.trainer.http_client import Server

KIND: models.Kind = "qwen3_narrow"
BY_URL, INSIDE = "by URL", "in the trainer's process"
AIMS_S = {BY_URL: 0.008, INSIDE: 0.004}
_ARGS: dict[servers.Engine, list[str]] = {"vllm": [], "sglang": ["--sleep-on-idle"]}
#: vLLM's own pause and resume are developers' routes; the server listens on the loopback interface only.
_DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
_PAUSE = {
    "vllm": ("/pause?mode=keep&clear_cache=false", "/resume", b""),
    "sglang": ("/pause_generation", "/continue_generation", b'{"mode": "retract"}'),
}


def record(engine: servers.Engine, rounds: int) -> report.Record:
    """Measure both doors of an engine."""
    (folder, _) = model_folders(KIND)
    doors = {BY_URL: _by_url(engine, folder, rounds), INSIDE: _inside(engine, folder, rounds)}
    return {**report.about(engine), "engine": engine, "model": KIND, "rounds": rounds, "doors": doors}


def _by_url(engine: servers.Engine, folder: Path, rounds: int) -> dict[str, Any]:
    module = models.load_reference(folder)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # not a mapped file
    with (
        servers.start(engine, folder, args=_ARGS[engine], env=_DEVELOPMENT, max_model_len=256) as server,
        Sender([server.url]) as sender,
    ):
        found = measure(lambda: sender.push(module), _beside(server), rounds)
        last = sender.push(module)
        status = sender.status()[server.url]
    served = (status.version, status.state) == (last.version, "serving")
    return {"samples": found, "served": served, "loading": status.ranks[0].loading}


def _beside(server: servers.Server) -> Beside:
    # The sender's own client, so that a request costs what it costs in a push.
    key = {"Authorization": f"Bearer {auth.sender_token()}", "Content-Type": "application/json"}
    client = Server(server.url, key)
    pause, resume, body = _PAUSE[server.engine]

    def ask(path: str, asked: bytes, status: int = 200) -> None:
        reply = client.ask("POST", path, asked, Deadline(TIMEOUT_S), limit=http.MAX_BODY_BYTES)
        if reply.status != status:
            raise RuntimeError(f"{path} answered {reply.status}: {reply.body[:500]!r}")

    def call() -> None:
        ask(f"{http.PREFIX}/status", b"{}")

    def load(step_s: float) -> float:
        if server.engine == "vllm":
            return step_s
        return session_s(lambda: ask("/begin_weight_update", b"{}"), lambda: ask("/end_weight_update", b"{}"), call)

    return Beside(
        lambda: ask(f"{http.PREFIX}/lease", b'{"owner": "nobody"}', 409),
        call,
        lambda: ask(pause, body),
        lambda: ask(resume, b"{}"),
        load,
    )


def _inside(engine: servers.Engine, folder: Path, rounds: int) -> dict[str, Any]:
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    done = subprocess.run(
        [python, Path(__file__).with_name("control_inside.py"), engine, folder, str(rounds)],
        cwd=tempfile.gettempdir(),
        env={**os.environ, **servers.environment_of(engine, 1)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def control_s(sample: Sample, door: str) -> float:
    """The seconds of a push without what the engine takes by itself."""
    # In the trainer's process the engine's own pause and resume are no requests.
    requests_s = 2 * sample["request"] if door == BY_URL else 0.0
    stopped_s = sample["pause"] + sample["resume"] - requests_s
    return sample["push"] - stopped_s - CALLS * (sample["call"] - sample["request"]) - sample["load"]


def table(found: report.Record) -> str:
    """The whole report."""
    engine = found["engine"]
    lines = [f"{engine} {found['versions'][engine]}, {found['rounds']} rounds, milliseconds; {report.machine(found)}"]
    for door, one in found["doors"].items():
        lines.append(f"{door} ({one['loading']}):")
        for name in one["samples"][0]:
            lines.append(f"  {name:10} {_ms([sample[name] for sample in one['samples']])}")
        costs = [control_s(sample, door) for sample in one["samples"]]
        aim_s, cost_s = AIMS_S[door], statistics.median(costs)
        said = "met" if cost_s <= aim_s else "MISSED"
        lines.append(f"  control    {_ms(costs)}, aim: at most {1e3 * aim_s:g} ms: {said}")
    return "\n".join([*lines, f"served: {'yes' if is_served(found) else 'NO'}"])


def is_served(found: report.Record) -> bool:
    """Whether every engine serves what was pushed last."""
    return all(one["served"] for one in found["doors"].values())


def _ms(seconds: list[float]) -> str:
    low, *_, high = statistics.quantiles(seconds, n=10)
    return f"{1e3 * statistics.median(seconds):7.2f} ({1e3 * low:.2f} - {1e3 * high:.2f}, of 8 in 10)"
