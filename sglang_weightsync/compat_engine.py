"""SGLang's `Engine` in the trainer's process, and the event loop in which it runs.

An `Engine` that is used without coroutines runs its event loop only while one of its methods runs. A push needs it at
other times too, so a thread of ours then runs it always, and the methods of `Engine` use it from their own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Final

from sglang_weightsync.compat import SGLANG
from weightsync.engine.in_process import run_in_thread

#: Methods that wait for tokens, and would wait for ever in an engine that must not generate.
_GENERATE: Final = ("generate", "encode", "rerank")
_NEEDED: Final = ("loop.run_until_complete", "tokenizer_manager.event_loop", "server_args", "shutdown")
_COMMUNICATOR: Final = "weightsync_communicator"


def lacking(engine: Any) -> str:
    """What this engine lacks; empty if nothing."""
    return SGLANG.check_object(engine, _NEEDED)


def is_engine(engine: Any) -> bool:
    """Whether ``engine`` is an `Engine`."""
    return hasattr(engine, "tokenizer_manager")


def has_plugin(engine: Any) -> bool:
    """Whether SGLang loaded this package when it started the engine."""
    return hasattr(engine.tokenizer_manager, _COMMUNICATOR)


class _Running:
    """Stands for an engine's event loop, which runs in a thread of ours."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop

    def run_until_complete(self, started: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, for a method of `Engine`."""
        return asyncio.run_coroutine_threadsafe(_awaited(started), self._loop).result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def _leave_to_us(loop: asyncio.AbstractEventLoop) -> None:
    """Give the calling thread another event loop if it would use this one: a loop runs in one thread only."""
    policy = asyncio.get_event_loop_policy()
    with contextlib.suppress(RuntimeError):  # this thread has none
        if policy.get_event_loop() is loop:
            policy.set_event_loop(policy.new_event_loop())


async def _awaited(started: Any) -> Any:
    return await started  # an asynchronous generator's next item is not a coroutine


class Running:
    """An engine whose event loop runs. ``stopped()`` says why it must not generate; ``loop`` is its event loop."""

    def __init__(self, engine: Any):
        self.stopped: Callable[[], str] = str
        self._shut_down = False
        users = engine.tokenizer_manager.event_loop
        self.loop: asyncio.AbstractEventLoop = engine.loop if users is None else users
        if not self.loop.is_running():
            _leave_to_us(self.loop)
            run_in_thread(self.loop)
            engine.loop = _Running(self.loop)
            for name in _GENERATE:
                setattr(engine, name, self._refusing(getattr(engine, name)))
        engine.shutdown = self._noticing(engine.shutdown)

    def _refusing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def refusing(*args: Any, **kwargs: Any) -> Any:
            if reason := self.stopped():
                raise RuntimeError(f"weightsync: {reason}")
            return method(*args, **kwargs)

        return refusing

    def _noticing(self, shutdown: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(shutdown)
        def noticing(*args: Any, **kwargs: Any) -> Any:
            self._shut_down = True
            return shutdown(*args, **kwargs)

        return noticing

    def gone(self) -> str:
        """Why the engine will not answer; empty if it may."""
        return "it was shut down" if self._shut_down else ""
