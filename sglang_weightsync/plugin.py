"""Installs the hooks in SGLang.

SGLang loads plugins in its CLI, server, scheduler and detokenizer processes, and logs their failures.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from sglang_weightsync import compat, compat_config, compat_groups, compat_lora

logger = logging.getLogger(__name__)

#: The HTTP app of several tokenizer workers.
_WORKERS_APP: Final = "sglang_weightsync.workers:app"


def install() -> None:
    """Register the message types and the hooks; SGLang calls it once in each process."""
    if reason := compat.SGLANG.check(compat.NEEDED):
        logger.error("%s; this server has no routes of weightsync", reason)
        return
    from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput
    from weightsync.engine.first_calls import make_first_calls

    make_first_calls()
    compat.hook(WeightsyncReqInput, WeightsyncReqOutput, _before_http, _add_handler, _before_sleep)
    compat_lora.hook()


def _before_http(server_args: Any, tokenizer: Any) -> None:
    if not compat_config.has_workers(server_args):
        _add_routes(server_args, tokenizer)
    elif reason := _answer_workers(server_args, tokenizer):
        logger.error("%s; this server has no routes of weightsync", reason)


def _add_routes(server_args: Any, tokenizer_manager: Any) -> None:
    from sglang_weightsync.compat_tokenizer import OneTokenizer
    from sglang_weightsync.front_end import SglangFrontEnd
    from weightsync.engine import metrics
    from weightsync.engine.front_end import FrontEnd
    from weightsync.engine.routes import HealthGuard, admin_routes
    from weightsync.protocol import auth

    front = SglangFrontEnd(server_args, OneTokenizer(server_args, tokenizer_manager))
    front.lora = compat_lora.served(server_args, tokenizer_manager)
    front_end = FrontEnd(front, metrics.of_server())
    compat.app_routes().append(admin_routes(lambda: front_end, auth.engine_token()))
    compat.app_routes().insert(0, HealthGuard(lambda: front_end))


def _answer_workers(server_args: Any, router: Any) -> str:
    """Make this process answer what the workers are asked; returns why it cannot."""
    from sglang_weightsync import compat_workers
    from sglang_weightsync.front_end import SglangFrontEnd
    from weightsync.engine import metrics, servers
    from weightsync.engine.front_end import FrontEnd

    if reason := compat_workers.lacking(router) or compat_workers.serve(_WORKERS_APP):
        option = "--tokenizer-worker-num"
        return f"{option} {server_args.tokenizer_worker_num}: {reason}, or start the engine with {option} 1"
    path = servers.meeting_point(os.getpid())
    tokenizers = compat_workers.Router(server_args, router, servers.Label(path))
    front_end = FrontEnd(SglangFrontEnd(server_args, tokenizers), metrics.of_server())
    answering = servers.answer_others(front_end, path)
    _answering.append(asyncio.run_coroutine_threadsafe(answering, compat_workers.loop_of(router)).result())
    return ""


#: Keeps the server that answers the workers.
_answering: Final[list[asyncio.Server]] = []


def _add_handler(scheduler: Any) -> None:
    from sglang_weightsync.messages import WeightsyncReqInput
    from sglang_weightsync.rank import Handler

    handler = Handler(scheduler)
    _sleeping.append(handler.before_sleep)
    compat.handle(scheduler, WeightsyncReqInput, compat_groups.replying(handler))


#: What the scheduler of this process does before its weights sleep.
_sleeping: Final[list[Callable[[], None]]] = []


def _before_sleep() -> None:
    for call in _sleeping:
        call()
