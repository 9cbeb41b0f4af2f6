"""Helpers that several tests use."""

import gc
import sys
from unittest import mock

from weightsync import Sender
from weightsync.protocol import http
from weightsync.trainer import deltas


def served_digest(engine):
    """The digest of the weights that an engine of one rank serves."""
    with Sender([engine.url]) as sender:
        return sender.status(digest=True)[engine.url].ranks[0].digest


def keen():
    """Within it, senders of this process send what has changed whatever that costs: pushes of tests take no time."""
    return mock.patch.object(deltas.Deltas, "_against", return_value="")


def changed(weights, times):
    """Weights of which a few elements are changed, so many times."""
    for tensor in weights.values() if times else ():
        tensor.view(-1)[::97] += times
    return weights


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
