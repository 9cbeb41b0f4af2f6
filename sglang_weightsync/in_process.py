"""``weightsync.engines`` entry point: SGLang's `Engine` in the trainer's process."""

from __future__ import annotations

from typing import Any

from sglang_weightsync import compat_config, compat_engine
from weightsync.engine.front_end import FrontEnd
from weightsync.engine.in_process import EngineInProcess, attached, check_thread
from weightsync.errors import PluginNotLoaded, UnsupportedOption


def attach(engine: Any) -> EngineInProcess:
    """The client of an `Engine`. Raises `UnsupportedOption`, `PluginNotLoaded`."""
    if not compat_engine.is_engine(engine):
        raise UnsupportedOption(f"{type(engine).__name__} is not an engine of SGLang: give a sglang.Engine")
    if reason := compat_engine.lacking(engine):
        raise UnsupportedOption(reason)
    if compat_config.has_workers(engine.server_args):
        raise UnsupportedOption(
            f"tokenizer_worker_num={engine.server_args.tokenizer_worker_num}: workers of this sglang.Engine in other "
            "processes would not know about a push; build it with tokenizer_worker_num=1, or serve it over HTTP"
        )
    check_thread("this Engine", compat_engine.loop_of(engine))
    return attached(engine, lambda name: _engine(name, engine))


def _engine(name: str, engine: Any) -> EngineInProcess:
    from sglang_weightsync.compat_tokenizer import OneTokenizer
    from sglang_weightsync.front_end import SglangFrontEnd

    if not compat_engine.has_plugin(engine):
        raise PluginNotLoaded(
            "SGLang did not load weightsync when it started this Engine: set SGLANG_PLUGINS=weightsync before it is "
            "built; its log says if that failed"
        )
    running = compat_engine.Running(engine)
    front = SglangFrontEnd(engine.server_args, OneTokenizer(engine.server_args, engine.tokenizer_manager))
    found = EngineInProcess(name, FrontEnd(front), running.loop, running.gone)
    running.stopped = lambda: found.front_end.stopped
    return found
