"""A real engine, a reference engine beside it, a trainer, and a client that asks for tokens all the time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests
from safetensors.torch import load_file, save_file

from tests.faults.plan import Fault
from tests.helpers import changed
from tests.lora.adapters import make_adapter
from tests.lora.conftest import OPTIONS
from tools import models, servers
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.memory import arenas
from weightsync.protocol import http
from weightsync.protocol.auth import engine_token
from weightsync.testing import ReferenceEngine
from weightsync.trainer.client import EngineClient

SITE = Path(__file__).parent / "site"
PROMPT = list(b"Once upon a time there was a policy that ")
#: Seconds a trainer's push may take; a frozen process is noticed by then.
PUSH_S = 8.0
#: Small, so that a push takes a dozen buckets.
BUCKET_BYTES = 96 * 1024
SETTLE_S = 40.0
#: Seconds: longer than a trainer takes that has yet to start, on a busy machine.
PATIENCE_S = 180.0
TOLERANCE = 2e-3


@dataclass
class Outcome:
    """The outcome of one fault."""

    engine: str
    fault: Fault
    left: str = ""
    claimed: str = ""
    error: str = ""
    detect_s: float = 0.0
    mixed: int = 0
    answers: int = 0
    restarted: int = 0
    mended: bool = False
    wrong: str = ""


class Trainer:
    """A `tests.faults.trainer` process."""

    def __init__(self, fault_file: Path, *, keen: bool = False):
        path = os.pathsep.join([str(SITE), str(servers.ROOT)])
        env = {**os.environ, "PYTHONPATH": path, "FAULT_FILE": str(fault_file)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.trainer", *(["keen"] if keen else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def order(self, **order):
        """Begin a push."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def outcome(self, timeout_s):
        """The trainer's report of the push; None if it does not report within ``timeout_s``."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return json.loads(line) if line else None

    def close(self):
        """End the process, even if it is frozen."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)


class Asker:
    """Asks for one token again and again, and counts the answers by version."""

    def __init__(self, harness):
        self._harness, self._over = harness, threading.Event()
        self.seen: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._over.is_set():
            name = self._harness.which(timeout_s=5.0)
            self.seen[name] = self.seen.get(name, 0) + 1
            self._over.wait(0.02)

    def stop(self):
        """Wait for the last answer; returns the number of answers by version."""
        self._over.set()
        self._thread.join(15)
        return self.seen


class Harness:
    """One engine under test: vllm, sglang or reference, or drafts, the reference engine with a draft model.

    ``stays`` is for vLLM alone, as on a GPU, and so is ``quantised``: it quantises what it loads.

    With ``lora``, a name, the versions that are pushed are of an adapter of this name, and the weights stay. With
    ``changes`` the two versions differ in a few elements, and only these cross.
    """

    def __init__(
        self,
        engine: str,
        tp: int,
        scratch: Path,
        *,
        stays: bool = False,
        quantised: bool = False,
        lora: str = "",
        changes: bool = False,
    ):
        self.engine, self.tp, self._scratch, self.lora = engine, tp, scratch, lora
        self.fault_file = scratch / "fault.json"
        self.folders = {name: models.make_model(scratch / name, "qwen3", seed=seed) for seed, name in enumerate("AB")}
        self.base, self.changes = self.folders["A"], changes
        if changes:
            file = self.folders["B"] / "model.safetensors"
            save_file(changed(load_file(self.base / file.name), 1), file, {"format": "pt"})
        if lora:
            self.folders = {name: make_adapter(scratch / name / "adapter", self.base, seed=ord(name)) for name in "AB"}
        #: Of the draft of each version, if there is one.
        self.drafts: dict[str, Path] = {}
        if engine == "drafts":
            seeds = enumerate("AB", 2)
            self.drafts = {
                name: models.make_model(scratch / f"draft-{name}", "qwen3", seed=seed) for seed, name in seeds
            }
        self._args = ["--draft", str(self.drafts["A"])] if self.drafts else []
        self._options = ["--worker-extension-cls", "copied_extension.Staying"] if stays else []
        self._options += ["--quantization", "fp8_per_channel"] if quantised else []
        self._options += OPTIONS[engine] if lora and not self.is_reference else []
        self.port = servers.free_port()
        self.bystander = ReferenceEngine(self.base, args=self._args).__enter__()
        self.restarts = 0
        self._prints: dict[str, float] = {}
        self.start()
        self.trainer = self._trainer()
        self._pushes = 0
        self.serving = ""

    def prove(self):
        """Push both versions and check that their answers can be told apart."""
        for name in "AB":
            said = self.push_clean(name, {"transport": "nixl"} if self.changes else None)
            self._prints[name] = self._ask(30.0)
        assert said["delta"] == self.changes
        assert abs(self._prints["A"] - self._prints["B"]) > 10 * TOLERANCE
        self.serving = "B"

    # --- the engine

    @property
    def is_reference(self) -> bool:
        """Whether it is the reference engine, with or without a draft."""
        return self.engine in ("reference", "drafts")

    def start(self):
        """Start the engine, always on the same port."""
        env = {"PYTHONPATH": str(SITE), "FAULT_FILE": str(self.fault_file)}
        if self.is_reference:
            env["PYTHONPATH"] += os.pathsep + str(servers.ROOT)
            found = ReferenceEngine(self.base, args=self._args, env={**os.environ, **env}, port=self.port)
            self._server = found.__enter__()
            self.url = self._server.url
        else:
            env["PYTHONPATH"] += os.pathsep + str(servers.ROOT)
            options = {"tp": self.tp, "port": self.port, "args": self._options, "env": env}
            self._server = servers.start(self.engine, self.base, **options)
            self._server.adapter = self.lora
            self.url = self._server.url
        self.client = EngineClient(self.url, engine_token())
        opened = self.client.open(Deadline(30))
        self.workers = [rank.pid for rank in opened.ranks]
        self.instance = opened.instance

    @property
    def front_end(self) -> int:
        """The process that serves HTTP."""
        return self._server.process.pid

    def alive(self) -> bool:
        """Whether all processes of the engine exist; they may be frozen."""
        return self._server.process.poll() is None and all(_lives(pid) for pid in self.workers)

    def restart(self):
        """Start the engine again after it died."""
        if self.is_reference:
            self._server.close()
        else:
            self._server.stop(deadline_s=3.0)
        self.restarts += 1
        self.start()

    def start_afresh(self):
        """Start the engine again, with its checkpoint, and a trainer whose sender has pushed nothing."""
        self.restart()
        self.new_trainer()
        self.serving = "A"
        self._tell("A", "", {}, [self.url, self.bystander.url])
        assert self.trainer.outcome(60), "the trainer says nothing"

    def thaw(self):
        """Continue every process."""
        for pid in {self.front_end, *self.workers}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # --- what it serves

    def _ask(self, timeout_s: float) -> float:
        if self.is_reference:
            body = {"prompt": PROMPT, "tokens": 1, "adapter": self.lora}
            reply = requests.post(f"{self.url}/generate", json=body, timeout=timeout_s)
            reply.raise_for_status()
            answer = reply.json()
            # Of a model and a draft of different versions the sum is another one.
            return sum(answer["logprobs"] + answer["drafted"])
        if self.engine == "vllm":
            body = servers._vllm_request(self._server, PROMPT, 1)
            reply = requests.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)
            reply.raise_for_status()
            return reply.json()["choices"][0]["logprobs"]["token_logprobs"][0]
        body = servers._sglang_request(self._server, PROMPT, 1)
        reply = requests.post(f"{self.url}/generate", json=body, timeout=timeout_s)
        reply.raise_for_status()
        return reply.json()["meta_info"]["output_token_logprobs"][0][0]

    def which(self, timeout_s: float = 5.0) -> str:
        """The version that answers, A or B; ``"none"`` if nothing answers; ``"mixed ..."`` for other weights."""
        try:
            found = self._ask(timeout_s)
        except (requests.RequestException, KeyError, ValueError):
            return "none"
        for name, printed in self._prints.items():
            if abs(found - printed) <= TOLERANCE:
                return name
        return f"mixed ({found:.4f})"

    def label(self, status: http.StatusReply) -> str:
        """The label of what it serves."""
        return (status.adapters or {}).get(self.lora, "") if self.lora else status.version

    def status(self) -> http.StatusReply | None:
        """The status as the front end reports it; None if it does not answer."""
        try:
            return self.client.status(Deadline(8.0))
        except WeightSyncError:
            return None

    def loads_by_plan(self) -> bool:
        """Whether every rank loads by its load plan alone, without the engine's loader."""
        status = self.status()
        return status is not None and all(rank.loading.startswith("load plan") for rank in status.ranks)

    def settled(self, timeout_s: float = SETTLE_S) -> http.StatusReply | None:
        """Wait until no push is under way; returns the status, None if the engine is dead."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.alive():
            status = self.status()
            if status is not None and status.state in ("serving", "dirty") and status.ranks:
                return status
            time.sleep(0.1)
        return None

    # --- pushes

    def order(self, name: str, fault: Fault | None = None, only: list[str] | None = None):
        """Tell the trainer to push a version; returns its label."""
        self._pushes += 1
        version, urls = f"{name}-{self._pushes}", only or [self.url, self.bystander.url]
        self._tell(name, version, fault.options if fault else {}, urls, fault.spoil if fault else "")
        return version

    def _tell(self, name: str, version: str, options: dict, urls: list[str], spoil: str = ""):
        parts = {} if self.changes else {"bucket_bytes": BUCKET_BYTES}  # what has changed is sent of whole versions
        options = {"timeout_s": PUSH_S, **parts, **options}
        pushed = {"model": str(self.folders[name]), "lora": self.lora}
        if self.drafts:
            pushed["draft"] = str(self.drafts[name])
        if self.lora and (status := self.status()) is not None and status.state == "dirty":
            self.trainer.order(urls=urls, model=str(self.base), version="base", options=options)
            self.trainer.outcome(PATIENCE_S)  # an adapter comes after the weights
        self.trainer.order(urls=urls, version=version, options=options, spoil=spoil, **pushed)

    def push_clean(self, name: str, options: dict | None = None):
        """Push without a fault, which must succeed; returns the trainer's report."""
        self.order(name, Fault("", "", (), options=options or {}))
        said = self.trainer.outcome(PATIENCE_S)
        assert said is not None, "the trainer says nothing"
        assert not said["error"], said
        self.serving = name
        return said

    def _trainer(self):
        return Trainer(self.fault_file, keen=self.changes)

    def new_trainer(self):
        """Replace a trainer that died."""
        self.trainer.close()
        self.trainer = self._trainer()

    def full_disk(self):
        """Fill the shared-memory mount; returns a function that empties it again."""
        path = arenas.SHM_DIRECTORY / "filler-of-the-fault-tests"
        free = arenas.free_shared_bytes()
        mount = os.statvfs(arenas.SHM_DIRECTORY)
        nbytes = mount.f_bavail * mount.f_frsize - 64 * 1024
        if nbytes > free:
            return None  # filling the mount would exhaust the machine's memory
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return path.unlink

    def close(self):
        """End everything."""
        self.trainer.close()
        self.thaw()
        if self.is_reference:
            self._server.close()
        else:
            self._server.stop()
        self.bystander.close()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
