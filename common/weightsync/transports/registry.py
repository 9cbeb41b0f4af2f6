"""The transports, by name, as installed packages register them; this one's are registered in the same way.

A package registers a `base.TransportSpec` by entry points of two groups, both of which name it::

    [project.entry-points."weightsync.transports"]
    files = "my_package.files:SPEC"
    [project.entry-points."weightsync.transports.setup"]
    open_folder = "my_package.files:SPEC"

The first makes the route and rank method ``update_weights_via_files``. The second, for a transport with something to
set up before the first push, makes one more of that name, which is sent the spec's ``handshake``. Nothing of the
package is imported for that: engines make their routes and methods before they know who will use them.
"""

from __future__ import annotations

import functools
import logging
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Final, NamedTuple

from weightsync.errors import UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.http import Handshake
from weightsync.transports.base import TransportSpec

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
    """What packages on the path register; it is read once for every path."""
    specs: dict[str, EntryPoint] = {}
    for point in entry_points(group=_GROUP):
        if point.name.isidentifier():
            specs.setdefault(point.name, point)  # as with imports, the first on the path
        else:
            logger.warning("the transport %r of %s is left out: its name is no identifier", point.name, point.value)
    by_value = {point.value: name for name, point in specs.items()}
    setups = {
        point.name: by_value[point.value] for point in entry_points(group=_SETUP_GROUP) if point.value in by_value
    }
    return _Registered(dict(sorted(specs.items())), setups)


def names() -> tuple[str, ...]:
    """All transports that are registered, whether they can be used here or not."""
    return tuple(_registered().specs)


def update_methods() -> dict[str, str]:
    """The method, and route, that announces a push -> by which transport its bytes come."""
    return {f"{http.UPDATE}{name}": name for name in names()}


def setup_methods() -> dict[str, str]:
    """The method, and route, that a transport's handshake goes to -> the transport."""
    return dict(_registered().setups)


def spec(name: str) -> TransportSpec:
    """A transport. Raises `UnsupportedOption` where there is none of this name, or it cannot be imported."""
    point = _registered().specs.get(name)
    if point is None:
        raise UnsupportedOption(f"there is no transport {name}, only {', '.join(names())}")
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
    """The transports that this process has what it needs for."""
    return tuple(found.name for found in _specs() if not found.lacks())


def settings() -> dict[str, str]:
    """What of this process's environment the transports depend on."""
    return {name: value for found in _specs() for name, value in found.settings().items()}


def handshake_of(method: str) -> type[Handshake]:
    """What a set-up method is sent. Raises `UnsupportedOption`."""
    found = spec(setup_methods()[method])
    if found.handshake is None:
        raise UnsupportedOption(f"the transport {found.name} registers {method}, but has no handshake")
    return found.handshake


def setup_method(name: str) -> str:
    """Where the handshake of a transport goes to. Raises `UnsupportedOption` where it has not registered that."""
    for method, transport in setup_methods().items():
        if transport == name:
            return method
    raise UnsupportedOption(f"the transport {name} has a handshake, but registers no method for it in {_SETUP_GROUP}")


def pick(asked: str, url: str, hello: http.OpenReply) -> tuple[str, str]:
    """The transport to an engine, and why that one. Raises `UnsupportedOption` where the one asked for cannot be."""
    there = set(names()).intersection(*(rank.transports for rank in hello.ranks))
    if asked == "auto":
        return _best(url, hello, there)
    if asked in names():
        place, advice = spec(asked).apart(hello)
        if place:
            others = ", ".join(f'"{found.name}"' for found in _by_preference() if found.name != asked)
            raise UnsupportedOption(f'{url} runs on {place}{advice}, or pass transport={others} or "auto"')
    if asked not in there:
        raise UnsupportedOption(f"{url} has no transport {asked}, only {', '.join(sorted(there))}")
    if lacks := spec(asked).lacks():
        raise UnsupportedOption(f"the trainer has no transport {asked}: {lacks}")
    return asked, "asked for"


def _by_preference() -> list[TransportSpec]:
    ranked = [(found.preference, found) for found in _specs() if found.preference is not None]
    return [found for _, found in sorted(ranked, key=lambda pair: pair[0])]


def _best(url: str, hello: http.OpenReply, there: set[str]) -> tuple[str, str]:
    passed: list[str] = []
    for found in _by_preference():
        place, _ = found.apart(hello)
        side = "the trainer" if found.lacks() else "" if found.name in there else "the engine"
        if not place and not side:
            return found.name, ", and ".join(filter(None, (*passed, found.reason)))
        passed.append(place or f"{side} has no {found.label}")
    raise UnsupportedOption(f"no transport leads to {url}: {'; '.join(passed)}")
