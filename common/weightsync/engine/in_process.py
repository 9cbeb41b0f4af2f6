"""An engine in the trainer's own process: its front end without HTTP and without a key."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, TypeVar

import msgspec

from weightsync.engine import answers
from weightsync.engine.front_end import FrontEnd
from weightsync.errors import UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.in_process import NotRunning

_T = TypeVar("_T")

#: Seconds between two checks that an engine that does not answer still runs.
_LOOK_UP_S: Final = 0.5
#: The attributes of an engine that hold its `EngineInProcess`, so that all senders use one front end, and a lock.
_ATTRIBUTE: Final = "_weightsync_in_process"
_LOCK: Final = "_weightsync_lock"
_ENDED: Final = "its event loop does not run"
_numbers = itertools.count(1)


def run_in_thread(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """Run ``loop`` in a thread of its own, until it is stopped or the process ends; returns when it runs."""
    runs = threading.Event()
    threading.Thread(target=_run, args=(loop, runs), name="weightsync-engine-loop", daemon=True).start()
    runs.wait()
    return loop


def _run(loop: asyncio.AbstractEventLoop, runs: threading.Event) -> None:
    loop.call_soon(runs.set)
    loop.run_forever()
    loop.run_until_complete(asyncio.sleep(0))  # begins a request that came as the loop ended
    # More than once: a cancelled request may call the ranks to clean up.
    while tasks := asyncio.all_tasks(loop):
        loop.run_until_complete(_cancel(tasks))
    loop.close()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def stop(loop: asyncio.AbstractEventLoop) -> None:
    """End a loop that `run_in_thread` started; idempotent."""
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


def refusing(method: Callable[..., Any], stopped: Callable[[], str]) -> Callable[..., Any]:
    """``method``, which raises what ``stopped`` returns while the engine must not generate."""

    @functools.wraps(method)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if reason := stopped():
            raise RuntimeError(f"weightsync: {reason}")
        return method(*args, **kwargs)

    return refused


def check_thread(name: str, loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise `UnsupportedOption` if the calling thread runs ``loop``, the event loop of the engine called ``name``."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if running is loop:
        raise UnsupportedOption(
            f"{name} runs in the event loop of this very thread, so it could not answer: call the sender in another "
            "one, as in `await asyncio.to_thread(sender.push, model)`"
        )


class EngineInProcess:
    """See `weightsync.protocol.in_process.AskedByCalls`.

    ``loop`` is the running event loop in which ``front_end`` lives, and ``gone()`` says why the engine does not run, if
    it does not.
    """

    of_this_process, host = True, ""

    def __init__(self, name: str, front_end: FrontEnd, loop: asyncio.AbstractEventLoop, gone: Callable[[], str]):
        self.name = name
        self.front_end = front_end
        self._loop, self._gone = loop, gone
        self._routes = answers.routes()

    def run(self, started: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the engine's loop. Raises `UnsupportedOption` as `check_caller` does."""
        try:
            self.check_caller()
        except UnsupportedOption:
            started.close()
            raise
        return asyncio.run_coroutine_threadsafe(started, self._loop).result()

    def ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """See `weightsync.protocol.in_process.AskedByCalls`."""

        async def read(kind: type[msgspec.Struct]) -> msgspec.Struct:
            return answers.decoded(body, kind)

        if route not in self._routes:
            return 404, http.to_json(http.ErrorReply(error="PluginNotLoaded", message=f"there is no route {route}"))
        self._check()
        asked = answers.answer(route, self._routes[route], lambda: self.front_end, read)
        try:
            reply = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # it was closed just now
            asked.close()
            raise NotRunning(self._gone() or _ENDED) from None
        left_s = timeout_s
        while True:
            try:
                return reply.result(min(left_s, _LOOK_UP_S))
            except CancelledError:
                raise NotRunning(self._gone() or _ENDED) from None
            except (FutureTimeout, TimeoutError):  # one class from Python 3.11 on
                left_s -= _LOOK_UP_S
                if left_s <= 0:
                    # It goes on: what it has begun in the engine, a commit for example, must not be left half-way.
                    raise TimeoutError(self.front_end.front.busy) from None
                try:
                    self._check()
                except NotRunning:
                    if self._loop.is_closed():
                        asked.close()  # it came too late to begin
                    raise

    def _check(self) -> None:
        if reason := self._gone():
            raise NotRunning(reason)
        if self._loop.is_closed() or not self._loop.is_running():
            raise NotRunning(_ENDED)

    def check_caller(self) -> None:
        """See `weightsync.protocol.in_process.AskedByCalls`."""
        check_thread(self.name, self._loop)


def attached(engine: object, make: Callable[[str], EngineInProcess]) -> EngineInProcess:
    """The one client of ``engine``; the first time ``make(name)`` makes it."""
    with vars(engine).setdefault(_LOCK, threading.Lock()):
        found: EngineInProcess | None = getattr(engine, _ATTRIBUTE, None)
        if found is None:
            kind = type(engine)
            found = make(f"{kind.__module__.partition('.')[0]}.{kind.__name__}#{next(_numbers)}")
            setattr(engine, _ATTRIBUTE, found)
        return found
