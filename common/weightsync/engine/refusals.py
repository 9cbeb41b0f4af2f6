"""Why an engine refuses a push or a pause, or does not generate: the same words for every engine.

``option`` is the engine's own, as it was given on its command line; each sentence says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from weightsync.errors import PushTimeout
from weightsync.protocol.http import CommitRequest

FIRST_PUSH: Final = "this engine waits for its first push"


def half_way(error: BaseException) -> str:
    """Why nobody may resume an engine."""
    return f"this engine is not resumed, since a push failed half-way ({error}); push a full version"


def still_in_flight(request: CommitRequest) -> PushTimeout:
    """A commit that could not begin: its pause waits for requests."""
    return PushTimeout(
        f"requests in flight did not finish within {request.timeout_s:g} s (pause={request.pause!r}); "
        "nothing was changed"
    )


def old_kv(cache: str, option: str) -> str:
    """Why an engine whose requests share KV in its ``cache``, which ``option`` turns off, lacks the pause "keep"."""
    return (
        f"requests in flight would go on with KV of the old weights, and the {cache} would hand that KV to others; "
        f"start the engine with {option}"
    )


# --- what an engine was started with


def unknown(settings: str, gone: Sequence[str]) -> str:
    """The engine's ``settings`` are not what they were in the version that this package was written against."""
    return f"{settings} {', '.join(gone)}, by which weightsync tells what it can push into"


def several_servers(option: str, count: int) -> str:
    """HTTP is served by several processes."""
    return f"{option} {count}: who may push is remembered in one server's memory; start the engine with {option} 1"


def moving_experts(option: str) -> str:
    """Experts are balanced."""
    return f"{option}: experts change their places while the engine serves; start it without"


def travelling_kv(option: str) -> str:
    """Prefill and decode are in several engines."""
    return (
        f"{option}: KV of the old weights would go to an engine with the new ones, or come from one with the old; "
        "start the engine without it"
    )


def draft_model(option: str) -> str:
    """Not refused: a draft model has a checkpoint of its own."""
    return f"{option}: a push leaves it as it is; it proposes tokens, and the pushed model decides which are taken"
