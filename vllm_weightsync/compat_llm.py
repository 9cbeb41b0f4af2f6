"""vLLM's engines in the trainer's process, seen as the engine client of an API server. `compat` checks the names.

`LLM` and the client of its engine core are not made for two threads. So a thread of ours makes the calls of a push, and
a lock lets either that thread or a method of `LLM` use the engine: `generate` ends before a push goes on. vLLM's
call of an engine core that dies meanwhile never returns, so a second thread makes it, and the first one looks.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from typing import Any, Final

from weightsync.daemon_thread import DaemonThread
from weightsync.engine.in_process import refusing
from weightsync.errors import EngineUnreachable

#: Names of vLLM that `Llm` uses, by module.
NAMES: Final = {
    "vllm.v1.engine.core": ("EngineCore.set_weight_version", "EngineCore.get_weight_version"),
    "vllm.v1.engine.core_client": ("InprocClient", "SyncMPClient.call_utility"),
    "vllm.v1.engine.llm_engine": ("LLMEngine.add_request", "LLMEngine.step"),
}
_OF_CLIENT: Final = ("resources.engine_dead", "_finalizer.alive")
#: Seconds between two checks that the engine core still runs.
_LOOK_UP_S: Final = 0.5
#: Why an `LLM` cannot be used any more.
DEAD: Final = "its engine has died, or was shut down"


class Llm:
    """The engine of an `LLM`, with the methods of `AsyncLLM` that the front end calls.

    ``stopped`` says why the engine must not generate; a request that is added, or waited for, raises that.
    """

    def __init__(self, llm: Any):
        self.vllm_config = llm.llm_engine.vllm_config
        self.stopped = ""
        self._llm = llm
        self._lock = threading.RLock()
        self._thread, self._caller = DaemonThread("weightsync-llm"), DaemonThread("weightsync-llm-call")
        self._running: tuple[str, float] | None = None
        self.engine_core = self  # as AsyncLLM has one

    def lacking(self, missing: Callable[[object, tuple[str, ...]], str]) -> str:
        """What this `LLM` lacks, said by ``missing(its client, names)``; empty if nothing."""
        return "" if self.in_one_process else missing(self._core, _OF_CLIENT)

    def lock_methods(self) -> None:
        """Have every method of `LLM` take its turn with pushes."""
        kind, engine = type(self._llm), self._llm.llm_engine
        for name, _ in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(kind, name)):
                setattr(self._llm, name, self._locked(name, getattr(self._llm, name)))
        # Requests that were enqueued before a push failed half-way are waited for by steps.
        engine.add_request = refusing(engine.add_request, lambda: self.stopped)
        engine.step = refusing(engine.step, lambda: self.stopped)

    def _locked(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def locked(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                outer, self._running = self._running, self._running or (name, time.monotonic())
                try:
                    return method(*args, **kwargs)
                finally:
                    self._running = outer

        return locked

    @property
    def busy(self) -> str:
        """The method that a push waits for; empty if none runs."""
        if (running := self._running) is None:
            return ""
        name, since = running
        return f"LLM.{name} has run for {time.monotonic() - since:.0f} s, and a push waits for its end"

    @property
    def in_one_process(self) -> bool:
        """Whether the engine core runs in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""
        from vllm.v1.engine.core_client import InprocClient

        return isinstance(self._core, InprocClient)

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core

    @property
    def errored(self) -> bool:
        """Whether the engine has died or was shut down."""
        core = self._core
        dead = not self.in_one_process and core.resources.engine_dead
        ended = getattr(core, "_finalizer", None)  # in one process since vLLM 0.32
        return bool(dead or (ended is not None and not ended.alive))

    @asynccontextmanager
    async def held(self, timeout_s: float) -> AsyncIterator[bool]:
        """Inside the context no method of `LLM` runs; false if one did not end in ``timeout_s`` seconds."""
        taken = await self._run(lambda: self._lock.acquire(timeout=timeout_s))
        try:
            yield bool(taken)
        finally:
            if taken:
                await self._run(self._lock.release)

    async def _run(self, act: Callable[[], Any]) -> Any:
        """Run ``act`` in the thread that makes all calls, so that the lock is its own."""
        return await asyncio.wrap_future(self._thread.submit(act))

    async def _call(self, act: Callable[[], Any]) -> Any:
        def locked() -> Any:
            with self._lock:
                return act()

        return await self._run(locked)

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        """Call a method of the engine core."""

        def call() -> Any:
            if not self.in_one_process:
                return self._ask(name, args)
            result = getattr(self._core.engine_core, name)(*args)
            return result.result() if isinstance(result, Future) else result

        return await self._call(call)

    def _ask(self, name: str, args: tuple[Any, ...]) -> Any:
        asked: Future[Any] = Future()
        if not self.errored:
            asked = self._caller.submit(lambda: self._core.call_utility(name, *args))
        while not self.errored and not wait([asked], _LOOK_UP_S).done:
            pass
        if not asked.done():
            raise EngineUnreachable(DEAD, weights="unknown")
        return asked.result()

    async def pause_generation(self, **kwargs: Any) -> None:
        """Pause as a user would."""
        await self.call_utility_async("pause_scheduler", *kwargs.values())

    async def reset_encoder_cache(self) -> None:
        """Drop the embeddings of the old weights."""
        await self.call_utility_async("reset_encoder_cache")

    async def update_weight_version(self, version: str) -> None:
        """Set the label of what is generated from now on."""
        await self.call_utility_async("set_weight_version", version)

    async def get_weight_version(self) -> str:
        """The label of the served weights."""
        return str(await self.call_utility_async("get_weight_version"))


def is_async(engine: Any) -> bool:
    """Whether ``engine`` is an `AsyncLLM`."""
    return hasattr(engine, "engine_core")


def is_llm(engine: Any) -> bool:
    """Whether ``engine`` is an `LLM`."""
    return hasattr(getattr(engine, "llm_engine", None), "engine_core")


def loop_of(async_llm: Any) -> asyncio.AbstractEventLoop | None:
    """The event loop in which an `AsyncLLM` runs; None if it has not run in any yet."""
    handler = async_llm.output_handler
    loop: asyncio.AbstractEventLoop | None = None if handler is None else handler.get_loop()
    return loop
