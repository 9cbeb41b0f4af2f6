"""Real engines, started once for each configuration and shared by the tests that use it."""

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
from transformers import PreTrainedModel

from tools import models, servers
from weightsync import Sender, doctor
from weightsync.errors import PluginNotLoaded
from weightsync.protocol.diagnosis import Finding

PROMPT = list(b"Once upon a time there was a policy that ")
NEW_TOKENS = 24
#: Allowed mean difference of logprobs between a pushed engine and a fresh one of the same kind. It is mostly 0, but now
#: and then a server of either engine rounds otherwise than the others, without our plugin too: by 0.03 on average, and
#: then two nearly tied tokens may change places. (`weightsync.engine.first_calls` says one reason.) One stale tensor of
#: these models moves it by 0.07 at least.
SAME_ENGINE = 0.05
#: So many tokens must be the same at any rate.
SAME_TOKENS = 8
#: Allowed mean difference of logprobs between an engine and transformers, which round bfloat16 in different orders.
#: Correct weights differ by 0.02 to 0.04, single tokens by more if experts are nearly tied; other weights by 6.
BF16_ROUNDING = 0.1


@dataclass
class Served:
    """A server, and the answers of a server freshly started on model B."""

    server: servers.Server
    kind: str
    tp: int
    a: Path
    b: Path
    fresh_b: "Answers"
    refusal: Exception | None
    """The error of a sender whose server runs without the plugin, if one did."""
    unplugged: list[Finding]
    """What the doctor found wrong at that server."""
    first: "First"

    def sender(self, **options):
        return Sender([self.server.url], **options)

    def push(self, path, *, version=None, **options):
        """Push a transformers model loaded from a folder."""
        with self.sender(**options) as sender:
            return sender.push(models.load_reference(path), version=version)

    def state(self):
        with self.sender() as sender:
            return sender.status()[self.server.url]

    def loading(self):
        """How each rank loads."""
        return [rank.loading for rank in self.state().ranks]

    def digests(self):
        """The digest of each rank's weights."""
        with self.sender() as sender:
            return [rank.digest for rank in sender.status(digest=True)[self.server.url].ranks]


@dataclass
class Answers:
    """Greedy tokens and logprobs of the two prompts that the tests ask about."""

    short: tuple[list[int], list[float]]
    long: tuple[list[int], list[float]]


@dataclass
class First:
    """An engine before its first push, and its answer to a request that arrived before that push."""

    health: int
    state: str
    answered_early: bool
    answer: tuple[list[int], list[float]]


def wrong_at(url):
    """What `weightsync doctor` finds wrong on this host and at an engine."""
    places = list(doctor.examine([url], "", PATIENCE_S))
    return [finding for place in places for finding in place.findings if finding.level == "wrong"]


def first_push(server, folder):
    """Send a request, then push, then wait for the answer."""
    with Sender([server.url]) as sender, ThreadPoolExecutor(1) as thread:
        health = requests.get(f"{server.url}/health", timeout=10).status_code
        state = sender.status()[server.url].state
        answer = thread.submit(servers.greedy, server, PROMPT, NEW_TOKENS)
        early = wait([answer], timeout=3.0).done
        sender.push(models.load_reference(folder), version="first")
        return First(health, state, bool(early), answer.result(120))


def long_prompt():
    """200 tokens."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (200,), generator=generator).tolist()


def ask(server):
    return Answers(servers.greedy(server, PROMPT, NEW_TOKENS), servers.greedy(server, long_prompt(), NEW_TOKENS))


def assert_same(got, want):
    """Assert that two answers come from the same weights: equal tokens, to a near tie at least, and close logprobs."""
    same = next((n for n, (x, y) in enumerate(zip(got[0], want[0], strict=True)) if x != y), len(want[0]))
    assert same >= SAME_TOKENS, (got, want)
    assert apart(got[1][:same], want[1][:same]) <= SAME_ENGINE, (got, want)


def differ(got, want):
    return got[0] != want[0] or apart(got[1], want[1]) > 2 * BF16_ROUNDING


def apart(these, those):
    """Mean difference of logprobs."""
    return sum(abs(x - y) for x, y in zip(these, those, strict=True)) / len(these)


def assert_agrees(server, model: PreTrainedModel, answer, prompt=PROMPT):
    """Assert that the engine's logprobs equal those of transformers for the same tokens, within bf16 rounding."""
    own = models.reference_logprobs(model, prompt + answer[0], len(prompt))
    assert apart(answer[1], own) <= BF16_ROUNDING


HERE = Path(__file__).parent
CACHING = {
    "vllm": ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"],
    "sglang": [],
}
#: Options of an engine that shows metrics; vLLM always does.
METRICS = {"vllm": [], "sglang": ["--enable-metrics"]}
NO_CACHING = {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"]}
#: Options of an engine that must not serve before its first push.
WAITING = {
    "vllm": ["--additional-config", '{"weightsync": {"wait_for_initial_weights": true}}'],
    "sglang": ["--checkpoint-engine-wait-weights-before-ready"],
}
STREAMS, LENGTH = 8, 32_768
#: Seconds: longer than anything takes on a busy machine. What has not arrived by then never will.
PATIENCE_S = 900
#: Tokens requested of each stream: more than an engine generates before the test ends it, however slow the machine.
#: SGLang sends all logprobs so far with each token, which slows it down, and admits only streams that fit to the end.
STREAM_TOKENS = {"vllm": 30_000, "sglang": 3_000}


class Streams:
    """Clients that read long streams while something else happens; see `clients`."""

    def __init__(self, server):
        asked = [server.engine, server.model, server.url, STREAMS, STREAM_TOKENS[server.engine], *PROMPT]
        command = [sys.executable, "-m", "tests.engines.clients", *map(str, asked)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=servers.ROOT)
        self.results = []
        #: Released once for each stream that has begun.
        self.began = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        assert all(self.began.acquire(timeout=PATIENCE_S) for _ in range(STREAMS))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.thread.join(10)
        self.process.stdin.close()
        self.process.stdout.close()

    def _listen(self):
        for line in self.process.stdout:
            tokens = json.loads(line)
            if tokens is None:
                self.began.release()
            else:
                self.results.append(tokens)

    def read(self, more=None):
        """Wait until all streams have ended and return their tokens; with ``more``, each ends after that many more."""
        with self.process.stdin as told:
            told.write("" if more is None else f"{more}\n")
        self.process.wait(PATIENCE_S)
        self.thread.join(10)
        self.process.stdout.close()
        return self.results

    def running(self):
        return STREAMS - len(self.results)


#: By kind and ranks: the class in vLLM's slot for a worker extension. Other configurations leave the slot empty.
EXTENSIONS = {
    ("llama", 1): "plain_extension.UserExtension",
    ("qwen3_moe", 2): "vllm_weightsync.WorkerExtension",
    ("qwen3", 2): "user_extension.ForeignExtension",
}


#: Where workers find these classes.
FOLDERS = {"PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))}


def is_plain(engine, kind):
    """Whether the engine leaves layers as they are loaded: then load plans load them.

    vLLM packs layers in bfloat16 where oneDNN has kernels for them; for `llama` it is told not to.
    """
    return engine == "sglang" or kind == "llama" or "AVX512" not in torch.backends.cpu.get_cpu_capability()


def without_plugin(engine, kind):
    """Options of a server that cannot be pushed to, and that computes as `with_plugin`."""
    args = CACHING[engine]
    if engine == "vllm" and kind == "llama":
        args = [*args, "--worker-extension-cls", "plain_extension.PlainLayers"]
    # SGLang loads every installed plugin unless it is told which.
    return {"args": args, "plugin": False, "env": {"SGLANG_PLUGINS": "others", **FOLDERS}}


def with_plugin(engine, kind, tp, folder, scratch):
    """Folder and options of the server that is pushed to; each configuration covers other options."""
    # vLLM's worker RPC, and its routes that pause, resume and sleep; SGLang has its own always.
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    if (kind, tp) == ("qwen3", 1):
        # A configuration alone, so that no checkpoint says what a complete push is.
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, scratch)
        return scratch, {"args": [*METRICS[engine], *CACHING[engine], "--load-format", "dummy"], "env": env}
    args = [*NO_CACHING[engine], *WAITING[engine]] if kind == "llama" else CACHING[engine]
    args = [*METRICS[engine], *args]
    if engine == "vllm":
        args = [*args, "--worker-extension-cls", EXTENSIONS[kind, tp]]
        env |= FOLDERS
    elif tp == 2:
        args = [*args, "--sleep-on-idle"]  # by default idle ranks poll, and take both cores from what runs beside them
    return folder, {"args": args, "env": env}


@pytest.fixture(scope="package")
def served(request, model_folder, tmp_path_factory):
    """A `Served` for the configuration (engine, kind, tp) that the module asks for."""
    engine, kind, tp = request.param
    a, b = model_folder(kind, 0), model_folder(kind, 1)
    refusal, unplugged, fresh_b = None, [], None
    if request.param in UNPLUGGED:
        with servers.start(engine, b, tp=tp, max_model_len=LENGTH, **without_plugin(engine, kind)) as fresh:
            fresh_b = ask(fresh)
            with pytest.raises(PluginNotLoaded) as refused:
                Sender([fresh.url])
            refusal, unplugged = refused.value, wrong_at(fresh.url)
    started_on = a if fresh_b else b
    folder, options = with_plugin(engine, kind, tp, started_on, tmp_path_factory.mktemp("served"))
    with servers.start(engine, folder, tp=tp, max_model_len=LENGTH, **options) as server:
        fresh_b = fresh_b or ask(server)
        yield Served(server, kind, tp, a, b, fresh_b, refusal, unplugged, first_push(server, b))


#: (engine, kind, tp). Tests of caches and pauses use the first four; their place at the start of both lists keeps a
#: configuration from being started twice.
CACHES = [(engine, "qwen3", tp) for engine in ("vllm", "sglang") for tp in (1, 2)]
OTHERS = [(engine, kind, tp) for engine in ("vllm", "sglang") for kind, tp in (("llama", 1), ("qwen3_moe", 2))]
ALL = [*CACHES, *OTHERS]
#: What `make test` runs, beside one rank of vLLM in tests/lora; `make test-slow` runs the others.
FAST = (("vllm", "qwen3", 2), ("sglang", "qwen3", 2))
#: Here a server without the plugin gives the fresh answers: the one that is pushed to has no weights before its first
#: push. The others answer themselves, before their first push.
UNPLUGGED = [(engine, kind, tp) for engine, kind, tp in ALL if (kind, tp) in (("qwen3", 1), ("llama", 1))]


def configurations(wanted):
    """Parametrize a module over configurations of `served`."""
    params = [
        pytest.param(wants, id="-".join(map(str, wants)), marks=() if wants in FAST else pytest.mark.slow)
        for wants in wanted
    ]
    return pytest.mark.parametrize("served", params, indirect=True, scope="package")
