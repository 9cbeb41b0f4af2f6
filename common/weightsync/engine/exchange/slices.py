"""Work on a model in slices between the steps of an engine.

The work runs in a thread of its own, but only while the engine's loop waits for it in `Sliced.advance`. It stops at the
first torch function after a slice has ended. What is set for a whole process, such as torch's default dtype, is set for
the work when a slice begins, and as the engine had it when the slice ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from weightsync.errors import WrongState
from weightsync.uncollected import uncollected

_R = TypeVar("_R")

#: Seconds of one slice.
SLICE_S: Final = 0.02
#: Seconds between two looks whether work that has not stopped in time has done so.
_LOOK_UP_S: Final = 0.001
#: Seconds that an engine without anything else to do waits for what goes on beside it.
_BESIDE_S: Final = 0.005
#: Seconds in one piece for work that is cancelled.
_CANCEL_S: Final = 60.0
#: Functions of torch that use nothing but their arguments. One that takes longer than a slice goes on beside the
#: engine; the work stops after it.
_ALONE: Final = frozenset(
    (torch.Tensor.copy_, torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.to, torch.clone)
)


#: ``sliced``: the work that this thread does.
_here: Final = threading.local()


def stop_if_over() -> None:
    """Let work stop here if its slice is over, as at a function of torch. In any other thread this does nothing."""
    if (sliced := getattr(_here, "sliced", None)) is not None:
        sliced.stop_if_over()


def within() -> bool:
    """Whether this thread does work in slices."""
    return getattr(_here, "sliced", None) is not None


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """For something that uses nothing of the engine's: if its slice ends meanwhile, it goes on beside the engine.

    It may only stop at `stop_if_over`, which then just looks whether the work is cancelled.
    """
    if (sliced := getattr(_here, "sliced", None)) is None:
        yield
    else:
        with sliced.beside():
            yield


def stop() -> None:
    """Let work go on in the next slice."""
    _here.sliced.wait()


class Setting(NamedTuple):
    """Something that is set for a whole process."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


#: What torch itself has of these, beside the random state of an accelerator.
TORCH: Final = (
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    Setting(torch.get_rng_state, torch.set_rng_state),
)


#: A collection of garbage reads every object of the process, which takes longer than a slice: there is none within one.
_COLLECT: Final = Setting(lambda: gc.collect, functools.partial(setattr, gc, "collect"))

#: Held in a slice. A process may have several engines, each with a loop of its own: without it, one would take what
#: another has set for its slice for what the process had before.
_in_slice: Final = threading.Lock()


class Unfinished(WrongState):
    """A slice of the work is done: ask again at once."""


class Cancelled(BaseException):
    """Raised once in work that is cancelled. No `Exception`: nothing in an engine's loader should catch it."""


class Sliced(Generic[_R]):
    """``work``, to be run in slices. All methods belong to the engine's loop.

    ``settings`` are kept apart for the work; it begins with their values at the first slice. ``around`` makes the
    context of each slice.
    """

    def __init__(
        self,
        work: Callable[[], _R],
        settings: Sequence[Setting] = TORCH,
        around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ):
        self._work, self._settings, self._around = work, (*settings, _COLLECT), around
        self._inside: list[Any] | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        #: Guards the two below: whether the thread may go on beside the engine, and whether it does.
        self._lock = threading.Lock()
        self._alone = self._left = False
        self._end = 0.0
        self._thread: threading.Thread | None = None
        self._cancelled = self._told = self._ended = False
        self._result: list[_R] = []
        self._error: BaseException | None = None
        #: Seconds in which the engine stood still for the longest slice; the longest call that could not be
        #: interrupted and did not go on alone, with its seconds, and these.
        self.longest_s, self.longest_call, self.call_s = 0.0, "", 0.0

    def advance(self, seconds: float) -> bool:
        """Let the work go on for ``seconds``; returns whether it has ended. Raises what the work raised."""
        start = time.perf_counter()
        if not self._ended:
            self._advance(start, seconds)
            self.longest_s = max(self.longest_s, time.perf_counter() - start)
        if self._error is not None:
            raise self._error
        return self._ended

    def result(self) -> _R:
        """What the work returned, once `advance` has returned True."""
        return self._result[0]

    @property
    def stood_still(self) -> str:
        """The longest call, if it took longer than a slice; else empty."""
        return self.longest_call if self.call_s > SLICE_S else ""

    def cancel(self) -> None:
        """End the work: `Cancelled` is raised in it, and what it does about that is waited for."""
        if self._thread is None:
            self._ended = True
        self._cancelled = True
        while not self._ended:
            self._advance(time.perf_counter(), _CANCEL_S)

    def _advance(self, start: float, seconds: float) -> None:
        if self._left:
            if not self._back.acquire(timeout=min(seconds, _BESIDE_S)):
                return  # it still goes on beside the engine
            self._left = False
        with _in_slice, self._around(), uncollected(), self._set():
            self._end = start + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weightsync-standby", daemon=True)
                self._thread.start()
            self._go.release()
            left_s = seconds
            while not self._back.acquire(timeout=max(left_s, _LOOK_UP_S)):
                if not self._thread.is_alive():  # it could not even say that it ends
                    self._ended, self._error = True, self._error or RuntimeError("the thread of the work has ended")
                    break
                with self._lock:
                    if self._alone:
                        self._left = True
                        break
                left_s = self._end - time.perf_counter()
        if self._ended:
            self._thread.join()  # until then its frames hold what it worked on, also from the garbage collector

    @contextlib.contextmanager
    def _set(self) -> Iterator[None]:
        outside = [setting.get() for setting in self._settings]
        for setting, value in zip(self._settings, self._inside or (), strict=False):
            setting.set(value)
        try:
            yield
        finally:
            self._inside = [setting.get() for setting in self._settings]
            for setting, value in zip(self._settings, outside, strict=True):
                setting.set(value)

    # --- in the thread of the work

    def _run(self) -> None:
        self._go.acquire()
        try:
            with contextlib.suppress(OSError):  # then it uses the cores of the thread that started it
                _use_all_cores()
            gc.collect = _collect_nothing
            _here.sliced = self
            with _Calls(self):
                self._result.append(self._work())
        except BaseException as error:
            self._error = None if isinstance(error, Cancelled) else error
        finally:
            self._ended = True
            self._back.release()

    def stop_if_over(self) -> None:
        """Wait for the next slice if this one is over. Raises `Cancelled`, once."""
        if self._alone:
            self._look_up()
        elif time.perf_counter() >= self._end and not _imports():
            self.wait()

    def wait(self) -> None:
        """Wait for the next slice. Raises as `stop_if_over`."""
        self._back.release()
        self._go.acquire()
        self._look_up()

    def _look_up(self) -> None:
        if self._cancelled and not self._told:
            self._told = True
            raise Cancelled

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch, after which the work stops if its slice ended meanwhile."""
        if self._alone:
            return function(*args, **kwargs)
        self.stop_if_over()
        if function in _ALONE or isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            with self.beside():
                return function(*args, **kwargs)
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took_s = time.perf_counter() - start
            if took_s > self.call_s:
                name, self.call_s = getattr(function, "__name__", str(function)), took_s
                self.longest_call = f"{took_s:.3f} s in {name}"

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """See the function `beside`."""
        if self._alone:
            yield
            return
        self._alone = True
        try:
            yield
        finally:
            with self._lock:
                self._alone, left = False, self._left
            if left:
                self.wait()


class Steps(Generic[_R]):
    """As `Sliced`, for work that yields wherever it may stop, and sets nothing for the process."""

    stood_still = ""  # each is short

    def __init__(self, work: Generator[None, None, _R]):
        self._work, self._result = work, list[_R]()

    def advance(self, seconds: float) -> bool:
        """See `Sliced.advance`."""
        end = time.perf_counter() + seconds
        while not self._result:
            try:
                next(self._work)
            except StopIteration as ended:
                self._result.append(ended.value)
            if time.perf_counter() >= end:
                break
        return bool(self._result)

    def result(self) -> _R:
        """See `Sliced.result`."""
        return self._result[0]

    def cancel(self) -> None:
        """End the work where it is."""
        self._work.close()


def _collect_nothing(generation: int = 2) -> int:
    """In the place of `gc.collect`."""
    return 0


def _use_all_cores() -> None:
    """Let this thread, and those that compute for it, use every core of this process: an engine binds each of its own
    threads to one core, and a new thread inherits that of the thread that starts it."""
    cores: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            cores |= os.sched_getaffinity(int(task.name))
    os.sched_setaffinity(0, cores)


def _imports() -> bool:
    """Whether this thread imports a module: it must not wait then, because others may wait for the module."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


class _Calls(TorchFunctionMode):
    """Passes every function of torch that the work calls to `Sliced.call`."""

    def __init__(self, sliced: Sliced[Any]):
        super().__init__()
        self._sliced = sliced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._sliced.call(func, args, kwargs or {})
