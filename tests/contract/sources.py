"""Stand-ins for a trainer's other ranks: threads here; `tests.sharded` uses processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

from weightsync.errors import TransferFailed
from weightsync.memory import arenas
from weightsync.tensors.layout import ALIGN_BYTES, align
from weightsync.tensors.subset import Wanted
from weightsync.trainer.packing import Packer, hash_stream
from weightsync.trainer.ranks.assembly import Work
from weightsync.transports import registry


class Sources:
    """`base.PeerRanks` whose arena rank 0 fills by itself, because it has all tensors here."""

    def __init__(self, transport, size):
        make = registry.spec(transport).rank_helper
        self.senders, self.filled, self.addresses = range(size), False, frozenset()
        self.in_one_domain = True
        self._helpers = [make(rank) for rank in range(1, size)]
        # Like a trainer's other ranks, each helper serves one request at a time.
        self._threads = [ThreadPoolExecutor(1) for _ in self._helpers]
        self._stream, self._jobs, self._over = None, [], threading.Event()
        #: How many requests each helper received.
        self.asked = 0

    def fill(self, tensors, deadline, layout, arena, alive, algorithm, demand):
        size = max(ALIGN_BYTES, align(layout.nbytes))
        packer = Packer(layout, arena.bytes, size, 1, "", Wanted(()))
        for _ in packer.fill(tensors, lambda _: None):
            pass
        self._stream, self.filled = arenas.attach(arena.handle())[: layout.nbytes], True
        found = hash_stream(layout, arena.bytes, algorithm, demand) if algorithm else {}
        return found, Work((), layout.payload_bytes, packer.gather_s, 0.0)

    def ask(self, transport, messages):
        self.asked += 1
        self._over.set()
        self._over = over = threading.Event()

        def check():
            if over.is_set():
                raise TransferFailed("rank 0 waits no more")

        self._jobs = [
            self._threads[rank - 1].submit(self._helpers[rank - 1].help, message, self._stream, check)
            for rank, message in messages.items()
        ]

    def answered(self, to, deadline):
        for job in self._jobs:
            job.result(deadline.left())

    def check(self):
        for job in self._jobs:
            if job.done():
                job.result()

    def blamed(self, error):
        return error

    def close(self):
        self._over.set()
        for thread in self._threads:
            thread.shutdown()
        self._stream = None
        for one in self._helpers:
            one.close()
