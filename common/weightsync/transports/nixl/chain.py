"""The ranks that pass the buckets of one push on to each other, as the trainer tells them to, see `suppliers`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from weightsync.protocol.control import PassOn, Supplied
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Peer
from weightsync.transports.control.trainer import PushSession
from weightsync.transports.nixl.suppliers import Change, Suppliers, chains


class Chain:
    """``hosts`` are those of the ranks that the trainer can write to, and that can pass buckets on.

    ``agents`` are the ranks' agents. ``hashed`` has the digest of every bucket, by the name of a subset, and ``write``
    has the trainer write to a rank, from a bucket on. Without members every rank is written to by the trainer.
    """

    def __init__(
        self,
        session: PushSession,
        plan: UpdateRequest,
        layout: Layout,
        hashed: Callable[[Mapping[str, Subset]], Callable[[int], Mapping[str, int]]],
        hosts: Mapping[Peer, str],
        agents: Mapping[Peer, str],
        write: Callable[[Peer, int], None],
    ):
        self._session, self._plan, self._layout, self._hashed = session, plan, layout, hashed
        self._hosts, self._agents, self._write = hosts, agents, write
        self._buckets = layout.buckets(plan.bucket_bytes)
        #: The memory domains that hold a part of the stream, if there are several.
        self._holding = {domain for domain in range(len(layout.table)) if layout.domain_bytes(domain)}
        self._suppliers: Suppliers | None = None
        #: The digests of a bucket of what the members need, by name.
        self._digests: Callable[[int], Mapping[str, int]] = lambda bucket: {}
        self._announced = -1
        #: The engines of ranks into whose memory, or out of which, something may be written after the push.
        self.lingering: set[str] = set()

    def form(self) -> None:
        """Decide who supplies whom, and tell them. Raises `TransferFailed` or `PushTimeout`."""
        session, plan, hosts = self._session, self._plan, self._hosts
        if plan.stream or plan.any_order or len(hosts) < 2:
            return
        session.wait(lambda: hosts.keys() - session.windows.keys(), "the ranks to offer memory to write to")
        staged = [peer for peer in hosts if session.windows[peer].slots >= self._buckets and self._is_written(peer)]
        members = ((session.needs[peer].name, hosts[peer], peer) for peer in staged)
        found = chains(members, self._buckets, max(1, len(self._holding)))
        if not found:
            return
        whole = plan.slots * plan.bucket_bytes >= self._layout.nbytes
        self._suppliers = Suppliers(found, whole, session.deadline.seconds, time.monotonic())
        if plan.digest:
            self._digests = self._hashed({session.needs[peer].name: session.needs[peer] for peer in found})
        for peer, supplier in found.items():
            self._tell(Change(peer, None, supplier))
        for peer in self._suppliers.supplied_by(None):
            session.tell(peer, Supplied(plan.push))

    def _is_written(self, peer: Peer) -> bool:
        """Whether a rank reads nothing by itself."""
        return self._holding <= set(self._session.windows[peer].domains)

    def _tell(self, change: Change) -> None:
        session, push = self._session, self._plan.push
        receiver, old, new = change
        first = session.last_taken(receiver) + 1
        if old is not None and new != old:
            session.tell(old, PassOn(push, receiver.engine, receiver.rank))
        if new is None:
            session.tell(receiver, Supplied(push))
            self._write(receiver, first)
            return
        if new != old:
            session.tell(receiver, Supplied(push, self._agents[new], str(new)))
        session.tell(new, PassOn(push, receiver.engine, receiver.rank, session.windows[receiver].handle, first))

    def is_direct(self, peer: Peer) -> bool:
        """Whether a rank gets its buckets from the trainer."""
        return self._suppliers is None or self._suppliers.of.get(peer) is None

    def late(self, missing: set[Peer]) -> set[Peer]:
        """Of the ranks that lack a bucket, those for which others wait; empty only if none lacks it."""
        return self._suppliers.late(missing) if self._suppliers is not None else missing

    def tells(self, peer: Peer) -> bool:
        """Whether a rank itself tells when it has a bucket."""
        return self._suppliers is not None and peer in self._suppliers.of

    def announced(self, bucket: int) -> Mapping[str, int]:
        """The digests of a bucket, which is filled, by the name of a subset."""
        self._announced = bucket
        return self._digests(bucket)

    def watch(self) -> None:
        """Give ranks that are stuck, or that a stuck one supplies, another supplier. Raises `TransferFailed`."""
        if self._suppliers is None:
            return
        for change in self._suppliers.changes(time.monotonic(), self._announced, self._session.last_taken):
            self._tell(change)
            self.lingering |= {peer.engine for peer in (change.receiver, change.old) if peer is not None}
