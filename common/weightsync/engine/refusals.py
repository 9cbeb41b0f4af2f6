"""Messages for refused pushes and pauses, and for engines that do not generate, the same for every engine.

``option`` is the engine's own, as it was given on its command line; each sentence says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weightsync.errors import ProtocolMismatch, PushTimeout
from weightsync.protocol import http
from weightsync.protocol.http import CommitRequest

FIRST_PUSH: Final = "this engine waits for its first push"

NOT_IN_LOCKSTEP: Final = (
    "replicas of other servers, which take every step together with this one's, were not asked to commit this push: "
    "give the Sender the URLs of all servers"
)
OTHER_FAILED: Final = "a replica of another server, which takes every step together with this one's, failed to load"

#: Seconds for the reply, if the sender gives that much.
_REPLY_S: Final = 3.0


def half_way(error: BaseException) -> str:
    """Why an engine must not be resumed."""
    return f"this engine is not resumed, since a push failed half-way ({error}); push a full version"


def drain_s(request: CommitRequest) -> float:
    """Seconds that requests in flight have to finish; the rest of the sender's time is for the reply.

    An engine that is busy with many streams may take seconds for a reply.
    """
    return max(0.5 * request.timeout_s, min(0.9 * request.timeout_s, request.timeout_s - _REPLY_S))


def still_in_flight(request: CommitRequest) -> PushTimeout:
    """The error of a commit whose pause waited too long for requests in flight."""
    return PushTimeout(
        f"requests in flight did not finish within {round(drain_s(request), 1):g} s (pause={request.pause!r}); "
        "nothing was changed"
    )


def old_kv(cache: str, option: str) -> str:
    """Why an engine whose requests share KV in its ``cache``, which ``option`` turns off, lacks the pause "keep"."""
    return (
        f"requests in flight would go on with KV of the old weights, and the {cache} would hand that KV to others; "
        f"start the engine with {option}"
    )


def check_protocol(theirs: tuple[int, int]) -> None:
    """Raise `ProtocolMismatch` if the sender's major version is not that of this engine."""
    if theirs[0] != http.PROTOCOL[0]:
        raise ProtocolMismatch(
            f"the sender speaks protocol {theirs[0]}.{theirs[1]}, this engine {http.PROTOCOL[0]}.{http.PROTOCOL[1]} "
            f"(weightsync {http.package_version()}); install the same weightsync on both sides"
        )


# --- what an engine was started with


def unknown(settings: str, gone: Sequence[str]) -> str:
    """The engine lacks ``settings`` that existed in the version that this package was written against."""
    return f"{settings} {', '.join(gone)}, by which weightsync tells what it can push into"


def moving_experts(option: str) -> str:
    """Experts are rebalanced while the engine serves."""
    return f"{option}: experts change places while the engine serves; start it without this option"


def travelling_kv(option: str) -> str:
    """Prefill and decode run in different engines."""
    return f"{option}: KV of the old weights would reach an engine that has the new ones; start the engine without it"


def draft_model(option: str) -> str:
    """Not a refusal: a draft model has its own checkpoint."""
    return f"{option}: pushed with draft=, else left as it is; the pushed model decides which of its tokens are taken"
