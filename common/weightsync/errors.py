"""Every error of the package.

::

    WeightSyncError
    ├── EngineUnreachable       nothing answers at the URL
    ├── PluginNotLoaded         a server answers, without our routes or our worker extension
    ├── AuthenticationFailed    the key is missing or wrong
    ├── ProtocolMismatch        the two sides speak different major versions
    ├── UnsupportedOption       the engine or host cannot do what the sender was asked for
    ├── SourceError             the model handed to `push` cannot be read as weights
    ├── ManifestMismatch        names, shapes or dtypes do not fit the engine's model
    ├── ManifestUnknown         the engine does not remember the manifest that the sender refers to
    ├── EngineRestarted         another instance of the engine answers than the one that was opened
    ├── LeaseHeld               another trainer pushes into the engine; the message names it
    ├── WrongState              not legal in the state of the engine, or of the sender
    ├── TransferFailed          bytes did not arrive, or not as announced
    │   └── DigestMismatch      a tensor is not what the trainer held
    ├── ApplyFailed             the engine could not load what had arrived
    └── PushTimeout             a deadline passed (also a `TimeoutError`)

Every one of them carries ``weights`` and ``engines``: what the engines serve now (see `WeightSyncError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Weights = Literal["unchanged", "committed", "dirty", "unknown"]

#: From harmless to worst: `WeightSyncError.weights` is the worst over the engines.
SEVERITY: Final[tuple[Weights, ...]] = ("unchanged", "committed", "unknown", "dirty")


class WeightSyncError(Exception):
    """Base of all errors of this package.

    ``engines`` says for each engine URL what it serves after the failure, ``weights`` the worst of them:

    - ``"unchanged"``: the old version, bit-identical, serving.
    - ``"committed"``: the pushed version, serving.
    - ``"dirty"``: neither; the engine does not generate until a full push commits.
    - ``"unknown"``: the engine could not be asked.
    """

    def __init__(self, message: str, *, weights: Weights = "unchanged", engines: Mapping[str, Weights] | None = None):
        super().__init__(message)
        self.engines: dict[str, Weights] = dict(engines or {})
        self.weights: Weights = max([weights, *self.engines.values()], key=SEVERITY.index)

    def settle(self, engines: Mapping[str, Weights]) -> None:
        """Say what every engine serves, once that is known."""
        self.engines = dict(engines)
        self.weights = max(engines.values(), key=SEVERITY.index)


class EngineUnreachable(WeightSyncError):
    """Nothing answers at the engine's URL."""


class PluginNotLoaded(WeightSyncError):
    """A server answers at the URL, but weightsync is not loaded in it; the message gives the start line."""


class AuthenticationFailed(WeightSyncError):
    """The engine refused the key."""


class ProtocolMismatch(WeightSyncError):
    """Sender and engine speak different major versions of the protocol; the message names both."""


class UnsupportedOption(WeightSyncError):
    """The engine, or the place it runs at, cannot do what the sender was asked for."""


class SourceError(WeightSyncError):
    """The object handed to `push` is not a source of weights, or cannot be read."""


class ManifestMismatch(WeightSyncError):
    """Tensor names, shapes or dtypes do not fit the engine's model; raised before any weight changes."""


class ManifestUnknown(WeightSyncError):
    """An engine does not remember the manifest that a sender refers to; the sender then sends it by itself."""


class EngineRestarted(WeightSyncError):
    """The engine at the URL is not the instance that was opened; a sender opens it again by itself."""


class LeaseHeld(WeightSyncError):
    """Another trainer holds the engine's lease, or took it over; the message names the holder."""


class WrongState(WeightSyncError):
    """What was asked for is not legal in the state that an engine or a sender is in; it changed nothing."""


class TransferFailed(WeightSyncError):
    """The bytes did not arrive at an engine rank, or not as announced."""


class DigestMismatch(TransferFailed):
    """A tensor in a rank's stage is not, bit for bit, what the trainer held."""


class ApplyFailed(WeightSyncError):
    """An engine could not load weights that had arrived whole."""


class PushTimeout(WeightSyncError, TimeoutError):
    """A push did not finish within ``timeout_s``; the message names the phase and who was waited for."""


def named(name: str, otherwise: type[WeightSyncError] = WeightSyncError) -> type[WeightSyncError]:
    """The class that the other side of a connection named; ``otherwise`` for a name that is none of ours."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, WeightSyncError) else otherwise


def joined(failed: Mapping[str, WeightSyncError], others: Mapping[str, Weights]) -> WeightSyncError:
    """One error for what went wrong at several engines, with the state of each."""
    states = dict(others)
    states.update({url: error.weights for url, error in failed.items()})
    first = next(iter(failed.values()))
    one = type(first)("; ".join(str(error) for error in failed.values()), engines=states)
    one.__cause__ = first
    return one
