"""All errors of the package.

::

    WeightSyncError
    ├── EngineUnreachable       nothing answers at the URL
    ├── PluginNotLoaded         a server answers, but without weightsync's routes
    ├── AuthenticationFailed    the key is missing or wrong
    ├── ProtocolMismatch        the two sides speak different major versions
    ├── UnsupportedOption       the engine or its host does not support an option of the sender
    ├── SourceError             the model passed to `push` cannot be read as weights
    ├── ManifestMismatch        names, shapes or dtypes do not fit the engine's model
    ├── ManifestUnknown         the engine does not remember the manifest that the sender refers to
    ├── BaseUnknown             the engine does not have the bytes that the sender's changes refer to
    ├── EngineRestarted         the engine was restarted after the sender opened it
    ├── LeaseHeld               another trainer holds the engine's lease; the message names it
    ├── WrongState              not legal in the current state of the engine or the sender
    ├── TransferFailed          bytes did not arrive, or differ from what was announced
    │   └── DigestMismatch      a tensor differs from what the trainer held
    ├── ApplyFailed             the engine could not load the weights that it had received
    └── PushTimeout             a deadline passed (also a `TimeoutError`)

All of them carry ``weights`` and ``engines``, what the engines serve now, and ``phase`` (see `WeightSyncError`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

Weights = Literal["unchanged", "committed", "dirty", "unknown"]

#: From harmless to worst; `WeightSyncError.weights` is the worst over all engines.
SEVERITY: Final[tuple[Weights, ...]] = ("unchanged", "committed", "unknown", "dirty")


class WeightSyncError(Exception):
    """Base of all errors of this package.

    ``engines`` maps each engine URL to what the engine serves after the failure, ``weights`` is the worst of them:

    - ``"unchanged"``: the engine serves the old version, bit-identical.
    - ``"committed"``: the engine serves the pushed version.
    - ``"dirty"``: the engine holds neither version, and does not generate until a full push commits.
    - ``"unknown"``: the engine could not be asked.

    ``phase`` is what the sender was doing: ``"read"`` (the trainer's tensors), ``"prepare"``, ``"transfer"`` or
    ``"commit"`` of a push, or else the call. ``mend`` is what to try first, unless ``message`` says it. The text of the
    error has all three.
    """

    mend = "weightsync doctor URL"
    phase = ""

    def __init__(self, message: str, *, weights: Weights = "unchanged", engines: Mapping[str, Weights] | None = None):
        super().__init__(message)
        self.engines: dict[str, Weights] = dict(engines or {})
        self.weights: Weights = max([weights, *self.engines.values()], key=SEVERITY.index)

    @property
    def message(self) -> str:
        """What happened, and to whom."""
        return super().__str__()

    def __str__(self) -> str:
        if not self.phase:
            return self.message
        urls = [url for url in self.engines if "://" in url]  # engines of this process have none
        urls = [url for url in urls if url in self.message] or urls
        mend = "; ".join(part.replace("URL", urls[0]) if urls else part for part in self._mends(bool(urls)))
        return f"{self.message} [{self.phase}; try: {mend}]" if mend else f"{self.message} [{self.phase}]"

    def _mends(self, urls: bool) -> list[str]:
        return [part for part in self.mend.split("; ") if part and (urls or "URL" not in part)]

    def settle(self, engines: Mapping[str, Weights]) -> None:
        """Set ``engines`` to what each engine serves now, and ``weights`` to the worst of them."""
        self.engines = dict(engines)
        self.weights = max(engines.values(), key=SEVERITY.index)


@contextmanager
def during(phase: str) -> Iterator[None]:
    """Inside the context, an error that has no ``phase`` gets this one."""
    try:
        yield
    except WeightSyncError as error:
        error.phase = error.phase or phase
        raise


def changed_nothing(error: BaseException) -> bool:
    """Whether an engine that raised ``error`` serves what it served before; only our own errors promise that."""
    return isinstance(error, WeightSyncError) and error.weights == "unchanged"


class EngineUnreachable(WeightSyncError):
    """Nothing answers at the engine's URL."""


class PluginNotLoaded(WeightSyncError):
    """A server answers at the URL, but weightsync is not loaded in it; the message gives the start line."""


class AuthenticationFailed(WeightSyncError):
    """The engine refused the key."""


class ProtocolMismatch(WeightSyncError):
    """Sender and engine speak different major versions of the protocol; the message names both."""


class UnsupportedOption(WeightSyncError):
    """The engine, or the host it runs on, does not support what the sender was asked to do."""

    mend = ""  # the message names the option


class SourceError(WeightSyncError):
    """The object passed to `push` is not a source of weights, or cannot be read."""

    mend = ""  # the message says what can be sent


class ManifestMismatch(WeightSyncError):
    """Tensor names, shapes or dtypes do not fit the engine's model; raised before any weight changes."""

    mend = "push what save_pretrained would write, or push(..., allow_missing=...)"


class ManifestUnknown(WeightSyncError):
    """An engine does not remember the manifest that a sender refers to; the sender then sends the manifest again."""


class BaseUnknown(WeightSyncError):
    """An engine does not have the bytes that a sender's changes refer to; the sender then sends everything."""


class EngineRestarted(WeightSyncError):
    """The engine at the URL is not the instance that the sender opened; the sender opens the new one by itself."""

    mend = "push again"


class LeaseHeld(WeightSyncError):
    """Another trainer holds the engine's lease, or has taken it over; the message names the holder."""

    mend = "weightsync abort URL, if that trainer hangs"


class WrongState(WeightSyncError):
    """What was asked for is not legal in the current state of an engine or a sender; it changed nothing."""

    mend = "weightsync status URL"


class TransferFailed(WeightSyncError):
    """Bytes did not arrive at an engine rank, or differ from what was announced."""

    mend = "push again; weightsync doctor URL"


class DigestMismatch(TransferFailed):
    """A tensor in a rank's stage is not bit-identical to what the trainer held."""


class ApplyFailed(WeightSyncError):
    """An engine could not load weights that had arrived in full."""

    mend = "weightsync status URL; push again"


class PushTimeout(WeightSyncError, TimeoutError):
    """A push did not finish within ``timeout_s``; the message names the phase and what was waited for."""

    mend = "weightsync doctor URL; Sender(..., timeout_s=...)"


def named(name: str, otherwise: type[WeightSyncError] = WeightSyncError) -> type[WeightSyncError]:
    """The error class called ``name``, as the other side of a connection sent it; ``otherwise`` if there is none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, WeightSyncError) else otherwise


def joined(failed: Mapping[str, WeightSyncError], others: Mapping[str, Weights]) -> WeightSyncError:
    """One error for several failed engines, of the class of the first.

    ``failed`` maps the URLs of the engines that failed to their errors, ``others`` the remaining URLs to what those
    engines serve.
    """
    states = dict(others)
    states.update({url: error.weights for url, error in failed.items()})
    first = next(iter(failed.values()))
    combined = type(first)("; ".join(error.message for error in failed.values()), engines=states)
    combined.phase, combined.__cause__ = first.phase, first
    return combined
