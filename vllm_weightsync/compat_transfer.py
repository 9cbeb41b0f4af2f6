"""vLLM's registry of weight transfers: ``--weight-transfer-config '{"backend": "weightsync"}'``.

vLLM passes the calls of a weight transfer on to every worker. With this back end the front end answers them, in the
process of the engine's client: *start* touches nothing, *update* prepares a push or asks something, *finish* commits.
So a push has the same guarantees as by the admin routes. The trainer's half is `weightsync.integrations.vllm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from weightsync.engine.relayed import Relay
from weightsync.protocol import auth

BACKEND: Final = "weightsync"
#: Names of vLLM that are used here, by module.
NAMES: Final = {
    "vllm.distributed.weight_transfer.factory": ("WeightTransferEngineFactory.register_engine",),
    "vllm.v1.engine.async_llm": (
        "AsyncLLM.init_weight_transfer_engine",
        "AsyncLLM.start_weight_update",
        "AsyncLLM.update_weights",
        "AsyncLLM.finish_weight_update",
    ),
}
#: The calls that carry a message, and the field that it is in.
_CARRYING: Final = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}
_FINISH: Final = "finish_weight_update"
#: The others; the last one is there since vLLM 0.32.
_EMPTY: Final = ("start_weight_update", "shutdown_weight_transfer_engine")
#: An attribute of an engine's client, see `give`.
_RELAY: Final = "_weightsync_relay"
#: An attribute of a method that is answered here.
_OURS: Final = "_weightsync_answered"


def is_chosen(client: Any) -> bool:
    """Whether the engine of this client was started with this back end."""
    config = client.vllm_config.weight_transfer_config
    return config is not None and config.backend == BACKEND


def give(client: Any, relay: Callable[[], Relay]) -> None:
    """Have ``relay()`` answer the calls of an API server's client."""
    setattr(client, _RELAY, functools.cache(relay))


def install() -> None:
    """Register the back end, and answer the calls of `AsyncLLM`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.async_llm import AsyncLLM

    with contextlib.suppress(ValueError):  # it is registered: plugins may be loaded more than once
        WeightTransferEngineFactory.register_engine(BACKEND, "vllm_weightsync.compat_transfer_worker", "WorkerHalf")
    for call in (*_CARRYING, *_EMPTY, _FINISH):
        method = getattr(AsyncLLM, call, None)
        if method is not None and not hasattr(method, _OURS):
            setattr(AsyncLLM, call, _answered(call, method))


async def _attached(client: Any) -> Relay:
    """The relay of an `AsyncLLM` that no API server serves."""
    from vllm_weightsync import in_process  # loads the front end, which no worker needs

    found = await asyncio.to_thread(in_process.attach, client)
    return Relay(found.front_end, auth.engine_token())


def _answered(call: str, method: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(method)
    async def answered(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_chosen(self):
            return await method(self, *args, **kwargs)
        if call in _EMPTY:
            return None
        if not hasattr(self, _RELAY):
            found = await _attached(self)
            if not hasattr(self, _RELAY):  # another call may have been first
                give(self, lambda: found)
        relay: Relay = getattr(self, _RELAY)()
        asked = next(iter((*args, *kwargs.values())), None)
        if call != _FINISH:
            return await relay.take(getattr(asked, _CARRYING[call]))
        # A label must not be shown for weights that were not committed.
        if await relay.finish() and asked is not None:
            await self.update_weight_version(asked)
        return None

    setattr(answered, _OURS, True)
    return answered
