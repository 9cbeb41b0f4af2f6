"""A rank of a trainer other than rank 0: it does what rank 0 asks for, see `coordinator`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.errors import (
    PushTimeout,
    SourceError,
    TransferFailed,
    Weights,
)
from weightsync.memory import arenas, cuda_ipc, shared_parameters
from weightsync.memory.shared_parameters import SharedParameters
from weightsync.protocol import codec, http
from weightsync.protocol.handles import Handle, ShmHandle
from weightsync.sources.iterator import IteratorSource
from weightsync.tensors.held import HeldShards
from weightsync.tensors.scattered import Scattered, Stream
from weightsync.trainer.ranks import assembly
from weightsync.trainer.ranks.assembly import HashPart, Orders, Work
from weightsync.trainer.ranks.control import FollowerControl
from weightsync.trainer.ranks.conversation import GRACE_S, Act, Ranks
from weightsync.trainer.ranks.in_place import Pieces, lasting, tensors_of
from weightsync.trainer.ranks.messages import (
    Asked,
    Assist,
    Compare,
    Fill,
    Greeting,
    Hash,
    Iterate,
    Lend,
    Outcome,
    Provide,
    Release,
    Share,
    Shared,
    ToRank,
    Welcome,
    WorkDone,
    as_exception,
    remote_error_of,
)
from weightsync.trainer.reading import Reading
from weightsync.transports import registry
from weightsync.transports.base import RankHelper

_T = TypeVar("_T")


class Follower(Ranks):
    """The role of ``rank``, which is not 0, in a trainer of several processes."""

    def __init__(self, group: str, options: Mapping[str, str], rank: int):
        super().__init__(options)
        self._control = FollowerControl(group, rank)
        self._rank = rank
        #: What rank 0 knows that this rank holds, the orders that it sent last, and the mapped arenas by rank 0's name.
        self._known: tuple[HeldShards, ...] | None = None
        self._orders: Orders | None = None
        self._arenas: dict[str, tuple[ShmHandle | None, torch.Tensor]] = {}
        #: Those of them that this rank has made for its domain.
        self._own: dict[str, arenas.ShmArena | arenas.CudaArena] = {}
        self._filling: tuple[Stream, str] | None = None
        #: What this rank was last told to offer, and to hash of that; and what it offers engines to read in place.
        self._pieces: Pieces = ()
        self._to_hash: tuple[HashPart, ...] = ()
        self._shared: SharedParameters | None = None
        #: Whether that is in this call.
        self._shares = False
        self._helpers: dict[str, RankHelper] = {}

    def _take_part(
        self,
        what: str,
        kind: Any,
        deadline: Deadline,
        failure: Exception | None,
        act: Act[_T],
        engines: Callable[[Deadline], Mapping[str, Weights]],
        reading: Reading,
    ) -> _T:
        until, nonce, name = deadline.extended(GRACE_S), secrets.token_hex(8), self._greeting_name(self._rank)
        held = self._source.held if self._source is not None else None
        greeting = Greeting(
            nonce,
            what,
            os.getpid(),
            arenas.host_id(),
            arenas.processes_id(),
            deadline.moment,
            None if held == self._known else held,
            remote_error_of(failure) if failure is not None else None,
            {} if self._session else self._options,
            deadline.left(),
            "" if self._session else self._control.address(),
            "" if self._session else cuda_ipc.uuid_here(),
        )
        self._shares = False
        self._known, known = None, held if held is not None else self._known
        self._control.forget(0)  # the outcome of an earlier call, which came too late
        self._control.send(name, http.to_json(greeting))
        number, last = 1, name
        try:
            while True:
                down = {0: f"{nonce}/down/{number}"}
                bodies: dict[int, bytes] = {}
                self._control.take(down, bodies, until, f"to {what}")
                message: ToRank = codec.json_decoder(ToRank).decode(bodies[0])
                if isinstance(message, Outcome):
                    if message.failure is not None:
                        self._let_go()
                        raise as_exception(message.failure) from failure
                    self._known = known
                    if not self._shares:
                        self._revoke()
                    result: _T = codec.json_decoder(kind).decode(message.result)
                    return result
                if isinstance(message, Welcome):
                    self._session = message.session
                    if message.space == arenas.processes_id():
                        self._control.pids[0] = message.pid
                else:
                    last = f"{nonce}/up/{number}"
                    after = f"{nonce}/down/{number + 1}"
                    done, failure = self._attempt(message, reading, lambda: self._interrupted(after))  # noqa: B023 - called here
                    done = msgspec.structs.replace(done, left_s=deadline.left())
                    self._control.send(last, http.to_json(done))
                number += 1
        except BaseException as error:
            self._revoke()  # before the caller may change them
            self._control.withdraw(last)
            if isinstance(error, (PushTimeout, TransferFailed)) and not error.engines:
                error.weights = "unknown"  # only rank 0 knows
            raise

    def _interrupted(self, after: str) -> bool:
        """See `base.RankHelper.help`."""
        if self._control.is_here(0, after):
            return True
        if self._control.ended(0):
            raise TransferFailed(f"{self._control.describe([0])}: it was to finish the push")
        return False

    def _attempt(
        self,
        message: Asked,
        reading: Reading,
        interrupted: Callable[[], bool],
    ) -> tuple[WorkDone, Exception | None]:
        try:
            return self._done(message, reading, interrupted), None
        except Exception as error:
            return WorkDone(failure=remote_error_of(error)), error

    def _done(self, message: Asked, reading: Reading, interrupted: Callable[[], bool]) -> WorkDone:
        if isinstance(message, Assist):
            return WorkDone(body=msgspec.Raw(self._help(message, interrupted) or b"null"))
        if isinstance(message, Provide):
            return WorkDone(handle=self._provide(message))
        if isinstance(message, Lend):
            return WorkDone(lent=self._lend(message))
        if isinstance(message, Share):
            return WorkDone(shared=reading.run(lambda: self._share(message)))
        if isinstance(message, Release):
            reading.finish()
        elif isinstance(message, Iterate):
            reading.run(self._iterate)
        else:
            return WorkDone(reading.run(lambda: self._work(message)))
        return WorkDone()

    def _help(self, message: Assist, interrupted: Callable[[], bool]) -> bytes | None:
        if message.transport not in self._helpers:
            make = registry.spec(message.transport).rank_helper
            if make is None:
                raise TransferFailed(f"in the transport {message.transport} only rank 0 of a trainer sends")
            self._helpers[message.transport] = make(self._rank)
        stream = self._filling[0] if self._filling is not None else None
        assert not isinstance(stream, Scattered), "nothing helps a push that is read in place"
        try:
            return self._helpers[message.transport].help(bytes(message.body), stream, interrupted)
        except (RuntimeError, OSError) as error:
            raise TransferFailed(f"it could not help {message.transport}: {error}") from error

    def _iterate(self) -> None:
        if not isinstance(self._source, IteratorSource):
            raise SourceError("rank 0 pushes an iterator, and this rank does not; give every rank one")
        self._source.drain()

    def _share(self, message: Share) -> Shared:
        assert self._source is not None, "only a push shares"
        self._drop_others(())
        self._filling = None
        self._pieces = message.pieces if message.pieces is not None else self._pieces
        source, found = self._source, None
        if lasting(source):
            device = self._device(on_gpu=message.on_gpu)
            found = shared_parameters.find(tensors_of(source, self._pieces), device, self._shared)
        if found is None:
            self._revoke()
            return Shared()
        arenas.synchronize(source.device)
        self._shares = True
        if self._shared is None or not self._shared.holds(self._pieces, found):
            self._revoke()
            self._shared = SharedParameters(self._pieces, found)
        self._shared.tensors = found
        self._filling = self._shared.bytes, ""
        known = message.on_gpu or self._shared.name == message.known
        return Shared(self._shared.name, None if known else self._shared.handle())

    def _device(self, *, on_gpu: bool) -> torch.device:
        """That of arenas."""
        gpu = cuda_ipc.gpu_here() if on_gpu else None
        return gpu if gpu is not None else torch.device("cpu")

    def _revoke(self) -> None:
        """Engines that still read what this rank offers will notice, and not serve it."""
        if self._shared is not None:
            self._shared.close()
            self._shared = self._filling = None

    def _provide(self, message: Provide) -> ShmHandle | None:
        self._revoke()
        self._drop_others(message.alive)
        self._filling = None
        if message.arena in self._own:  # of another size
            self._drop(message.arena)
        own = self._own[message.arena] = arenas.make(message.nbytes, self._device(on_gpu=message.on_gpu), in_part=True)
        handle = own.handle() if isinstance(own, arenas.ShmArena) else None
        self._arenas[message.arena] = handle, own.bytes
        self._filling = own.bytes, ""
        return handle

    def _lend(self, message: Lend) -> Handle:
        lent = self._own.get(message.arena, self._shared)
        if lent is None:
            raise TransferFailed(f"trainer rank {self._rank} provides nothing any more; push again")
        return lent.handle()

    def _let_go(self) -> None:
        """Unmap all arenas: the next push has others, for which there may be no memory beside these."""
        self._revoke()
        self._filling = None
        self._drop_others(())

    def _drop_others(self, alive: Sequence[str]) -> None:
        for name in self._arenas.keys() - set(alive):
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._arenas.pop(name)
        if name in self._own:
            for helper in self._helpers.values():
                helper.forget()
            self._own.pop(name).close()

    def _work(self, message: Fill | Hash | Compare) -> Work:
        if isinstance(message, Compare):
            assert self._source is not None, "only a push compares"
            return assembly.hash_copies(self._source, message.copies, message.algorithm)
        if isinstance(message, Fill):
            self._revoke()
            self._drop_others(message.alive)
            handle, name = message.handle, message.arena
            if name not in self._arenas or self._arenas[name][0] != handle:
                if name in self._own:  # its domain provides nothing any more
                    self._drop(name)
                nothing = torch.empty(0, dtype=torch.uint8)
                self._arenas[name] = handle, nothing if handle is None else arenas.attach(handle, in_part=True)
            self._orders = message.orders if message.orders is not None else self._orders
            self._filling = self._arenas[name][1], message.algorithm
        assert self._filling is not None, "Fill, with the arena, or Share is sent first"
        if isinstance(message, Hash) and message.algorithm:
            self._to_hash = message.parts if message.parts is not None else self._to_hash
            return assembly.hash_parts(self._to_hash, self._filling[0], message.algorithm)
        assert self._orders is not None, "the first Fill has the orders"
        stream, algorithm = self._filling
        if isinstance(message, Hash):
            return assembly.hash_parts(self._orders.hash, stream, algorithm)
        assert self._source is not None, "only a push sends Fill"
        assert not isinstance(stream, Scattered), "Fill brings an arena"
        return assembly.write(self._source, self._orders.write, stream, algorithm)

    def close(self) -> None:
        """Release memory and connection; idempotent."""
        self._let_go()
        while self._helpers:
            self._helpers.popitem()[1].close()
        self._control.close()
