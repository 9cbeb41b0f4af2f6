"""Transports by name, found through entry points; weightsync registers its own transports in the same way.

A package registers a `base.TransportSpec` with one or two entry points::

    [project.entry-points."weightsync.transports"]
    files = "my_package.files:SPEC"
    [project.entry-points."weightsync.transports.setup"]
    open_folder = "my_package.files:SPEC"

The first adds the route and rank method ``update_weights_via_files``. The second is for a transport that must be set up
before its first push: it adds a route and rank method ``open_folder``, which take the spec's ``handshake``. The package
itself is imported only when the transport is used: engines define their routes and methods from the names alone.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Final, NamedTuple

import torch

from weightsync.errors import UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.diagnosis import Finding
from weightsync.protocol.http import Handshake
from weightsync.transports.base import TransportSpec

#: Why a transport without `TransportSpec.several_hosts` is not used.
_SEVERAL: Final = "the trainer's ranks are on several hosts"
logger = logging.getLogger(__name__)

_GROUP: Final = "weightsync.transports"
_SETUP_GROUP: Final = "weightsync.transports.setup"


class _Registered(NamedTuple):
    specs: dict[str, EntryPoint]
    setups: dict[str, str]


def _registered() -> _Registered:
    return _read(tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _read(_: tuple[str, ...]) -> _Registered:
    """Read the entry points; cached for each value of ``sys.path``."""
    specs: dict[str, EntryPoint] = {}
    for point in entry_points(group=_GROUP):
        if point.name.isidentifier():
            specs.setdefault(point.name, point)  # as with imports, the first on the path wins
        else:
            logger.warning("ignoring transport %r of %s: its name is not an identifier", point.name, point.value)
    by_value = {point.value: name for name, point in specs.items()}
    setups = {
        point.name: by_value[point.value] for point in entry_points(group=_SETUP_GROUP) if point.value in by_value
    }
    return _Registered(dict(sorted(specs.items())), setups)


def names() -> tuple[str, ...]:
    """The names of all registered transports, usable in this process or not."""
    return tuple(_registered().specs)


def update_methods() -> dict[str, str]:
    """Each route (and rank method) that starts a push -> the transport that moves its bytes."""
    return {f"{http.UPDATE}{name}": name for name in names()}


def setup_methods() -> dict[str, str]:
    """Each route (and rank method) that takes a transport's handshake -> the transport."""
    return dict(_registered().setups)


def spec(name: str) -> TransportSpec:
    """The spec of a transport. Raises `UnsupportedOption` if it is not registered or cannot be imported."""
    point = _registered().specs.get(name)
    if point is None:
        raise UnsupportedOption(f"there is no transport {name}; choose one of {', '.join(names())}")
    return _load(point)


@functools.lru_cache(maxsize=64)
def _load(point: EntryPoint) -> TransportSpec:
    try:
        found = point.load()
    except Exception as error:
        raise UnsupportedOption(
            f"the transport {point.name} cannot be imported from {point.value}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, TransportSpec) or found.name != point.name:
        raise UnsupportedOption(f"{point.value} is not the TransportSpec of {point.name}")
    return found


def _specs() -> list[TransportSpec]:
    found = []
    for name in names():
        try:
            found.append(spec(name))
        except UnsupportedOption as error:
            logger.warning("%s", error)
    return found


def available() -> tuple[str, ...]:
    """The transports that can be used in this process."""
    return tuple(found.name for found in _specs() if not found.lacks())


def findings(device: torch.device, rank: int) -> Iterator[Finding]:
    """Whether each transport can be used in this process, for memory on this device; not of one that ``"auto"`` never
    picks, if it lacks something."""
    for name in names():
        try:
            found = spec(name)
        except UnsupportedOption as error:
            yield Finding(name, "wrong", str(error), "install its package again, or remove it")
            continue
        if lacks := found.lacks():
            if found.preference is None:
                continue  # nobody who has not asked for it misses it
            yield Finding(name, "note", f"{found.label} is not installed, which other transports do without", lacks)
            continue
        yield from found.findings(device, rank) or [Finding(name, "ok", f"{found.label} is installed")]


def settings() -> dict[str, str]:
    """The settings of this process's environment that the transports depend on."""
    return {name: value for found in _specs() for name, value in found.settings().items()}


def handshake_of(method: str) -> type[Handshake]:
    """The type of message that a set-up method takes. Raises `UnsupportedOption` if its transport has no handshake."""
    found = spec(setup_methods()[method])
    if found.handshake is None:
        raise UnsupportedOption(f"the transport {found.name} registers {method}, but has no handshake")
    return found.handshake


def setup_method(name: str) -> str:
    """The method that takes a transport's handshake. Raises `UnsupportedOption` if none is registered."""
    for method, transport in setup_methods().items():
        if transport == name:
            return method
    raise UnsupportedOption(f"the transport {name} has a handshake, but registers no method for it in {_SETUP_GROUP}")


def pick(asked: str, url: str, hello: http.OpenReply, several_hosts: bool = False) -> tuple[str, str]:
    """The transport to use with an engine, and why; ``asked`` is a name or ``"auto"``.

    ``several_hosts``: the trainer is on several. Raises `UnsupportedOption` if ``asked`` cannot be used, or none can.
    """
    on_engine = set(names()).intersection(*(rank.transports for rank in hello.ranks))
    if asked == "auto":
        return _best(url, hello, on_engine, several_hosts)
    if asked in names():
        place, advice = spec(asked).apart(hello)
        if place:
            others = ", ".join(f'"{found.name}"' for found in _by_preference() if found.name != asked)
            raise UnsupportedOption(f'{url} runs on {place}{advice}, or pass transport={others} or "auto"')
    if several_hosts and not spec(asked).several_hosts:
        others = ", ".join(f'"{found.name}"' for found in _by_preference() if found.several_hosts)
        raise UnsupportedOption(
            f'{asked} takes a trainer on one host, and {_SEVERAL}; pass transport={others} or "auto"'
        )
    if asked not in on_engine:
        raise UnsupportedOption(f"{url} has no transport {asked}, only {', '.join(sorted(on_engine))}")
    if lacks := spec(asked).lacks():
        raise UnsupportedOption(f"the trainer has no transport {asked}: {lacks}")
    return asked, "asked for"


def _by_preference() -> list[TransportSpec]:
    ranked = [(found.preference, found) for found in _specs() if found.preference is not None]
    return [found for _, found in sorted(ranked, key=lambda pair: pair[0])]


def _best(url: str, hello: http.OpenReply, on_engine: set[str], several_hosts: bool) -> tuple[str, str]:
    rejected: list[str] = []
    for found in _by_preference():
        if several_hosts and not found.several_hosts:
            rejected += [] if _SEVERAL in rejected else [_SEVERAL]
            continue
        place, _ = found.apart(hello)
        lacking = "the trainer" if found.lacks() else "" if found.name in on_engine else "the engine"
        if not place and not lacking:
            return found.name, ", and ".join(filter(None, (*rejected, found.reason)))
        rejected.append(place or f"{lacking} has no {found.label}")
    raise UnsupportedOption(f"no transport reaches {url}: {'; '.join(rejected)}")
