"""The one tokenizer manager of an engine, between clients and the schedulers. `compat` checks the names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from sglang_weightsync import compat, compat_config, compat_groups

#: Seconds between two rounds of aborting requests: new ones may arrive until the lock is taken.
_ABORT_AGAIN_S: Final = 0.05


class OneTokenizer:
    """See `front_end.Tokenizers`. ``closed`` is the reason why no request passes; empty if users decide."""

    several = False

    def __init__(self, server_args: Any, tokenizer_manager: Any):
        self._manager = tokenizer_manager
        self._has_stages = compat_config.has_stages(server_args)
        self._groups = compat_config.groups(server_args)
        self._pause, self._continue = tokenizer_manager.pause_generation, tokenizer_manager.continue_generation
        self._paused = False
        self.closed = ""
        tokenizer_manager.pause_generation = self._on_pause
        tokenizer_manager.continue_generation = self._on_continue

    @property
    def paused(self) -> bool:
        """Whether users want the engine paused."""
        return self._paused if self.closed else bool(self._manager.is_pause)

    async def _on_pause(self, *args: Any, **kwargs: Any) -> Any:
        self._paused = True
        return await self._pause(*args, **kwargs)

    async def _on_continue(self, *args: Any, **kwargs: Any) -> Any:
        if self.closed:
            from starlette.exceptions import HTTPException

            raise HTTPException(503, f"weightsync: {self.closed}")
        return await self._continue(*args, **kwargs)

    def close_at_start(self, why: str) -> None:
        """See `front_end.Tokenizers`."""
        self.closed, self._manager.is_pause = why, True
        compat.not_ready_from_start()

    async def close(self, why: str) -> None:
        """See `front_end.Tokenizers`; resuming is refused with ``why``."""
        self._paused, self.closed = self.paused, why
        await self._hold(True)

    async def open(self) -> None:
        """See `front_end.Tokenizers`; what users have requested meanwhile takes effect."""
        self._manager.initial_weights_loaded = True
        if self.closed:
            paused, self.closed = self._paused, ""
            await self._hold(paused)

    async def _hold(self, held: bool) -> None:
        async with self._manager.is_pause_cond:
            self._manager.is_pause = held
            self._manager.is_pause_cond.notify_all()

    def version(self) -> str:
        """See `front_end.Tokenizers`."""
        return str(self._manager.config_value("weight_version"))

    def set_version(self, version: str) -> None:
        """See `front_end.Tokenizers`."""
        self._manager._update_weight_version_if_provided(version)

    def reply_to(self) -> str:
        """See `front_end.Tokenizers`."""
        return compat_groups.reply_address(self._manager)

    async def ask(self, request: Any) -> list[Any]:
        """See `front_end.Tokenizers`."""
        self._manager.auto_create_handle_loop()
        if self._has_stages:
            self._manager.weightsync_communicator.set_fan_out(self._groups)
        replies: list[Any] = await self._manager.weightsync_communicator(request)
        return replies

    @contextlib.asynccontextmanager
    async def drained(self, *, abort: bool) -> AsyncIterator[None]:
        """See `front_end.Tokenizers`."""
        if self.paused and not self._has_stages:  # a pipeline goes on if a user pauses it
            yield
            return
        lock = self._manager.model_update_lock.writer_lock
        entering = asyncio.ensure_future(lock.__aenter__())
        try:
            while abort and not entering.done():
                self._manager.abort_request(abort_all=True)
                await asyncio.wait([entering], timeout=_ABORT_AGAIN_S)
            await asyncio.shield(entering)
        except BaseException:
            # Cancelled while waiting: leave the queue, or release the lock if it was taken at the last moment.
            if not entering.cancel() and not entering.cancelled():
                await lock.__aexit__(None, None, None)
            raise
        try:
            yield
        finally:
            await lock.__aexit__(None, None, None)
