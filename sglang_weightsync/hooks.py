"""Where SGLang is hooked; imports SGLang.

SGLang loads this in its CLI, server, scheduler and detokenizer processes, and logs failures without stopping.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_weightsync import compat

logger = logging.getLogger(__name__)


def place() -> None:
    """Register the message types and the hooks; idempotent within a process, as SGLang calls it once."""
    if reason := compat.check():
        logger.error("%s; its routes are absent", reason)
        return
    from sglang.srt.managers import io_struct, tokenizer_control_mixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput

    io_struct.hook_custom_types(WeightsyncReqInput, WeightsyncReqOutput)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("weightsync", WeightsyncReqOutput))
    HookRegistry.register(compat.HTTP_SETUP, _add_routes, HookType.BEFORE)
    HookRegistry.register(compat.SCHEDULER_SETUP, _add_handler, HookType.AFTER)


def _add_routes(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    from sglang_weightsync.front_end import SglangFrontEnd
    from weightsync import security
    from weightsync.routes import admin_routes

    front = SglangFrontEnd(server_args, tokenizer_manager)
    app.router.routes.append(admin_routes(lambda: front, security.engine_token()))


def _add_handler(result: Any, scheduler: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    from sglang_weightsync.handler import Handler
    from sglang_weightsync.messages import WeightsyncReqInput

    scheduler._request_dispatcher += TypeBasedDispatcher([(WeightsyncReqInput, Handler(scheduler))])
