"""Engines in lockstep, whose replicas take every step together: a push reaches all of them, or none."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.errors import UnsupportedOption
from weightsync.protocol.lockstep import Lockstep
from weightsync.trainer.engine import Engine


def in_lockstep(url: str, engines: Mapping[str, Engine]) -> dict[str, Engine]:
    """The engine at ``url`` and those in lockstep with it, of ``engines`` by URL."""
    part = engines[url].hello.lockstep
    if part is None:
        return {url: engines[url]}
    return {
        other: engine
        for other, engine in engines.items()
        if engine.hello.lockstep is not None and engine.hello.lockstep.name == part.name
    }


def check_lockstep(engines: Mapping[str, Engine]) -> None:
    """Raise `UnsupportedOption` for engines, by URL, that step with an engine which is not among them."""
    by_name: dict[str, dict[str, Lockstep]] = {}
    for url, engine in engines.items():
        if (part := engine.hello.lockstep) is not None:
            by_name.setdefault(part.name, {})[url] = part
    for members in by_name.values():
        replicas = next(iter(members.values())).replicas
        here = {part.first + number for part in members.values() for number in range(part.count)}
        if absent := sorted(set(range(replicas)) - here):
            raise UnsupportedOption(
                f"{' and '.join(members)} {'serves' if len(members) == 1 else 'serve'} some of the {replicas} replicas "
                "of a mixture of experts, which take every step together; missing are those of "
                f"replica{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}: give the Sender the URLs of all "
                "servers at once"
            )
