"""SGLang's HTTP app for several tokenizer workers, with routes that refuse every push and say why.

These workers do not load plugins; they import this module's ``app`` instead.
"""

from __future__ import annotations

from sglang_weightsync import compat, compat_config
from weightsync.engine.front_end import FrontEnd
from weightsync.engine.routes import admin_routes
from weightsync.errors import UnsupportedOption
from weightsync.protocol import auth


def _refuse() -> FrontEnd:
    raise UnsupportedOption(compat_config.unsupported(compat.worker_arguments()))


compat.app_routes().append(admin_routes(_refuse, auth.engine_token()))
app = compat.app()
