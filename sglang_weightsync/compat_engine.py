"""SGLang's `Engine` in the trainer's process, and the event loop in which it runs.

An `Engine` that is used without coroutines runs its event loop only while one of its methods runs. A push needs it at
other times too, so a thread of ours then runs it always, and the methods of `Engine` use it from their own threads.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

from sglang_weightsync.compat import SGLANG
from weightsync.engine.in_process import refusing, run_in_thread, stop
from weightsync.errors import UnsupportedOption

#: Methods that wait for tokens, and would wait for ever in an engine that must not generate.
_GENERATE: Final = ("generate", "encode", "rerank")
_NEEDED: Final = (
    "loop.run_until_complete",
    "tokenizer_manager.event_loop",
    "tokenizer_manager.signal_handler_class",
    "server_args",
    "shutdown",
)
#: The methods of SGLang's handler of signals.
_SIGNALS: Final = {signal.SIGTERM: "sigterm_handler", signal.SIGQUIT: "running_phase_sigquit_handler"}
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


def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    """The event loop in which this engine runs, or will run."""
    users: asyncio.AbstractEventLoop | None = engine.tokenizer_manager.event_loop
    loop: asyncio.AbstractEventLoop = engine.loop if users is None else users
    return loop


def _leave_to_us(loop: asyncio.AbstractEventLoop, manager: Any) -> None:
    """Free ``loop``, which runs in one thread only, from the calling thread. Raises `UnsupportedOption`.

    A next `Engine` would use the thread's own event loop, and a loop hears signals only in the main thread.
    """
    in_main = threading.current_thread() is threading.main_thread()
    policy = asyncio.get_event_loop_policy()
    try:
        own = policy.get_event_loop() is loop
    except RuntimeError:  # this thread has none
        own = False
    if not (own or in_main):
        raise UnsupportedOption(
            "this sglang.Engine is used without coroutines: build its first sender in the thread that built the "
            "engine, or in the main thread, so that its event loop can be moved to a thread of its own"
        )
    if own:
        policy.set_event_loop(policy.new_event_loop())
    if in_main:
        loop.run_until_complete(_take_signals(manager))


async def _awaited(started: Any) -> Any:
    return await started  # an asynchronous generator's next item is not a coroutine


async def _take_signals(manager: Any) -> None:
    """Give the signals that the running loop handles to the interpreter; a uvloop gives none while it does not run."""
    loop, handler = asyncio.get_running_loop(), manager.signal_handler_class(manager)
    for number, name in _SIGNALS.items():
        if loop.remove_signal_handler(number):
            signal.signal(number, getattr(handler, name))


class Running:
    """An engine whose event loop runs. ``stopped()`` says why it must not generate; ``loop`` is its event loop."""

    def __init__(self, engine: Any):
        self.stopped: Callable[[], str] = str
        self._shut_down = False
        self.loop = loop_of(engine)
        if ours := not self.loop.is_running():
            _leave_to_us(self.loop, engine.tokenizer_manager)
            run_in_thread(self.loop)
            engine.loop = _Running(self.loop)
            for name in _GENERATE:
                setattr(engine, name, refusing(getattr(engine, name), self._reason))
        engine.shutdown = self._noticing(engine.shutdown, ours)

    def _reason(self) -> str:
        return self.stopped()

    def _noticing(self, shutdown: Callable[..., Any], ours: bool) -> Callable[..., Any]:
        @functools.wraps(shutdown)
        def noticing(*args: Any, **kwargs: Any) -> Any:
            self._shut_down = True
            try:
                return shutdown(*args, **kwargs)
            finally:
                if ours:
                    stop(self.loop)

        return noticing

    def gone(self) -> str:
        """Why the engine will not answer; empty if it may."""
        return "it was shut down" if self._shut_down else ""
