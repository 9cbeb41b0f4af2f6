"""Installs the hooks in SGLang.

SGLang loads plugins in its CLI, server, scheduler and detokenizer processes, and logs their failures.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_weightsync import compat, compat_groups

logger = logging.getLogger(__name__)


def install() -> None:
    """Register the message types and the hooks; SGLang calls it once in each process."""
    if reason := compat.SGLANG.check(compat.NEEDED):
        logger.error("%s; this server has no routes of weightsync", reason)
        return
    from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput
    from weightsync.engine.first_calls import make_first_calls

    make_first_calls()
    compat.hook(WeightsyncReqInput, WeightsyncReqOutput, _add_routes, _add_handler)


def _add_routes(server_args: Any, tokenizer_manager: Any) -> None:
    from sglang_weightsync.front_end import SglangFrontEnd
    from weightsync.engine.front_end import FrontEnd
    from weightsync.engine.routes import HealthGuard, admin_routes
    from weightsync.protocol import auth

    if compat.serve_by_workers(server_args, "sglang_weightsync.refusing:app"):
        return
    front_end = FrontEnd(SglangFrontEnd(server_args, tokenizer_manager))
    compat.app_routes().append(admin_routes(lambda: front_end, auth.engine_token()))
    compat.app_routes().insert(0, HealthGuard(lambda: front_end))


def _add_handler(scheduler: Any) -> None:
    from sglang_weightsync.messages import WeightsyncReqInput
    from sglang_weightsync.rank import Handler

    compat.handle(scheduler, WeightsyncReqInput, compat_groups.replying(Handler(scheduler)))
