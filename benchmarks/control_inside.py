"""Pushes that move nothing, and beside them the engine's own pause, resume and calls; also run by an engine's Python.

python benchmarks/control_inside.py vllm|sglang MODEL ROUNDS: an engine of this very process, `vllm.LLM` or
`sglang.Engine`; prints its samples as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

WARM_UP = 4
#: What a push into an engine asks of its ranks: to accept it, whether they are ready, to load it.
CALLS = 3

Sample = dict[str, float]


class Beside(NamedTuple):
    """What is measured beside a push; each returns once it is done.

    ``request`` is a request that makes no call to the ranks, ``call`` one that makes one, and in vLLM also one for the
    version, as a push does. ``pause`` and ``resume`` are the engine's own; ``load`` returns the seconds that the engine
    takes to load by itself, given the step of a push in which it loads, without the call: in vLLM, which reloads the
    model in it, all of it, in SGLang those of the two steps around a load.
    """

    request: Callable[[], object]
    call: Callable[[], object]
    pause: Callable[[], object]
    resume: Callable[[], object]
    load: Callable[[float], float]


def measure(push: Callable[[], Any], beside: Beside, rounds: int) -> list[Sample]:
    """The seconds of every round."""
    for _ in range(WARM_UP):
        push()
    return [_round(push, beside) for _ in range(rounds)]


def _round(push: Callable[[], Any], beside: Beside) -> Sample:
    start = time.perf_counter()
    (engine,) = push().engines.values()
    found = {"push": time.perf_counter() - start}
    names = ("request", "call", "pause", "resume")
    found |= {name: _timed(act) for name, act in zip(names, beside[:4], strict=True)}
    return {**found, "load": beside.load(engine.seconds["apply"] - (found["call"] - found["request"]))}


def session_s(begin: Callable[[], object], end: Callable[[], object], call: Callable[[], object]) -> float:
    """The seconds that SGLang's ``begin`` and ``end`` of a load take beyond a ``call`` each."""
    return _timed(begin) + _timed(end) - _timed(call) - _timed(call)


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _vllm(
    folder: str, call: Callable[[], object]
) -> tuple[Any, Callable[[], object], Callable[[], object], Callable[[float], float]]:
    from vllm import LLM

    engine = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
    )
    core = engine.llm_engine.engine_core
    return (
        engine,
        lambda: core.call_utility("pause_scheduler", "keep", False),
        lambda: core.call_utility("resume_scheduler"),
        lambda reload_s: reload_s,
    )


def _sglang(
    folder: str, call: Callable[[], object]
) -> tuple[Any, Callable[[], object], Callable[[], object], Callable[[float], float]]:
    import sglang
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    engine = sglang.Engine(
        model_path=folder,
        dtype="bfloat16",
        context_length=256,
        max_total_tokens=4096,
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        mem_fraction_static=0.1,
        sleep_on_idle=True,
        log_level="warning",
    )
    manager = engine.tokenizer_manager

    def run(method: Any, message: object) -> None:
        asyncio.run_coroutine_threadsafe(method(message), engine.loop).result()

    return (
        engine,
        lambda: run(manager.pause_generation, PauseGenerationReqInput(mode="retract")),
        lambda: run(manager.continue_generation, ContinueGenerationReqInput(torch_empty_cache=False)),
        lambda _: session_s(engine.begin_weight_update, engine.end_weight_update, call),
    )


def main() -> None:
    """Measure an engine of this process."""
    # Everything that is printed goes to stderr, so that stdout has the samples only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from transformers import AutoModelForCausalLM

    from weightsync import Sender
    from weightsync.protocol.in_process import target

    kind, folder, rounds = sys.argv[1:]
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # not a mapped file
    routes: Any = None

    def call() -> None:
        routes.ask("status", b"{}", 60.0)

    engine, pause, resume, load = (_vllm if kind == "vllm" else _sglang)(folder, call)
    with Sender([engine]) as sender:
        routes = target(engine)
        beside = Beside(
            lambda: routes.ask("lease", b'{"owner": "nobody"}', 60.0),
            call,
            pause,
            resume,
            load,
        )
        samples = measure(lambda: sender.push(module), beside, int(rounds))
        last = sender.push(module)
        (found,) = sender.status().values()
    served = (found.version, found.state) == (last.version, "serving")
    print(
        json.dumps({"samples": samples, "served": served, "loading": found.ranks[0].loading}), file=answers, flush=True
    )
    os._exit(0)  # SGLang ends the whole process otherwise, with an error


if __name__ == "__main__":
    main()
