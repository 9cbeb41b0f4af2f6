"""The memory domains of a trainer of several processes, and their arenas, as rank 0 knows them.

All processes of a host write into one arena in its memory. On GPUs each process has an arena of its own, on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from weightsync.deadline import Deadline
from weightsync.memory.arenas import Arena
from weightsync.protocol.handles import Handle, ShmHandle
from weightsync.tensors.boxes import Box
from weightsync.tensors.domains import divide
from weightsync.tensors.layout import Layout, Table
from weightsync.trainer.ranks.assignment import Plan
from weightsync.trainer.ranks.messages import Lend, Provide, Replies, ToRank


class _Provided(NamedTuple):
    """An arena of another domain; its handle if it is in host memory, where any process can use that."""

    nbytes: int
    handle: ShmHandle | None


class Domains:
    """The domains of ``size`` ranks: at first all ranks are on one host. ``send`` and ``replies`` as in `Offers`."""

    def __init__(self, size: int, send: Callable[[int, ToRank], None], replies: Replies):
        self._send, self._replies = send, replies
        #: The number of each rank's host, and of its domain, in order of their lowest ranks.
        self.host_of = [0] * size
        self.of = self.host_of
        #: Whether each process is a domain.
        self.apart = False
        #: The last plan that was divided, and its table.
        self._divided: tuple[Plan, Table] | None = None
        #: By domain, and by the name of rank 0's arena.
        self._provided: dict[tuple[int, str], _Provided] = {}

    def on(self, hosts: Sequence[str]) -> None:
        """Note the host of each rank."""
        first = list(dict.fromkeys(hosts))
        self.host_of = [first.index(host) for host in hosts]
        self.separate(self.apart)

    def separate(self, apart: bool) -> None:
        """From now on each process is a domain, if ``apart``; otherwise each host is one."""
        self.apart, self._divided = apart, None
        self.of = list(range(len(self.host_of))) if apart else self.host_of

    @property
    def lowest(self) -> list[int]:
        """The lowest rank of each domain."""
        return [self.of.index(domain) for domain in range(max(self.of) + 1)]

    def divided(self, split: Plan) -> Table:
        """What each domain provides of a plan; empty if rank 0's provides all."""
        if not any(self.of):
            return ()
        if self._divided is not None and self._divided[0] is split:
            return self._divided[1]
        held: list[list[tuple[int, Box]]] = [[] for _ in self.lowest]
        for rank, pieces in enumerate(split.pieces):
            held[self.of[rank]] += [(piece.tensor, piece.part) for piece in pieces]
        self._divided = split, divide(held)
        return self._divided[1]

    def provide(self, arena: Arena, layout: Layout, alive: tuple[str, ...], deadline: Deadline) -> None:
        """Have each other domain that holds a part of the stream make an arena for it, unless it has.

        ``alive`` names the arenas that are in use. Raises as `Coordinator.fill`.
        """
        sizes = {domain: layout.domain_bytes(domain) for domain in range(1, len(layout.table))}
        self._provided = {
            (domain, name): known
            for (domain, name), known in self._provided.items()
            if name in alive and (name != arena.name or known.nbytes == sizes.get(domain))
        }
        asked = {
            self.of.index(domain): domain
            for domain, nbytes in sizes.items()
            if nbytes and (domain, arena.name) not in self._provided
        }
        for rank, domain in asked.items():
            self._send(rank, Provide(arena.name, sizes[domain], alive, self.apart))
        for rank, done in self._replies("to make an arena for what it holds", deadline, list(asked)).items():
            self._provided[asked[rank], arena.name] = _Provided(sizes[asked[rank]], done.handle)

    def handles(self, arena: str, layout: Layout) -> dict[int, ShmHandle | None]:
        """Of each other domain that holds a part of the stream: what its ranks map, if any rank has to."""
        held = (domain for domain in range(1, len(layout.table)) if layout.domain_bytes(domain))
        return {domain: self._provided[domain, arena].handle for domain in held}

    def lends(self, arena: str) -> bool:
        """Whether other domains provide arenas beside this one."""
        return any(name == arena for _, name in self._provided)

    def lend(self, arena: str, deadline: Deadline) -> list[Handle | None]:
        """Of each other domain, a handle of its arena for one engine rank; None if it provides nothing. Raises as
        `provide`."""
        lowest = self.lowest
        known = [self._provided.get((domain, arena)) for domain in range(1, len(lowest))]
        asked = [lowest[domain] for domain, one in enumerate(known, 1) if one is not None and one.handle is None]
        for rank in asked:
            self._send(rank, Lend(arena))
        lent = self._replies("to share its arena", deadline, asked)
        found: list[Handle | None] = []
        for rank, one in zip(lowest[1:], known, strict=True):
            found.append(None if one is None else lent[rank].lent if rank in lent else one.handle)
        return found

    def forget(self) -> None:
        """Note that the call failed: every rank has released its arenas."""
        self._provided.clear()
