"""Runs a push in the background, and reads the tensors in the thread that asked for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from weightsync import observe
from weightsync.daemon_thread import DaemonThread
from weightsync.trainer.reading import HandedReading
from weightsync.trainer.results import PushFuture, PushResult

logger = logging.getLogger(__name__)


def in_background(push: Callable[[HandedReading], PushResult]) -> PushFuture:
    """Run ``push`` in a thread; return once the tensors were read, as it says by its argument."""
    reading, future = HandedReading(), PushFuture()

    def run() -> PushResult:
        try:
            return push(reading)
        except Exception as error:
            logger.warning("push_async failed: %s: %s", type(error).__name__, error)
            raise
        finally:
            reading.finish()

    thread = DaemonThread("weightsync-push")
    thread.submit(observe.carried(run), future)
    thread.close()
    reading.serve()
    future.in_place = reading.how == "in place"
    return future
