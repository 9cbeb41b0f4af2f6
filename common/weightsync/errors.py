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
    ├── EngineRestarted         the engine was restarted after the sender opened it
    ├── LeaseHeld               another trainer holds the engine's lease; the message names it
    ├── WrongState              not legal in the current state of the engine or the sender
    ├── TransferFailed          bytes did not arrive, or differ from what was announced
    │   └── DigestMismatch      a tensor differs from what the trainer held
    ├── ApplyFailed             the engine could not load the weights that it had received
    └── PushTimeout             a deadline passed (also a `TimeoutError`)

All of them carry ``weights`` and ``engines``: what the engines serve now (see `WeightSyncError`).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """

    def __init__(self, message: str, *, weights: Weights = "unchanged", engines: Mapping[str, Weights] | None = None):
        super().__init__(message)
        self.engines: dict[str, Weights] = dict(engines or {})
        self.weights: Weights = max([weights, *self.engines.values()], key=SEVERITY.index)

    def settle(self, engines: Mapping[str, Weights]) -> None:
        """Set ``engines`` to what each engine serves now, and ``weights`` to the worst of them."""
        self.engines = dict(engines)
        self.weights = max(engines.values(), key=SEVERITY.index)


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


class SourceError(WeightSyncError):
    """The object passed to `push` is not a source of weights, or cannot be read."""


class ManifestMismatch(WeightSyncError):
    """Tensor names, shapes or dtypes do not fit the engine's model; raised before any weight changes."""


class ManifestUnknown(WeightSyncError):
    """An engine does not remember the manifest that a sender refers to; the sender then sends the manifest again."""


class EngineRestarted(WeightSyncError):
    """The engine at the URL is not the instance that the sender opened; the sender opens the new one by itself."""


class LeaseHeld(WeightSyncError):
    """Another trainer holds the engine's lease, or has taken it over; the message names the holder."""


class WrongState(WeightSyncError):
    """What was asked for is not legal in the current state of an engine or a sender; it changed nothing."""


class TransferFailed(WeightSyncError):
    """Bytes did not arrive at an engine rank, or differ from what was announced."""


class DigestMismatch(TransferFailed):
    """A tensor in a rank's stage is not bit-identical to what the trainer held."""


class ApplyFailed(WeightSyncError):
    """An engine could not load weights that had arrived in full."""


class PushTimeout(WeightSyncError, TimeoutError):
    """A push did not finish within ``timeout_s``; the message names the phase and what was waited for."""


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
    combined = type(first)("; ".join(str(error) for error in failed.values()), engines=states)
    combined.__cause__ = first
    return combined
