"""Run by SGLang's Python: ``inside_sglang.py FOLDER`` prints as JSON what compat does with SGLang's real classes."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from array import array
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
import zmq
from sglang.srt import runtime_context
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.lora.layers import FusedMoEWithLoRA
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
    sock_recv,
    sock_send,
)
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.network import get_zmq_socket

from sglang_weightsync import compat, compat_config, compat_loading, compat_pause, compat_workers, in_process, plugin
from sglang_weightsync.messages import WeightsyncReqOutput
from tests.engines.recorded import one_element_calls
from weightsync import python_lock
from weightsync.engine import servers
from weightsync.errors import UnsupportedOption

FOLDER = sys.argv[1]


def arguments(**more):
    return ServerArgs(model_path=FOLDER, device="cpu", **more)


def settings():
    """The reason why each setting is refused; empty if it is not."""
    wanted = {
        "none": {},
        "host tier": {"enable_hierarchical_cache": True},
        "storage": {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
        "lmcache": {"enable_lmcache": True},
        "prefill": {"disaggregation_mode": "prefill"},
        "decode": {"disaggregation_mode": "decode"},
        "encoder": {"encoder_only": True},
        "weight cache": {"weight_cache_mode": "daemon"},
        "eplb": {"enable_eplb": True},
        "replicas": {"dp_size": 2},
        "pipeline": {"pp_size": 2},
        "nodes": {"nnodes": 2},
        "pipeline over nodes": {"pp_size": 2, "nnodes": 2},
        "tokenizers": {"tokenizer_worker_num": 2},
    }
    return {name: compat_config.unsupported(arguments(**args)) for name, args in wanted.items()}


def drafts():
    """What status reports of each draft model."""
    wanted = {
        "none": {},
        "nextn": {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": FOLDER + "/"},
        "standalone": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": FOLDER + "-draft"},
    }
    return {name: compat_config.left_as_it_is(arguments(**args)) for name, args in wanted.items()}


def embeddings():
    """How many embeddings of the old vision tower the commit's flush leaves."""
    mm_schedule.init_mm_embedding_cache(1 << 20)
    mm_schedule.embedding_cache.set(1234, EmbeddingResult(embedding=torch.ones(4, 8)))
    idle = MagicMock()
    idle.is_fully_idle.return_value = True
    idle.flush_cache = lambda **options: Scheduler.flush_cache(idle, **options)
    return {"flushed": compat.flush_cache(idle), "left": len(mm_schedule.embedding_cache)}


def pauses():
    """Whether a scheduler is paused after each step of a push, and of a user who pauses it."""
    plugin.install()
    HookRegistry.apply_hooks()
    go_on, pause = ContinueGenerationReqInput(torch_empty_cache=False), PauseGenerationReqInput(mode="in_place")
    said = {}
    for who in ("nobody", "before", "meanwhile"):
        scheduler = Scheduler.__new__(Scheduler)
        scheduler._engine_paused, scheduler._pause_started_at, scheduler._pause_intervals = False, None, []
        scheduler.disaggregation_mode = None
        seen = []
        if who == "before":
            scheduler.pause_generation(pause)
        compat_pause.hold(scheduler, retract=False)
        seen.append(scheduler._engine_paused)
        if who == "meanwhile":
            scheduler.pause_generation(pause)
        if who == "nobody":
            scheduler.continue_generation(go_on)
        seen.append(scheduler._engine_paused)  # a dirty scheduler is not resumed
        compat_pause.let_go(scheduler)
        seen.append(scheduler._engine_paused)
        scheduler.continue_generation(go_on)
        said[who] = [*seen, scheduler._engine_paused]
    return said


def rests():
    """How often an idle scheduler's loop rests, without a push and while one arrives."""
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.idle_sleeper, found = None, []
    for arrives in (contextlib.nullcontext(), python_lock.passed_soon()):
        with arrives, patch.object(python_lock.time, "sleep") as slept:
            scheduler.maybe_sleep_on_idle()
            found.append(slept.call_count)
    return found


class Packed(QuantizeMethodBase):
    """Counts how often SGLang unpacks a layer before a load and packs it after."""

    def __init__(self):
        self.unpacked = self.packed = 0

    def create_weights(self, *args, **kwargs):
        raise NotImplementedError

    def apply(self, *args, **kwargs):
        raise NotImplementedError

    def restore_weights_before_loading(self, layer):
        self.unpacked += 1

    def process_weights_after_loading(self, layer):
        self.packed += 1


class Model(torch.nn.Module):
    """A model that fails to load."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.inner.quant_method = Packed()

    def load_weights(self, weights):
        raise ValueError("not these")


def scheduler_of(models):
    """A scheduler with the parts that loading uses, around SGLang's own updaters."""

    def runner(model):
        updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=None,
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=None,
            recapture_cuda_graph=None,
            get_model_runner=None,
        )
        return SimpleNamespace(model=model, weight_updater=updater)

    runners = {role: runner(model) for role, model in models.items()}
    select = lambda wanted: [(role, found) for role, found in runners.items() if wanted in ("all", role)]  # noqa: E731
    return SimpleNamespace(weight_updater=SimpleNamespace(_select_runners=select))


def loads():
    """How often a failing load unpacks and packs a model, and whether a draft has its own checkpoint."""
    runtime_context.publish(arguments(), role="scheduler")
    models = {"target": Model(), "draft": Model()}
    scheduler, said = scheduler_of(models), {}
    for draft in (None, FOLDER + "-draft"):
        with runtime_context.get_spec().override(speculative_draft_model_path=draft):
            said[f"own, {draft is not None}"] = compat_loading.draft_has_own_checkpoint()
    said["drafts"] = compat_loading.draft_runner(scheduler).model is models["draft"]
    said["no drafts"] = compat_loading.draft_runner(scheduler_of({"target": Model()}))
    try:
        compat_loading.load(compat_loading.runners(scheduler, "target")[0].weight_updater, [])
    except RuntimeError as error:
        said["error"] = str(error)
    method = models["target"].inner.quant_method
    said["unpacked, packed"] = [method.unpacked, method.packed]
    return said


def guards():
    """What SGLang's own guards report before a push, and what ours reports of LoRA on experts."""
    fit = scheduler_of({"target": Model()})
    said = {"none": compat_loading.refused(fit)}
    with runtime_context.get_model().override(weight_cache_mode="client"):
        said["weight cache"] = compat_loading.refused(fit)
    model = Model()
    scheduler = scheduler_of({"target": model})
    model.inner._derived_weight_cache_error = "derived weights are kept"
    said["derived"] = compat_loading.refused(scheduler)
    del model.inner._derived_weight_cache_error
    model.experts = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(model.experts)
    said["experts"] = compat_loading.refused(scheduler)
    memory = SimpleNamespace(offload_tags={"kv_cache"})
    said["attached"] = compat.refused(SimpleNamespace(weight_updater=memory, enable_hicache_storage=True))
    said["KV sleeps"] = compat.refused(SimpleNamespace(weight_updater=memory, enable_hicache_storage=False))
    return said


def workers():
    """Why pushes are refused that several tokenizer workers cannot pass on."""
    args = arguments(tokenizer_worker_num=2)
    router = SimpleNamespace(send_to_scheduler=None, recv_from_detokenizer=None, _loop=None)
    with patch.dict(compat_workers.WORKERS, {"sglang.srt.environ": ("envs.GONE",)}):
        said = {"older": plugin._answer_workers(args, router)}
    with patch.dict(os.environ, {"SGLANG_HTTP_SERVER_APP_PATH": "theirs:app"}):
        said["other app"] = plugin._answer_workers(args, router)
    engine = MagicMock(server_args=args)
    try:
        in_process.attach(engine)
    except UnsupportedOption as error:
        said["in process"] = str(error)
    return said


def router():
    """What the router of several workers does with their requests while it is closed, and while it drains."""
    args = arguments(tokenizer_worker_num=2)
    runtime_context.publish(args, role="tokenizer")
    ports, context, folder = PortArgs.init_new(args), zmq.Context(), Path(tempfile.mkdtemp())
    made = MultiTokenizerRouter(args, ports)
    found = compat_workers.Router(args, made, servers.Label(folder / "control"))
    address = f"ipc://{folder / 'worker'}"
    worker = get_zmq_socket(context, zmq.PULL, address, True)
    to_router = get_zmq_socket(context, zmq.PUSH, ports.tokenizer_worker_ipc_name, False)
    scheduler = get_zmq_socket(context, zmq.PULL, ports.scheduler_input_ipc_name, False)
    replies = get_zmq_socket(context, zmq.PUSH, ports.tokenizer_ipc_name, False)
    for socket in (worker, scheduler):
        socket.setsockopt(zmq.RCVTIMEO, 60_000)  # what has not arrived by then never will

    def send(rid, kind=TokenizedGenerateReqInput, **more):
        if kind is TokenizedGenerateReqInput:
            none = dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
            more = {**none, "input_text": "", "input_ids": array("q", [1]), "sampling_params": SamplingParams()}
            more |= {"return_logprob": False, "logprob_start_len": 0, "top_logprobs_num": 0, "stream": False}
        sock_send(to_router, kind(rid=rid, http_worker_ipc=address, **more))

    def heard(count, socket=scheduler):
        got = [sock_recv(socket) for _ in range(count)]
        said.append([(type(one).__name__, getattr(one, "method", None) or one.rid) for one in got])
        return got[-1]

    async def drain():
        async with found.drained(abort=True):
            return "drained"

    said = []
    found.close_at_start("not yet")
    for rid in ("first", "second"):
        send(rid)
    send("second", AbortReq)
    heard(1, worker)
    heard(1)
    asyncio.run_coroutine_threadsafe(found.open(), made._loop).result(60)
    send("third")
    heard(2)
    drained = asyncio.run_coroutine_threadsafe(drain(), made._loop)
    for in_flight in (True, False):
        asked = heard(2)
        send("fourth")
        send("nobody's", AbortReq)  # behind the request, so that it has arrived
        heard(1)
        sock_send(replies, WeightsyncReqOutput(call=asked.call, replies=[], in_flight=in_flight))
    said.append(drained.result(60))
    heard(2)
    return said


def paused():
    """Whether a push waits for the requests of a scheduler, by whether a user has paused it."""
    return [
        compat.has_requests(SimpleNamespace(_engine_paused=paused, is_fully_idle=lambda: False))
        for paused in (False, True)
    ]


def deep():
    """The results of both checks when a name is missing that only ``verify="deep"`` needs."""
    del factory._ROPE_DICT
    return {"core": compat.SGLANG.check(compat.NEEDED), "deep": compat.SGLANG.check(compat.DEEP)}


def plain():
    """Digests of two layers that differ in one plain attribute, by its name."""
    found = {}
    for name in ("w_kc", "conv_weights"):
        found[name] = []
        for value in (0.0, 1.0):
            layer = torch.nn.Module()
            setattr(layer, name, torch.full((2, 3), value))
            found[name].append(compat_loading.digest(SimpleNamespace(model=layer)))
    return found


def first_calls():
    """What torch computes with one element when SGLang loads the plugin."""
    with patch.object(compat, "hook"):
        return one_element_calls(plugin.install)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = {
            "settings": settings(),
            "drafts": drafts(),
            "embeddings": embeddings(),
            "pauses": pauses(),
            "rests": rests(),
            "workers": workers(),
            "router": router(),
            "paused": paused(),
            "loads": loads(),
            "guards": guards(),
            "deep": deep(),
            "plain": plain(),
            "first calls": first_calls(),
        }
    print(json.dumps(found))
