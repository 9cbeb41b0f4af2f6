"""The trainer's other memory domains as rank 0 sees them: their agents, and what each is asked to send."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weightsync.deadline import Deadline
from weightsync.protocol import http
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import PeerRanks
from weightsync.transports.control.trainer import blaming
from weightsync.transports.nixl.findings import NAME
from weightsync.transports.nixl.messages import (
    Digest,
    Digested,
    EngineAgent,
    Expose,
    Exposed,
    Meet,
    NixlHandle,
    Serve,
    ToHelper,
)
from weightsync.transports.nixl.sending import packed_runs


class Receiver(NamedTuple):
    """An engine rank in a push: its agent, what it needs, the memory it offers, and the domains that write there."""

    agent: str
    needs: Subset
    handle: NixlHandle | None
    written_by: Sequence[int]


def _name(layout: DividedLayout, needs: Subset, bucket_bytes: int) -> str:
    """The name of the runs of a subset, see `messages.Serve`."""
    return f"{layout.name} {needs.name} {bucket_bytes}"


class Others:
    """The lowest rank of each memory domain but rank 0's; there are none if all ranks are in one.

    Their arenas may be ``on_gpu``. All methods raise `TransferFailed` or `PushTimeout`, and what a rank has raised.
    """

    def __init__(self, helpers: PeerRanks | None, *, on_gpu: bool):
        self._helpers, self._on_gpu = helpers, on_gpu
        #: What each said last, by rank, in order of their memory domains.
        self.exposed: dict[int, Exposed] = {}
        #: The names of the runs that each rank knows, see `messages.Serve`.
        self._known: dict[int, set[str]] = {}
        self._asked = False

    @property
    def _ranks(self) -> Sequence[int]:
        helpers = self._helpers
        return helpers.senders[1:] if helpers is not None and not helpers.in_one_domain else ()

    def expose(self, deadline: Deadline) -> None:
        """Learn their agents and arenas, which may be new."""
        self._ask(dict.fromkeys(self._ranks, Expose(self._on_gpu)))
        replies = self.finished("to make its NIXL agent", deadline)
        self.exposed = {rank: http.from_json(replies[rank], Exposed) for rank in self._ranks}

    def meet(self, ranks: Sequence[EngineAgent], deadline: Deadline) -> None:
        """Have them connect to engine ranks; `finished` waits for it."""
        self._ask(dict.fromkeys(self._ranks, Meet(tuple(ranks), deadline.left())))

    def digests(
        self, plan: UpdateRequest, layout: DividedLayout, subsets: Mapping[str, Subset], deadline: Deadline
    ) -> dict[int, dict[str, list[list[int]]]]:
        """By domain, and by the name of a subset, the digest of each run of each bucket."""
        size, asked = plan.bucket_bytes, dict[int, ToHelper]()
        names = {name: _name(layout, subset, size) for name, subset in subsets.items()}
        for domain, rank in self._holding(layout):
            new = self._unknown(rank, domain, layout, subsets, size)
            asked[rank] = Digest(plan.digest, size, layout.buckets(size), tuple(names.values()), new)
        self._ask(asked)
        replies, found = self.finished("to hash its part of every bucket", deadline), {}
        for domain, rank in self._holding(layout):
            hashed = http.from_json(replies[rank], Digested).runs
            found[domain] = {name: hashed[known] for name, known in names.items()}
        return found

    def serve(
        self,
        plan: UpdateRequest,
        layout: DividedLayout,
        receivers: Sequence[Receiver],
        deadline: Deadline,
        first: int | None = None,
    ) -> None:
        """Have each host send what it holds, from bucket ``first`` on to others than before; `finished` waits for
        that."""
        size, messages = plan.bucket_bytes, dict[int, ToHelper]()
        subsets = {one.needs.name: one.needs for one in receivers}
        for domain, rank in self._holding(layout):
            writes, reads, written = [], {}, dict[str, Subset]()
            for one in receivers:
                if domain in one.written_by and one.handle is not None:
                    writes.append((one.agent, one.handle, _name(layout, one.needs, size)))
                    written[one.needs.name] = one.needs
                else:
                    reads[one.agent] = sum(map(bool, layout.needed(domain, subsets[one.needs.name], size)))
            new = self._unknown(rank, domain, layout, written, size)
            if first is None:
                self._known[rank] = {name for *_, name in writes}
            count = layout.buckets(size)
            messages[rank] = Serve(plan.push, size, count, tuple(writes), reads, new, deadline.left(), first)
        self._ask(messages)

    def _holding(self, layout: DividedLayout) -> list[tuple[int, int]]:
        """The domains that hold a part of the stream, and the rank of each."""
        return [(domain, rank) for domain, rank in enumerate(self._ranks, 1) if layout.domain_bytes(domain)]

    def _unknown(
        self, rank: int, domain: int, layout: DividedLayout, subsets: Mapping[str, Subset], size: int
    ) -> dict[str, bytes]:
        """The runs of these subsets that a rank does not know, by name; from now on it knows them."""
        named, known = {_name(layout, one, size): one for one in subsets.values()}, self._known.setdefault(rank, set())
        new = {name: packed_runs(layout.needed(domain, one, size)) for name, one in named.items() if name not in known}
        known |= new.keys()
        return new

    def _ask(self, messages: Mapping[int, ToHelper]) -> None:
        if self._helpers is not None and messages:
            self._helpers.ask(NAME, {rank: http.to_json(message) for rank, message in messages.items()})
            self._asked = True

    def check(self) -> None:
        """Raise if one that was asked has failed or ended."""
        if self._helpers is not None and self._asked:
            self._helpers.check()

    def finished(self, to: str, deadline: Deadline) -> Mapping[int, bytes]:
        """Wait until they have done what they were asked ``to`` do; the reply of each."""
        if self._helpers is None or not self._asked:
            return {}
        replies = self._helpers.answered(to, deadline)
        self._asked = False
        return replies

    def cancelled(self) -> None:
        """Note that the push has failed: they forget what they were told."""
        self._asked = False
        self._known.clear()

    def blaming(self) -> contextlib.AbstractContextManager[None]:
        """See `control.trainer.blaming`."""
        return blaming(lambda: self._helpers if self._asked else None)
