"""``weightsync.engines`` entry point: vLLM's engines in the trainer's process, `LLM` and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from vllm_weightsync import compat, compat_llm
from vllm_weightsync.front_end import VllmFrontEnd
from weightsync.engine import refusals
from weightsync.engine.front_end import FrontEnd
from weightsync.engine.in_process import EngineInProcess, attached, check_thread, run_in_thread, stop
from weightsync.engine.rank_calls import Calls
from weightsync.errors import UnsupportedOption, changed_nothing
from weightsync.protocol import http

_ONE_PROCESS = "the engine core of this LLM runs in the trainer's process (VLLM_ENABLE_V1_MULTIPROCESSING=0), where {}"


def attach(engine: Any) -> EngineInProcess:
    """The client of an `LLM` or `AsyncLLM`. Raises `UnsupportedOption`."""
    if compat_llm.is_llm(engine):
        return attached(engine, lambda name: _llm(name, engine))
    if compat_llm.is_async(engine):
        check_thread("this AsyncLLM", compat_llm.loop_of(engine))
        return attached(engine, lambda name: _async_llm(name, engine))
    raise UnsupportedOption(f"{type(engine).__name__} is not an engine of vLLM: give an LLM or an AsyncLLM")


def _llm(name: str, llm: Any) -> EngineInProcess:
    client = compat_llm.Llm(llm)
    if reason := compat.VLLM.check(compat_llm.NAMES) or client.lacking(compat.VLLM.check_object):
        raise UnsupportedOption(reason)
    if compat.replicas(client) > 1:
        raise UnsupportedOption(
            "an LLM with data_parallel_size above 1 is one of several processes, each with its own replica: use an "
            "AsyncLLM, or a server"
        )
    if client.errored:
        raise UnsupportedOption(f"this LLM cannot be pushed into: {compat_llm.DEAD}")
    client.lock_methods()
    front = LlmFrontEnd(client)
    loop = run_in_thread(asyncio.new_event_loop())
    weakref.finalize(llm, stop, loop)
    found = EngineInProcess(name, FrontEnd(front), loop, lambda: _gone(client))
    found.run(front.hold_from_start())
    return found


def _async_llm(name: str, async_llm: Any) -> EngineInProcess:
    if async_llm.errored:
        raise UnsupportedOption(f"this AsyncLLM cannot be pushed into: {compat_llm.DEAD}")
    loop = compat_llm.loop_of(async_llm)
    if loop is None or not loop.is_running():
        raise UnsupportedOption(
            "the event loop of this AsyncLLM does not run: build the engine, and call the sender, while it does, as in "
            "`await asyncio.to_thread(Sender, [engine])`"
        )
    front = VllmFrontEnd(async_llm)
    found = EngineInProcess(name, FrontEnd(front), loop, lambda: _gone(async_llm))
    found.run(front.hold_from_start())
    return found


def _gone(client: Any) -> str:
    return compat_llm.DEAD if client.errored else ""


class LlmFrontEnd(VllmFrontEnd):
    """The front end of an `LLM`, which cannot generate while a push uses it, nor be pushed into while it generates."""

    def __init__(self, client: compat_llm.Llm):
        super().__init__(client)
        self._llm = client
        client.stopped = refusals.FIRST_PUSH if self.waits else ""
        if client.in_one_process:
            self.pause_refused["wait"] = _ONE_PROCESS.format("nobody takes the steps that requests in flight need")
            self.pause_refused["abort"] = _ONE_PROCESS.format("nobody would learn that a request was aborted")

    @property
    def busy(self) -> str:
        """See `weightsync.engine.engine_front_end.EngineFrontEnd`."""
        return self._llm.busy

    async def version(self) -> str:
        """See `VllmFrontEnd.version`; the last known one also while `LLM` generates."""
        return self._version if self._version and self.busy else await super().version()

    async def commit(self, request: http.CommitRequest, call: Calls, stopped: bool) -> http.CommitReply:
        """See `EngineFrontEnd`; from the pause to the end no method of `LLM` runs."""
        async with self._llm.held(refusals.drain_s(request)) as alone:
            if not alone:
                raise refusals.still_in_flight(request)
            # What waits for its turn has to find the outcome, so it is said before anything else can run.
            try:
                reply = await super().commit(request, call, stopped)
            except BaseException as error:
                if not changed_nothing(error):
                    self._llm.stopped = refusals.half_way(error)
                raise
            self._llm.stopped = ""
            return reply
