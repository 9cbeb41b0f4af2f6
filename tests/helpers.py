"""Helpers that several tests use."""

import gc
import sys

from weightsync import Sender
from weightsync.protocol import http


def served_digest(engine):
    """The digest of the weights that an engine of one rank serves."""
    with Sender([engine.url]) as sender:
        return sender.status(digest=True)[engine.url].ranks[0].digest


def plan_of(push, layout, bucket_bytes, timeout_s=20.0, **more):
    """The request that a sender would announce, with digests, before its transport adds the address."""
    manifest = tuple(entry.spec for entry in layout.entries)
    more = {"verify": "digest", "digest": "xxh3_64", **more}
    return http.UpdateRequest(
        push=push, address="", secret="", bucket_bytes=bucket_bytes, timeout_s=timeout_s, manifest=manifest, **more
    )


def calls_of(run):
    """The number of calls that ``run`` makes, of Python functions and of C functions from Python."""
    counted = []
    gc.disable()  # Hypothesis hooks garbage collection
    sys.setprofile(lambda frame, event, argument: counted.append(event) if event.endswith("call") else None)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(counted)
