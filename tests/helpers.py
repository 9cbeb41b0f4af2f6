"""What several tests make."""

import gc
import sys

from weightsync.protocol import http


def plan_of(push, layout, bucket_bytes, timeout_s=20.0, **more):
    """What a sender would announce, before its transport adds the address; digests included."""
    manifest = tuple(entry.spec for entry in layout.entries)
    more = {"verify": "digest", "digest": "xxh3_64", **more}
    return http.UpdateRequest(
        push=push, address="", secret="", bucket_bytes=bucket_bytes, timeout_s=timeout_s, manifest=manifest, **more
    )


def calls_of(run):
    """Python calls and calls of C functions from Python that ``run`` makes."""
    counted = []
    gc.disable()  # Hypothesis is called when garbage is collected
    sys.setprofile(lambda frame, event, argument: counted.append(event) if event.endswith("call") else None)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(counted)
