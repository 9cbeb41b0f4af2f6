"""Start vLLM and SGLang on a CPU as real servers, ask them for tokens, and stop them without a trace.

Usable from the trainer's environment; the engines run in theirs (tools/env.py builds all three).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import requests

from weightsync.testing import free_port

Engine = Literal["vllm", "sglang"]

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".work" / "logs"
HOST = "127.0.0.1"
MAX_MODEL_LEN = 4096
# Room for eight streams of 512 tokens at once, and as much again for what the prefix cache keeps.
SGLANG_TOTAL_TOKENS = 32768
POLL_INTERVAL_S = 0.2
REQUEST_TIMEOUT_S = 120.0
STOP_DEADLINE_S = 10.0


class ServerFailed(RuntimeError):
    """An engine did not come up: it died, or was not ready in time. The message holds the end of its log."""


@dataclass
class Server:
    """A running engine server; leave the `with` block, or call `stop`, to end it and every process it started."""

    engine: Engine
    model: Path
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float = 0.0
    """Wall time from launch until the server was ready, seconds."""
    adapter: str = ""
    """The LoRA adapter that requests ask for; empty for the model itself."""

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def tail(self, n: int = 40) -> str:
        """Return the last `n` lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-n:])

    def processes(self) -> list[psutil.Process]:
        """Return the server's live processes: its descendants, and those of its session that lost their parent."""
        found = {process.pid: process for process in _session(self.process.pid)}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            found.update((process.pid, process) for process in (root, *root.children(recursive=True)))
        return [process for process in found.values() if _is_alive(process)]

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the server: ask it to, then after `deadline_s` seconds kill what is left of it. Safe to call again.

        A worker can outlive the server and lead a session of its own, so all are noted before any is asked to end.
        """
        known = self.processes()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(deadline_s)
        left = {process.pid: process for process in (*known, *self.processes()) if _is_alive(process)}
        _, left_alive = psutil.wait_procs([p for p in left.values() if p.pid != self.process.pid], timeout=2.0)
        for process in left_alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        psutil.wait_procs(left_alive, timeout=5.0)


def start(
    engine: Engine,
    model: str | Path,
    *,
    tp: int = 1,
    port: int | None = None,
    args: Sequence[str] = (),
    env: dict[str, str] | None = None,
    plugin: bool = True,
    log: str | Path | None = None,
    timeout_s: float = 900.0,
    max_model_len: int = MAX_MODEL_LEN,
) -> Server:
    """Start an engine on a CPU with this model folder, over `tp` ranks, and return once it answers.

    `args` are appended to its command line and `env` overrides its environment; with `plugin`, weightsync is loaded in
    it. `port` is a free one unless given. The log goes to `log`, or to a new file. Raises ServerFailed, with the end of
    the log, if the process ends or is not ready within `timeout_s` seconds.
    """
    model = Path(model).resolve()
    port = free_port() if port is None else port
    command = [*command_of(engine, model, tp, port, max_model_len), *args]
    path = Path(log) if log is not None else _new_log(engine)
    path.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    with path.open("wb") as output:
        process = subprocess.Popen(
            command,
            # Elsewhere than in the checkout, which `python -m` would put before the installed wheel.
            cwd=path.parent,
            env={**os.environ, **environment_of(engine, tp, plugin), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(engine, model, f"http://{HOST}:{port}", process, path)
    try:
        _wait_until_ready(server, started_s + timeout_s)
    except BaseException:
        server.stop(deadline_s=2.0)
        raise
    server.start_s = time.monotonic() - started_s
    return server


# ---- asking for tokens -----------------------------------------------------------------------------------------------


def greedy(server: Server, prompt_ids: list[int], n: int) -> tuple[list[int], list[float]]:
    """Return `n` tokens, each the most probable next one, and their natural log-probabilities; none ends it early."""
    body = answer(server, prompt_ids, n)
    if server.engine == "vllm":
        choice = body["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]
    pairs = body["meta_info"]["output_token_logprobs"]
    return [token for _, token, *_ in pairs], [logprob for logprob, *_ in pairs]


def answer(server: Server, prompt_ids: list[int], n: int) -> dict[str, Any]:
    """Return the engine's whole answer to a greedy request for `n` tokens, as it words it."""
    if server.engine == "vllm":
        body: dict[str, Any] = _post(server, "/v1/completions", _vllm_request(server, prompt_ids, n)).json()
    else:
        body = _post(server, "/generate", _sglang_request(server, prompt_ids, n)).json()
    return body


def stream(server: Server, prompt_ids: list[int], n: int) -> Iterator[tuple[int, float]]:
    """Yield (token, log-probability) as the engine makes them, as `greedy` would return them."""
    if server.engine == "vllm":
        for event in _events(server, "/v1/completions", _vllm_request(server, prompt_ids, n)):
            for choice in event["choices"]:
                yield from zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        return
    seen = 0
    for event in _events(server, "/generate", _sglang_request(server, prompt_ids, n)):
        pairs = event["meta_info"]["output_token_logprobs"]
        yield from ((token, logprob) for logprob, token, *_ in pairs[seen:])
        seen = len(pairs)


def _vllm_request(server: Server, prompt_ids: list[int], n: int) -> dict[str, Any]:
    return {
        "model": server.adapter or str(server.model),
        "prompt": prompt_ids,
        "max_tokens": n,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }


def _sglang_request(server: Server, prompt_ids: list[int], n: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": n, "temperature": 0, "ignore_eos": True}
    adapter = {"lora_path": server.adapter} if server.adapter else {}
    return {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True, **adapter}


def _post(server: Server, route: str, body: dict[str, Any], **options: Any) -> requests.Response:
    answer = requests.post(server.url + route, json=body, timeout=REQUEST_TIMEOUT_S, **options)
    if not answer.ok:
        raise requests.HTTPError(f"{route} answered {answer.status_code}: {answer.text[:500]}", response=answer)
    return answer


def _events(server: Server, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a streamed answer, parsed; a reader that stops early closes the connection."""
    with _post(server, route, {**body, "stream": True}, stream=True) as answer:
        for line in answer.iter_lines():
            data = line.removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(f"{route} failed while streaming: {event['error']}")
                yield event


# ---- how each engine is launched -------------------------------------------------------------------------------------


def _vllm_command(model: Path, tp: int, port: int, max_model_len: int) -> list[str]:
    return [
        str(ROOT / ".venv-vllm" / "bin" / "vllm"),
        *("serve", str(model), "--host", HOST, "--port", str(port), "--tensor-parallel-size", str(tp)),
        *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(max_model_len)),
    ]


def _sglang_command(model: Path, tp: int, port: int, max_model_len: int) -> list[str]:
    return [
        str(ROOT / ".venv-sglang" / "bin" / "python"),
        *(
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(model),
            "--host",
            HOST,
            "--port",
            str(port),
            "--tp-size",
            str(tp),
        ),
        *(
            "--dtype",
            "bfloat16",
            "--context-length",
            str(max_model_len),
            "--max-total-tokens",
            str(SGLANG_TOTAL_TOKENS),
        ),
        *(
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--disable-cuda-graph",
            "--mem-fraction-static",
            "0.1",
        ),
    ]


_COMMANDS = {"vllm": _vllm_command, "sglang": _sglang_command}


def command_of(engine: Engine, model: Path, tp: int, port: int, max_model_len: int = MAX_MODEL_LEN) -> list[str]:
    """The command that serves a model folder on a CPU; options that are appended to it win."""
    return _COMMANDS[engine](model, tp, port, max_model_len)


def environment_of(engine: Engine, tp: int, plugin: bool = True) -> dict[str, str]:
    """The variables an engine needs on a CPU; its threads are shared out among the ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // tp)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(share),
        "TOKENIZERS_PARALLELISM": "false",
        # Even in eager mode, samplers compile small functions on their first request: 20 s and a C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
    }
    if engine == "vllm":
        # Without `nobind` two ranks need two NUMA nodes.
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
    else:
        binding = "|".join(_core_range(cores, rank, share) for rank in range(tp))
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": binding}
    if plugin:
        environment["VLLM_PLUGINS" if engine == "vllm" else "SGLANG_PLUGINS"] = "weightsync"
    return environment


def _core_range(cores: list[int], rank: int, share: int) -> str:
    return ",".join(str(cores[(rank * share + index) % len(cores)]) for index in range(share))


def _new_log(engine: Engine) -> Path:
    LOGS.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=f"{engine}-", suffix=".log", dir=LOGS)
    os.close(descriptor)
    return Path(path)


def _wait_until_ready(server: Server, deadline_s: float) -> None:
    # SGLang answers /health with 503 until its schedulers made a first token; vLLM listens once its workers are up.
    while not _is_ready(server):
        code = server.process.poll()
        if code is not None:
            raise ServerFailed(_failure(server, f"ended with code {code} while starting"))
        if time.monotonic() > deadline_s:
            raise ServerFailed(_failure(server, "was not ready in time"))
        time.sleep(POLL_INTERVAL_S)


def _failure(server: Server, what: str) -> str:
    return f"{server.engine} {what}; {server.log} ends with:\n{server.tail()}"


def _is_ready(server: Server) -> bool:
    try:
        reply = requests.get(server.url + "/health", timeout=5.0)
        # An engine that waits for its first push is up, but does not report it before that push.
        return reply.ok or "first push" in reply.text
    except requests.RequestException:
        return False


# ---- processes -------------------------------------------------------------------------------------------------------


def _session(leader_pid: int) -> list[psutil.Process]:
    """Return the processes of the session that `leader_pid` leads; it keeps its number after the leader has ended."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader_pid:
                members.append(process)
    return members


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
