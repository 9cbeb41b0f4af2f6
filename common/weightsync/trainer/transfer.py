"""Trainer side: all that moves the bytes of a sender's pushes. One arena is packed, whatever carries it to whom."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.memory import arenas
from weightsync.memory.shared_parameters import InPlaceArena
from weightsync.protocol import http
from weightsync.protocol.http import Introduction, UpdateRequest
from weightsync.tensors import native_copy
from weightsync.tensors.layout import Layout
from weightsync.tensors.scattered import key
from weightsync.tensors.subset import Demand, Digests, Found
from weightsync.trainer.pack_plan import PackPlan, pack_plan
from weightsync.trainer.packing import Packer, hash_stream
from weightsync.trainer.ranks.assembly import Work
from weightsync.transports.base import Helpers, Peer, Progress, TrainerEnd
from weightsync.transports.registry import TRAINER_ENDS

Post = Callable[[Mapping[str, Introduction]], Mapping[str, http.JoinReply]]
"""Tells engines, by URL, what a transport has to say before a push; returns their replies."""


Fill = Callable[[Layout, arenas.ShmArena, tuple[str, ...], str, Demand], tuple[Found, Work]]
"""Fills an arena, given the names of all in use and the digest's; returns what was to be hashed, and what it took."""


class Sent(NamedTuple):
    """Seconds of a transfer: ``gather_s`` copying the trainer's tensors, ``digest_s`` hashing them, ``verify_s`` the
    slowest rank's checking."""

    gather_s: float
    digest_s: float
    verify_s: float


class Carrier:
    """The arenas of one sender and a trainer end for every transport in use. ``device`` is where the arenas are.

    ``helpers`` are the other ranks of the trainer, if it has any; ``address`` is what ranks dial, see `TRAINER_ENDS`.
    """

    def __init__(self, device: torch.device, helpers: Helpers | None = None, address: str = ""):
        self.device, self._helpers, self._address = device, helpers, address
        self._ends: dict[str, TrainerEnd] = {}
        #: The next push goes into the first; a second holds what is served, where engines keep that.
        self._arenas: list[arenas.Arena] = []
        self._plan: UpdateRequest | None = None
        self._layout: Layout | None = None
        self._meeting: list[TrainerEnd] = []
        #: What is to be hashed for those who came to the push.
        self._demand = Demand(())
        #: What `send` announced of a push whose stream the arena holds whole: the digests of each bucket.
        self._announced: list[Digests] = []
        #: By arena, what was packed last, and how to do so again if it was planned.
        self._packed: dict[int, tuple[tuple[object, ...], PackPlan | None, bool]] = {}
        self._served: tuple[arenas.Arena, UpdateRequest, list[Digests]] | None = None
        self.closed = False

    def free_bytes(self) -> int:
        """Memory that an arena could take, in bytes."""
        free = arenas.free_bytes(self.device) if self.device.type == "cuda" else arenas.free_shared_bytes()
        return free + sum(arena.bytes.numel() for arena in self._arenas if not isinstance(arena, InPlaceArena))

    def introduce(self, engines: Mapping[str, tuple[str, http.OpenReply]], post: Post, deadline: Deadline) -> None:
        """Make every engine ready to be pushed to; ``engines`` says by URL over what. Those that are, hear nothing.

        Raises `UnsupportedOption`, `TransferFailed`, `PushTimeout`, and what ``post`` raises.
        """
        for name in sorted({transport for transport, _ in engines.values()}):
            if name not in self._ends:
                self._ends[name] = TRAINER_ENDS[name](self.device, self._helpers, self._address)
            those = {url: hello for url, (transport, hello) in engines.items() if transport == name}
            if asked := self._ends[name].introduce(those, max(deadline.left(), 0.1)):
                self._ends[name].introduced(post(asked), deadline)

    def provide(self, plan: UpdateRequest, lent: list[torch.Tensor] | None = None) -> None:
        """Have the arenas that a push needs: those of the push before, where it has its size.

        ``lent`` are all tensors, if they are to be read where they are.
        """
        before = self._plan
        if before is None or before.manifest != plan.manifest:
            self._layout = Layout(plan.manifest)
        assert self._layout is not None, "it comes with the first plan"
        self._plan = plan
        if lent is not None:
            arena = self.lent
            if arena is not None and arena.holds(self._layout, lent):
                arena.tensors = lent
            else:
                self._free()
                self._arenas.append(InPlaceArena(self._layout, lent))
            return
        if self._served is not None and plan.push == self._served[1].push:
            return  # the arena is filled already
        self._served = None
        nbytes = plan.slots * plan.bucket_bytes
        count = 2 if plan.keep and self._layout.nbytes <= nbytes else 1
        same = len(self._arenas) == count and self._arenas[0].bytes.numel() == nbytes and self.lent is None
        if same and all(map(arenas.reachable, self._arenas)):
            return
        self._free()
        for _ in range(count):
            cuda = self.device.type == "cuda"
            self._arenas.append(arenas.CudaArena(nbytes, self.device) if cuda else arenas.ShmArena(nbytes))

    @property
    def lent(self) -> InPlaceArena | None:
        """The tensors that were read where they are in the push before."""
        arena = self._arenas[0] if self._arenas else None
        return arena if isinstance(arena, InPlaceArena) else None

    def _free(self) -> None:
        self._served = None
        self._packed.clear()
        for end in self._ends.values():
            end.forget()
        while self._arenas:
            self._arenas.pop().close()

    def dismiss(self, engine: str, transport: str) -> None:
        """An engine was told to forget this sender."""
        if transport in self._ends:
            self._ends[transport].dismiss(engine)

    def address(self, engine: str, transport: str) -> str:
        """What the engine knows this sender by; empty if it was never told."""
        return self._ends[transport].address(engine) if transport in self._ends else ""

    def request(self, engine: str, transport: str) -> UpdateRequest:
        """What an engine is to be asked for the push that memory was provided for."""
        assert self._plan is not None, "provide() comes first"
        return self._ends[transport].request(self._plan, engine)

    def meet(self, peers: Mapping[str, set[Peer]], deadline: Deadline) -> None:
        """Return once every rank, by transport, has come for the bytes. Raises `TransferFailed` or `PushTimeout`."""
        assert self._plan is not None
        assert self._layout is not None
        self._meeting = []
        first = self._served[0] if self._served is not None else self._arenas[0]
        arenas = sorted(self._arenas, key=lambda arena: arena is not first)
        for name, those in peers.items():
            self._meeting.append(self._ends[name])
            self._ends[name].meet(self._plan, self._layout, arenas, those, deadline)
        self._demand = Demand(parts for end in self._meeting for parts in end.keeps())

    def send(self, tensors: Iterable[torch.Tensor], progress: Progress | None, mark: object | None = None) -> Sent:
        """Pack and send the stream; returns once every rank has it, and verified. Raises as `meet`.

        Where ``mark``, see `Source.mark`, is that of the push before, ``tensors`` are not looked at.
        """
        assert self._plan is not None
        assert self._layout is not None
        plan = self._plan
        if self.lent is not None and not plan.digest:  # there is nothing to do with them
            self._announced = [{}] * self._layout.buckets(plan.bucket_bytes)
            return Sent(0.0, 0.0, self._announce_all(self._announced, progress))
        arena, addresses = self._arenas[0].bytes, list[int]()
        how = self._layout, arena, plan.bucket_bytes, plan.slots, plan.digest, self._demand
        known = (mark, self._layout, *how[2:5], frozenset(self._demand.names))
        before, pack, planned = self._packed.get(key(arena), ((), None, False))
        seen = mark is not None and before == known
        if seen and pack is not None:
            packer: PackPlan | Packer = pack
            filled = pack.fill(self._acquire)
        else:
            packer = Packer(*how)
            filled = packer.fill(_noted(tensors, addresses), self._acquire)
        self._announced.clear()
        for packed in filled:
            self._announce(packed.number, packed.digests)
            self._announced.append(packed.digests)
            if progress is not None:
                progress(packed.nbytes)
        sent = Sent(packer.gather_s, packer.digest_s, self._finish())
        if seen and not planned:  # worth while, for it comes again
            all_there = len(addresses) == len(self._layout.entries)
            pack = pack_plan(*how, addresses) if all_there else None
            self._packed[key(arena)] = known, pack, True
        elif not seen:
            self._packed[key(arena)] = known, None, False
        return sent

    def send_filled(self, fill: Fill, progress: Progress | None) -> Sent:
        """As `send`, of an arena that has room for all and that ``fill`` fills. Raises what it raises, too."""
        assert self._plan is not None
        assert self._layout is not None
        arena, size, layout = self._arenas[0], self._plan.bucket_bytes, self._layout
        assert layout.nbytes <= self._plan.slots * size, "the arena holds everything"
        assert isinstance(arena, arenas.ShmArena), "processes share the host's memory"
        found, work = fill(layout, arena, tuple(one.name for one in self._arenas), self._plan.digest, self._demand)
        self._announced = [{}] * layout.buckets(size)
        if self._plan.digest:
            self._announced = self._demand.by_bucket(layout, size, found)
        return Sent(work.gather_s, work.digest_s, self._announce_all(self._announced, progress))

    def again(self) -> UpdateRequest | None:
        """What was served last, as a push anew that `resend` sends; None where the arena does not hold it."""
        if self._served is None or not arenas.reachable(self._served[0]):
            return None
        arena, plan, announced = self._served
        plan = msgspec.structs.replace(plan, push=secrets.token_hex(8))
        self._served = arena, plan, announced
        return plan

    def resend(self, progress: Progress | None) -> Sent:
        """Send what lies in the arena since the push before; nothing is packed. Raises as `meet`."""
        assert self._served is not None, "again() comes first"
        assert self._layout is not None
        (arena, plan, announced), start = self._served, time.perf_counter()
        new = self._demand.without(set[str]().union(*announced))
        if plan.digest and new.names:  # they keep other parts than those it was sent to
            found = hash_stream(self._layout, arena.bytes, plan.digest, new)
            by_bucket = new.by_bucket(self._layout, plan.bucket_bytes, found)
            announced = [{**known, **more} for known, more in zip(announced, by_bucket, strict=True)]
            self._served = arena, plan, announced
        hashed_s = time.perf_counter() - start
        return Sent(0.0, hashed_s, self._announce_all(announced, progress))

    def _announce_all(self, announced: Sequence[Digests], progress: Progress | None) -> float:
        """Every bucket, of an arena that holds them all; the seconds of `_finish`."""
        assert self._plan is not None
        assert self._layout is not None
        for number, digests in enumerate(announced):
            self._announce(number, digests)
            if progress is not None:
                progress(min((number + 1) * self._plan.bucket_bytes, self._layout.nbytes))
        return self._finish()

    def _announce(self, number: int, digests: Digests) -> None:
        for end in self._meeting:
            end.announce(number, digests)

    def _finish(self) -> float:
        return max(end.finish() for end in self._meeting)

    def _acquire(self, bucket: int) -> None:
        for end in self._meeting:
            end.acquire(bucket)

    def revoke(self) -> None:
        """The trainer may write to its parameters again: ranks that still read them where they are find out."""
        if self.lent is not None:
            self.lent.revoke()

    def call_off(self, error: BaseException) -> None:
        """Tell the ranks that no more will come."""
        for end in self._meeting:
            end.call_off(error)
        self._meeting = []
        if self.lent is not None:
            self._free()

    def served(self) -> None:
        """What was sent last is served: where engines keep the version before, the next push must leave it intact."""
        self._meeting = []
        if self._served is not None:
            return  # it was served to others before
        assert self._plan is not None
        assert self._layout is not None
        whole = self._layout.nbytes <= self._plan.slots * self._plan.bucket_bytes and not self._plan.stream
        if whole and self.lent is None:  # what is the trainer's own it changes
            self._served = self._arenas[0], self._plan, list(self._announced)
        self._arenas.reverse()

    def rolled_back(self) -> None:
        """The version before is what is served."""
        self._served = None
        self._arenas.reverse()

    def close(self) -> None:
        """Release everything; idempotent."""
        self.closed = True
        self._free()
        while self._ends:
            self._ends.popitem()[1].close()
        native_copy.release()


def _noted(tensors: Iterable[torch.Tensor], addresses: list[int]) -> Iterator[torch.Tensor]:
    """The tensors; the addresses of those that lie in host memory in one piece are noted."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg():
            addresses.append(tensor.data_ptr())
        yield tensor
