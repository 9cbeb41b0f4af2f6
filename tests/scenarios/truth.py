"""What must be true after every step; each way to break it is a kind of `Violation`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import requests

from tests.scenarios import adapters
from tests.scenarios.resources import OpenResources, left, mapped
from tests.scenarios.suspect import PATIENCE_S
from tests.scenarios.world import FIRST, Engine, World, digest_in
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.protocol import http

#: Seconds to wait for resources to go: gloo ends abandoned work five seconds after the deadline.
_SETTLE_S = 15.0


class Violation(AssertionError):
    """A broken guarantee. Hypothesis distinguishes the kinds and shrinks each."""


class WrongWeights(Violation):
    """An engine serves other weights under a label than were pushed with it."""


class UntrueReport(Violation):
    """A call or its error reported something false of an engine."""


class TooLate(Violation):
    """A call outlasted its deadline."""


class ForeignError(Violation):
    """A call raised an exception that is not a `WeightSyncError`."""


class LeftOver(Violation):
    """A resource is in use after all senders have closed."""


class NotPushable(Violation):
    """A new sender cannot push."""


class NotCaughtUp(Violation):
    """An engine was left behind without a report."""


class ServesDirty(Violation):
    """The state of an engine and its health route disagree on whether it is dirty."""


class Lag(threading.Thread):
    """Measures how late this machine is: a thread that should wake a hundred times a second adds up its delays."""

    _EVERY_S = 0.01

    def __init__(self) -> None:
        super().__init__(name="scenarios-lag", daemon=True)
        self._late_s, self._due = 0.0, time.monotonic()
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            self._due = time.monotonic() + self._EVERY_S
            time.sleep(self._EVERY_S)
            self._late_s += max(0.0, time.monotonic() - self._due)

    def total_s(self) -> float:
        """All delays so far, in seconds, the current one included."""
        return self._late_s + max(0.0, time.monotonic() - self._due)

    def close(self) -> None:
        """Stop measuring."""
        self._over.set()
        self.join()


class Claim(NamedTuple):
    """What was reported of an engine: its ``state``, "serving" or "dirty", and its label, None if unknown.

    ``adapter``: the label of its adapter, empty if it has none and None if unknown, in the ``instance`` of the engine,
    or in any.
    """

    state: str
    label: str | None
    why: str
    adapter: str | None = None
    instance: str = ""

    def denies(self, status: http.StatusReply) -> bool:
        """Whether a status shows something else."""
        adapter = None if self.instance not in ("", status.instance) else self.adapter
        dirty = status.state == "dirty"
        told = self.label in (None, status.version) and adapter in (None, adapter_of(status))
        return dirty != (self.state == "dirty") or not told


class Truth:
    """What was pushed under each label, and what was reported of each engine."""

    def __init__(self, world: World, raised: list[str]):
        self._world, self._raised = world, raised
        self._contents = {FIRST: 0}
        self._adapters = {FIRST: 0}
        self._claims: dict[int, Claim] = {}
        #: The last status of each engine, by number; None if it could not be asked.
        self.seen: dict[int, http.StatusReply | None] = dict.fromkeys(range(len(world.engines)))

    def pushed(self, label: str, content: int, lora: bool = False) -> None:
        """Note that ``label`` was pushed with ``content``, of weights or an adapter; engines may serve it from now."""
        (self._adapters if lora else self._contents)[label] = content

    def forget(self, engines: Iterable[Engine]) -> None:
        """Forget what was reported of these engines, because a call begins that may change it."""
        for engine in engines:
            self._claims.pop(engine.number, None)

    def told(
        self,
        engines: Mapping[str, str],
        label: str,
        before: Mapping[int, http.StatusReply | None],
        why: str,
        *,
        lora: bool | None = False,
    ) -> None:
        """Note by URL what a call reported of each engine that was to serve ``label``, if the label is known.

        ``lora``: it is that of an adapter, and the weights stay; None: of weights, with which adapters may come.
        """
        for engine in self._world.engines:
            said = engines.get(engine.url)
            was = before[engine.number]
            version, adapter, instance = (was.version, adapter_of(was), was.instance) if was else (None, None, "")
            if said == "committed" and lora:
                self._claims[engine.number] = Claim("serving", None, f"{why} said committed", label or None)
            elif said == "committed":
                same = None if lora is None else adapter
                self._claims[engine.number] = Claim("serving", label or None, f"{why} said committed", same, instance)
            elif said == "dirty":
                self._claims[engine.number] = Claim("dirty", None, f"{why} said dirty")
            elif said == "unchanged" and was is not None:
                self._claims[engine.number] = Claim("serving", version, f"{why} said unchanged", adapter, instance)

    def check(self) -> None:
        """Check every engine that can answer, and that no thread raised an uncaught exception."""
        if self._raised:
            raise ForeignError(f"a thread raised {self._raised.pop()}")
        for engine in self._world.engines:
            self.seen[engine.number] = None
            if not engine.alive():
                self._claims.pop(engine.number, None)
            elif not engine.still:
                self._check(engine)

    def _check(self, engine: Engine) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                status, wrong = self._look(engine)
            except (WeightSyncError, requests.RequestException) as error:
                if engine.ends():
                    return
                raise UntrueReport(f"{engine} does not say what it serves: {error}") from error
            if status.state in ("serving", "dirty", "unsynced"):
                if wrong is None:
                    break
                again = engine.client.status(Deadline(PATIENCE_S))
                if _what(again) == _what(status):
                    raise wrong
            if time.monotonic() > end:
                raise UntrueReport(f"{engine} is {status.state} for {PATIENCE_S:g} s, and nothing happens")
            time.sleep(0.01)
        self.seen[engine.number] = status

    def _look(self, engine: Engine) -> tuple[http.StatusReply, Violation | None]:
        """The status of an engine, and the violation that it shows, if any."""
        status = engine.client.status(Deadline(PATIENCE_S), digest=True)
        contents = {digest: content for content, digest in enumerate(self._world.weights.digests)}
        served = contents.get(digest_in(status))
        claim = self._claims.get(engine.number)
        dirty = status.state == "dirty"
        if not dirty and served != self._contents.get(status.version):
            holds = "no version: it is torn" if served is None else f"content {served}"
            return status, WrongWeights(
                f"{engine} is {status.state} as {status.version!r}, which was pushed with content "
                f"{self._contents.get(status.version)}; what it holds is {holds}"
            )
        if claim is not None and claim.denies(status):
            shown = f"{status.state} with {status.version!r} and adapter {adapter_of(status)!r}"
            return status, UntrueReport(f"{claim.why}; {engine} is {shown}, not {claim}")
        if not dirty and (label := adapter_of(status)):
            content = self._adapters.get(label)
            held = engine.adapter(self._world.weights, served)
            if content is None or held != content:
                return status, WrongWeights(f"{engine} has adapter {label!r} of content {content}, and holds {held}")
        code = requests.get(f"{engine.url}/health", timeout=PATIENCE_S).status_code
        if dirty != (code == 503):
            return status, ServesDirty(f"{engine} is {status.state}, and its /health answers {code}")
        return status, None


def adapter_of(status: http.StatusReply) -> str:
    """The label of the adapter that an engine serves; empty if it serves none."""
    return (status.adapters or {}).get(adapters.NAME, "")


def _what(status: http.StatusReply) -> tuple[str, ...]:
    return status.state, status.version, status.committed, adapter_of(status)


def check_nothing_left(world: World, before: OpenResources) -> None:
    """Check that without senders no more than ``before`` is in use, here, in other trainers or mapped by engines."""
    end = time.monotonic() + _SETTLE_S
    while found := [*filter(None, [left(before, world.own_files())]), *world.left_by_trainers(), *_mapped(world)]:
        if time.monotonic() > end:
            raise LeftOver("; ".join(found))
        time.sleep(0.02)


def _mapped(world: World) -> list[str]:
    """The memory of trainers that reference engines still map."""
    return [
        f"{engine} maps {path}"
        for engine in world.engines
        if world.kind == "reference" and engine.alive() and not engine.still
        for pid in engine.pids
        for path in mapped(pid, "/weightsync-", "/torch_")
    ]
