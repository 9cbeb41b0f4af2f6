"""Engines that are asked by calls instead of by URL, mostly in the trainer's own process: how a sender finds them.

An engine package registers a function in the entry-point group `GROUP`, under the name of the top-level package that
the engine's class comes from. It takes the engine and returns an `AskedByCalls`, always the same for one engine.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol, TypeAlias, runtime_checkable
from urllib.parse import urlsplit

from weightsync.errors import PluginNotLoaded, UnsupportedOption
from weightsync.protocol.names import plain_url

GROUP: Final = "weightsync.engines"


class NotRunning(Exception):
    """The engine will not answer; the text says why."""


@runtime_checkable
class AskedByCalls(Protocol):
    """An engine that is asked by calls, as a sender uses it."""

    name: str
    """Stands for its URL, in results and errors."""
    of_this_process: bool
    """Whether other processes of the trainer cannot name it."""
    host: str
    """An address on the way to its ranks, from which they reach this process; empty: they are on this host."""

    def ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """The HTTP status and the body that the admin route would answer.

        Raises `NotRunning`, or `TimeoutError`, whose text is what the engine was busy with.
        """

    def check_caller(self) -> None:
        """Raise `UnsupportedOption` if the calling thread would keep the engine from answering."""


#: `AskedByCalls.host` by name, of every engine that was given in this process.
_HOSTS: Final[dict[str, str]] = {}

#: Where requests go: a normalised URL, or an engine of this process.
Target: TypeAlias = "str | AskedByCalls"


def target(engine: object) -> Target:
    """What a user gave as an engine, ready for use. Raises `UnsupportedOption`, `PluginNotLoaded`."""
    if isinstance(engine, str):
        return plain_url(engine)
    found = engine if isinstance(engine, AskedByCalls) else _find(engine)
    _HOSTS[found.name] = found.host
    return found


def name_of(where: Target) -> str:
    """The name of an engine in results and errors; its URL, if it has one."""
    return where if isinstance(where, str) else where.name


def host_of(name: str) -> str:
    """The host of an engine that a user gave, by its name; empty if that is this one."""
    return urlsplit(name).hostname or _HOSTS.get(name, "")


def is_of_engine(thing: object) -> bool:
    """Whether a package that has registered a client has made the class of ``thing``: it may be an engine."""
    return not _registered().keys().isdisjoint(_packages(thing))


@functools.cache
def _registered() -> dict[str, EntryPoint]:
    """By package. What is installed does not change, and looking it up reads files."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _packages(thing: object) -> list[str]:
    return [kind.__module__.partition(".")[0] for kind in type(thing).__mro__]


def _find(engine: object) -> AskedByCalls:
    packages = _packages(engine)
    registered = _registered()
    for package in packages:
        if package in registered:
            attached: AskedByCalls = registered[package].load()(engine)
            return attached
    if {"vllm", "sglang"} & set(packages):
        raise PluginNotLoaded(
            f"weightsync is not installed with its entry points here: `pip install` it, so that {GROUP} has "
            f"{packages[0]}"
        )
    raise UnsupportedOption(
        f"{engine!r:.200} is neither a URL nor an engine: give strings like 'http://HOST:PORT', or engines of this "
        "process (vllm.LLM, vllm.AsyncLLM, sglang.Engine), or Ray actors that hold one"
    )
