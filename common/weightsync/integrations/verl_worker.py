"""What a rollout worker of verl is to a `Sender`: an engine that hands verified weights over to verl, see `verl`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from weightsync.engine.adapter import Adapter, Expected, LoraHooks
from weightsync.engine.expected_checkpoint import expected_of
from weightsync.engine.front_end import FrontEnd
from weightsync.engine.in_process import EngineInProcess, run_in_thread
from weightsync.engine.rank_calls import COMMIT_CALL_S, Calls, Replies, restored, settle
from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.errors import PushTimeout, TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.protocol import http
from weightsync.protocol.lockstep import Lockstep

_HOLDS_NONE: Final = "a rollout worker of verl holds no weights: ask the server"


class Handover:
    """Weights on their way from the thread that loads a push to verl's coroutine, which takes one at a time."""

    def __init__(self) -> None:
        self._pairs: queue.Queue[tuple[str, torch.Tensor] | WeightSyncError | None] = queue.Queue(1)
        self._reader: asyncio.Task[Any] | None = None
        self._left = threading.Event()
        self._complete, self._why = False, "it took no tensor"

    def give(self, name: str, tensor: torch.Tensor, timeout_s: float) -> None:
        """Wait until the one before was taken. Raises `TransferFailed`, `PushTimeout`."""
        self._put((name, tensor), timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Wait until verl has loaded all. Raises as `give`."""
        self._put(None, timeout_s)
        if not self._left.wait(timeout_s):
            raise PushTimeout(f"verl's server adapter did not finish its load within {timeout_s:g} s")
        self._check()

    def end(self, error: WeightSyncError | None) -> None:
        """Nothing more will come."""
        with contextlib.suppress(queue.Full):  # then it reads a push that was committed
            self._pairs.put_nowait(error)

    def _put(self, pair: tuple[str, torch.Tensor] | None, timeout_s: float) -> None:
        self._check()
        try:
            self._pairs.put(pair, timeout=timeout_s)
        except queue.Full:
            raise PushTimeout(f"verl's server adapter took no tensor within {timeout_s:g} s") from None
        self._check()

    def _check(self) -> None:
        if self._left.is_set() and self._why:
            raise TransferFailed(f"verl's server adapter stopped before it had loaded all tensors: {self._why}")

    async def next(self, timeout_s: float) -> tuple[str, torch.Tensor] | None:
        """The next, or None after the last. Raises what ended the push, or `PushTimeout`."""
        if self._reader is None:
            self._reader = asyncio.current_task()
            assert self._reader is not None, "verl reads in a task"
            # A generator that nobody reads any more would be told of it only once it is collected.
            self._reader.add_done_callback(self._leave)
        try:
            pair = await asyncio.to_thread(self._pairs.get, True, timeout_s)
        except queue.Empty:
            raise PushTimeout(f"the trainer's first worker was silent for {timeout_s:g} s") from None
        if isinstance(pair, WeightSyncError):
            raise pair
        self._complete = pair is None
        return pair

    def _leave(self, reader: asyncio.Task[Any]) -> None:
        error = None if reader.cancelled() else reader.exception()
        if reader.cancelled() or error is not None or not self._complete:
            self._why = "it was cancelled" if error is None else f"{type(error).__name__}: {error}"
        else:
            self._why = ""
        self._left.set()
        with contextlib.suppress(queue.Empty):  # whoever waits for its place
            self._pairs.get_nowait()


class _Adapter:
    """See `weightsync.engine.adapter.Adapter`: what loads the weights is verl's server adapter."""

    rank = 0

    def __init__(self, model: str, given: Callable[[], Handover], timeout_s: float):
        self.model, self._given, self._timeout_s = model, given, timeout_s
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def expected(self) -> Expected:
        """What a complete push consists of: the checkpoint in the model's folder."""
        return expected_of(self.model, None, torch.bfloat16)

    def loader_hooks(self) -> str:
        """Why there is no load plan."""
        return "verl's server adapter loads it"

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand over copies: the adapter collects some, while a stream keeps each for a moment only."""
        given = self._given()
        for name, tensor in weights:
            given.give(name, tensor.clone(), self._timeout_s)
        given.finish(self._timeout_s)

    def drafting(self) -> Adapter | str:
        """There is none."""
        return ""

    def lora_hooks(self) -> LoraHooks:
        """See `weightsync.engine.adapter.Adapter`."""
        raise UnsupportedOption("a rollout worker of verl takes no adapter: merge it (lora.merge=True)")

    def digest(self) -> str:
        """See `weightsync.engine.adapter.Adapter`."""
        raise UnsupportedOption(_HOLDS_NONE)

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `weightsync.engine.adapter.Adapter`."""
        raise UnsupportedOption(_HOLDS_NONE)


class _FrontEnd:
    """See `weightsync.engine.engine_front_end.EngineFrontEnd`. One thread has the calls of the worker's only rank."""

    engine, busy = "verl", ""
    waits = False
    lora = "a rollout worker of verl takes none"
    asleep: tuple[str, ...] = ()
    lockstep: Lockstep | None = None

    def __init__(self, adapter: _Adapter, engine_version: str):
        self.model, self.engine_version = adapter.model, engine_version
        self.pause_refused: dict[str, str] = {}
        self.off: dict[str, str] = {}
        self._receiver, self._version = Receiver(adapter), "none"
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="weightsync-verl")

    async def version(self) -> str:
        """Label of the weights that were handed over last."""
        return self._version

    async def call(self, method: str, payload: bytes) -> Replies:
        """See `EngineFrontEnd`."""
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(self._calls, handle, lambda: self._receiver, method, payload)]

    async def commit(self, request: http.CommitRequest, call: Calls, stopped: bool) -> http.CommitReply:
        """Hand the weights over; verl has stopped generation."""
        payload = http.to_json(request)
        try:
            settle(await call("weightsync_commit", payload, COMMIT_CALL_S))
        except WeightSyncError as error:
            raise await restored(error, call, payload) from error
        self._version = request.version
        return http.CommitReply(version=request.version, pause_s=0.0, seconds={})

    async def withdraw(self, push: str) -> None:
        """Nothing to do."""

    async def stay_stopped(self, why: str) -> None:
        """Nothing to do: verl resumes generation after an update that has succeeded."""


def engine(name: str, version: str, model: str, given: Callable[[], Handover], timeout_s: float) -> EngineInProcess:
    """The engine called ``name`` of this process: it gives each push to what ``given`` returns then.

    ``version`` is verl's; ``model`` is the folder that says what is complete; ``timeout_s`` is for the hand-over of
    each tensor.
    """
    front = _FrontEnd(_Adapter(model, given, timeout_s), version)
    return EngineInProcess(name, FrontEnd(front), run_in_thread(asyncio.new_event_loop()), str)
