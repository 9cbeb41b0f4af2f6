"""A reference engine: a small real server around a transformers model, with the same routes as vLLM and SGLang.

For your own tests, and for weightsync's where neither engine can run::

    with ReferenceEngine("path/to/model") as engine:
        Sender([engine.url]).push(model)

or, in a terminal, ``python -m weightsync.testing MODEL --port 8000``, or in the trainer's own process::

    engine = ReferenceInProcess("path/to/model")
    Sender([engine]).push(model)

This needs the extra ``weightsync[testing]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import requests
import torch
from msgspec import UnsetType

from weightsync import observe
from weightsync.engine import metrics
from weightsync.engine.front_end import FrontEnd
from weightsync.engine.in_process import EngineInProcess, attached, run_in_thread, stop
from weightsync.engine.rank_calls import COMMIT_CALL_S, Calls, restored, settle
from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.errors import EngineUnreachable, UnsupportedOption, WeightSyncError, changed_nothing
from weightsync.protocol import auth, http
from weightsync.protocol.lockstep import Lockstep
from weightsync.testing_lora import ReferenceLora
from weightsync.testing_model import Answer, ModelAdapter

_START_S: Final = 120.0
_STOP_S: Final = 10.0


class ReferenceFrontEnd:
    """See `engine_front_end.EngineFrontEnd`. One thread runs the engine's loop: generation and loading."""

    engine = "reference"
    busy = ""
    engine_version = "1"

    def __init__(self, adapter: ModelAdapter, folder: Path, waits: bool):
        self.model = str(folder)
        self.waits = waits
        self.pause_refused: dict[str, str] = {}
        self.off: dict[str, str] = {}
        self.lora: ReferenceLora | str = ReferenceLora()
        self.asleep: tuple[str, ...] = ()
        self.lockstep: Lockstep | None = None
        self._adapter = adapter
        self._receiver = Receiver(adapter)
        self._version = "default"
        self._loop = ThreadPoolExecutor(1, thread_name_prefix="engine-loop")

    async def version(self) -> str:
        """Label of the served weights."""
        return self._version

    async def call(self, method: str, payload: bytes) -> Sequence[bytes]:
        """Call ``method`` on the engine's only rank."""
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(self._loop, handle, lambda: self._receiver, method, payload)]

    async def commit(self, request: http.CommitRequest, call: Calls, stopped: bool) -> http.CommitReply:
        """Load the prepared push between two generations."""
        begin = time.perf_counter()
        payload = http.to_json(request)
        try:
            settle(await call("weightsync_commit", payload, COMMIT_CALL_S))
        except WeightSyncError as error:
            failed = await restored(error, call, payload)
            if not (isinstance(self.lora, str) or isinstance(request.lora, UnsetType) or changed_nothing(failed)):
                self.lora.withdraw(request.lora)
            raise failed from error
        if isinstance(self.lora, str) or isinstance(request.lora, UnsetType):
            self._version = request.version
        else:
            self.lora.serve(request.lora, request.version, request.push)
        applied_s = time.perf_counter() - begin
        return http.CommitReply(version=request.version, pause_s=applied_s, seconds={"apply": applied_s})

    async def withdraw(self, push: str) -> None:
        """Nothing to do: no engine is in lockstep with it."""

    async def stay_stopped(self, why: str) -> None:
        """Nothing to do: `generate` checks the rank's state."""

    async def generate(self, prompt: Sequence[int], tokens: int, adapter: str = "") -> Answer | None:
        """Greedy continuation of a prompt; None if a load failed while the request was queued. Raises `KeyError` for an
        adapter that is not served."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loop, self._generate, prompt, tokens, adapter)

    def close(self) -> None:
        """End the threads that generate and load, and receive, after what they are doing."""
        self._loop.shutdown(wait=False)
        self._receiver.close()

    def _generate(self, prompt: Sequence[int], tokens: int, adapter: str) -> Answer | None:
        if self._receiver.status().state.startswith("dirty"):
            return None
        if not adapter:
            return self._adapter.generate(prompt, tokens)
        if isinstance(self.lora, str) or adapter not in self.lora.versions:
            raise KeyError(adapter)
        with self._adapter.lora.applied(self.lora.number(adapter)):
            return self._adapter.generate(prompt, tokens)


def serve(adapter: ModelAdapter, folder: Path, port: int, waits: bool = False, host: str = "127.0.0.1") -> None:
    """Serve the model of ``adapter``, loaded from ``folder``, on address ``host`` of this machine until terminated.

    With ``waits`` the engine generates nothing before its first push.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from weightsync.engine.routes import HealthGuard, admin_routes

    front = ReferenceFrontEnd(adapter, folder, waits)
    front_end = FrontEnd(front, metrics.of_server())

    async def generate(request: Request) -> JSONResponse:
        body = await request.json()
        if reason := front_end.stopped:
            return JSONResponse({"error": reason}, 503)
        try:
            answer = await front.generate(body["prompt"], int(body["tokens"]), body.get("adapter", ""))
        except KeyError as error:
            return JSONResponse({"error": f"there is no adapter {error}"}, 404)
        if answer is None:
            return JSONResponse({"error": "a push failed half-way"}, 503)
        return JSONResponse({**answer._asdict(), "version": await front.version()})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({})

    routes = [
        *metrics_routes(),
        HealthGuard(lambda: front_end),
        Route("/health", health),
        Route("/generate", generate, methods=["POST"]),
        admin_routes(lambda: front_end, auth.engine_token()),
    ]
    uvicorn.run(Starlette(routes=routes), host=host, port=port, log_level="warning")


def metrics_routes() -> list[Any]:
    """``/metrics``, as both engines serve it: of several processes if ``PROMETHEUS_MULTIPROC_DIR`` is set."""
    from starlette.routing import Mount

    def app(client: Any) -> Any:
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return client.make_asgi_app()
        from prometheus_client import multiprocess

        registry = client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return client.make_asgi_app(registry=registry)

    served = observe.metrics(app)
    return [] if served is None else [Mount("/metrics", served)]


class ReferenceInProcess:
    """The reference engine in this process, as `Sender` takes it."""

    def __init__(self, folder: str | Path, *, device: str = "cpu", wait_for_initial_weights: bool = False):
        adapter = ModelAdapter(Path(folder), torch.device(device))
        self._serve(ReferenceFrontEnd(adapter, Path(folder), wait_for_initial_weights))

    def _serve(self, front: ReferenceFrontEnd) -> None:
        self.front, self.closed = front, False
        self.loop = run_in_thread(asyncio.new_event_loop())

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Greedy continuation of ``prompt`` by ``tokens`` tokens, and the log probability of each."""
        if reason := attach(self).front_end.stopped:
            raise RuntimeError(f"weightsync: {reason}")
        answer = asyncio.run(self.front.generate(prompt, tokens))
        if answer is None:
            raise RuntimeError("weightsync: a push failed half-way")
        return answer.tokens, answer.logprobs

    def close(self) -> None:
        """End the engine; idempotent."""
        self.closed = True
        stop(self.loop)
        self.front.close()


def attach(engine: ReferenceInProcess) -> EngineInProcess:
    """``weightsync.engines`` entry point: the client of a `ReferenceInProcess`. Raises `UnsupportedOption`."""
    if not isinstance(engine, ReferenceInProcess):
        raise UnsupportedOption(f"{type(engine).__name__} is no engine")

    def make(name: str) -> EngineInProcess:
        return EngineInProcess(
            name, FrontEnd(engine.front), engine.loop, lambda: "it was closed" if engine.closed else ""
        )

    return attached(engine, make)


class ReferenceEngine:
    """The server as a child process, for a ``with`` block: ``url`` is its address, ``process`` its `Popen`.

    ``launcher`` is the command that runs this module, for tests that need a wrapper around it; ``args`` are appended.
    Entering the block raises `EngineUnreachable` if the server does not answer within two minutes.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "cpu",
        args: Sequence[str] = (),
        launcher: Sequence[str] = (sys.executable, "-m", "weightsync.testing"),
        env: dict[str, str] | None = None,
        port: int | None = None,
    ):
        port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{port}"
        command = [*launcher, str(folder), "--port", str(port), "--device", device, *args]
        self.process = subprocess.Popen(command, env=env)

    def __enter__(self) -> ReferenceEngine:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                requests.get(f"{self.url}/health", timeout=1)  # 503 while it waits for its first weights
                return self
            except requests.RequestException:
                time.sleep(0.1)
        code = self.process.poll()
        self.close()
        raise EngineUnreachable(
            f"the reference engine did not come up within {_START_S:g} s"
            if code is None
            else f"the reference engine ended with exit code {code} before it served; its output says why"
        )

    def generate(self, prompt: Sequence[int], tokens: int, adapter: str = "") -> tuple[list[int], list[float]]:
        """Greedy continuation of ``prompt`` by ``tokens`` tokens, with a pushed adapter or none, and the log
        probability of each."""
        answer = self.answer(prompt, tokens, adapter)
        return answer.tokens, answer.logprobs

    def answer(self, prompt: Sequence[int], tokens: int, adapter: str = "") -> Answer:
        """As `generate`; with the log probabilities of the draft model, computed between the same two commits."""
        body = {"prompt": list(prompt), "tokens": tokens, "adapter": adapter}
        response = requests.post(f"{self.url}/generate", json=body, timeout=_START_S)
        response.raise_for_status()
        reply = response.json()
        return Answer(*(reply[name] for name in Answer._fields))

    def close(self) -> None:
        """End the process; idempotent."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_STOP_S)

    def __exit__(self, *_: object) -> None:
        self.close()


#: The ports that were given: whoever got one may not listen there yet.
_given: Final[set[int]] = set()


def free_port() -> int:
    """A free TCP port of this host that no outgoing connection and no other process is given by chance, and that this
    process was not given before."""
    # The kernel gives those ports from this range.
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(max(1024, first // 2), first) or range(1024, 1 << 16)
    if len(_given) > len(candidates) // 2:
        _given.clear()
    while True:
        port = secrets.choice(candidates)
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


def main() -> None:
    """Command line of the reference engine."""
    parser = argparse.ArgumentParser(prog="python -m weightsync.testing", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="address of this machine to listen on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draft", type=Path, help="folder of a draft model")
    parser.add_argument("--wait-for-initial-weights", action="store_true", help="serve nothing before the first push")
    args = parser.parse_args()
    device = torch.device(args.device)
    draft = None if args.draft is None else ModelAdapter(args.draft, device)
    adapter = ModelAdapter(args.model, device, draft)
    serve(adapter, args.model, args.port, args.wait_for_initial_weights, args.host)


if __name__ == "__main__":
    main()
