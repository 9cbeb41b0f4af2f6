"""`weightsync doctor`: looks for everything that hinders pushes, on this host, on the engines' hosts and between them.

Takes no lease and changes nothing. What only an engine knows, it answers to the route ``diagnose``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from weightsync.protocol.diagnosis import Finding


class Place(NamedTuple):
    """What was found at ``url``, or on this host if that is empty."""

    url: str
    findings: list[Finding]

    @property
    def wrong(self) -> bool:
        """Whether anything hinders pushes."""
        return any(finding.level == "wrong" for finding in self.findings)


def _about(url: str, finding: Finding) -> Finding:
    """``finding`` with the URL of its engine in the command that mends it."""
    return msgspec.structs.replace(finding, mend=re.sub(r"\bURL\b", lambda _: url, finding.mend))


def examine(urls: Sequence[str], address: str, timeout_s: float) -> Iterator[Place]:
    """Examine this host, and each engine in ``timeout_s`` seconds; ``address`` is that of a `Sender`."""
    from weightsync.doctor import packages

    found = Place("", list(packages.findings()))
    if found.wrong:
        yield found
        return
    from weightsync.doctor import engine, host  # they load the packages

    visits = [engine.Visit(address) for _ in urls]
    known: dict[str, str] = {}
    places = [
        Place(url, [_about(url, finding) for finding in visit.findings(url, timeout_s, known)])
        for url, visit in zip(urls, visits, strict=True)
    ]
    # With engines, only the transports to them matter.
    used = {visit.transport for visit in visits} if urls else None
    yield Place("", [*found.findings, *host.findings(used)])
    yield from places
