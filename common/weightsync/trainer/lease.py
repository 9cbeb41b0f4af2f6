"""Renews a sender's lease at every engine during a push, and ends the push where an engine cannot go on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from weightsync.deadline import Deadline
from weightsync.errors import EngineUnreachable, LeaseHeld, TransferFailed, WeightSyncError
from weightsync.trainer.engines import Engines

#: Seconds between two renewals of the lease during a push.
_RENEW_EVERY_S: Final = 1.0
#: Seconds to wait for the reply to a renewal. Without one, the next renewal follows.
_RENEW_S: Final = 2.0
#: One renewal in this many also asks for the status of the ranks, which costs the ranks a little time.
_ASK_RANKS_EVERY: Final = 3


@contextmanager
def renewed(engines: Engines, push: str, deadline: Deadline) -> Iterator[None]:
    """Inside the context, a thread renews the lease at every engine.

    It ends ``deadline`` if an engine is gone, is leased to another trainer, or has a rank that failed in ``push``.
    """
    ended, renewals = threading.Event(), itertools.count(1)
    # Separate clients: a request to a frozen engine may outlive this push.
    clients = [(engine, engine.client.another()) for engine in engines.by_url.values()]

    def run() -> None:
        while not ended.wait(_RENEW_EVERY_S):
            ask_ranks = next(renewals) % _ASK_RANKS_EVERY == 0
            for engine, client in clients:
                if ended.is_set() or not engine.leased:
                    continue
                try:
                    client.renew(engines.owner, Deadline(_RENEW_S))
                    for rank in client.status(Deadline(_RENEW_S)).ranks if ask_ranks else ():
                        if rank.failed == push:
                            deadline.end(TransferFailed(f"{client.url}: rank {rank.rank}: {rank.detail}"))
                except (EngineUnreachable, LeaseHeld) as error:
                    error.engines.setdefault(client.url, error.weights)
                    deadline.end(error)
                except WeightSyncError:
                    continue  # slow or busy; if it stays so, the push itself times out
        for _, client in clients:
            client.close()

    try:  # includes the start: after Ctrl-C in it, `run` would otherwise go on for ever
        engines.start(run)
        yield
    finally:
        ended.set()
