"""SGLang's HTTP app as each of several tokenizer workers serves it: with our routes, which say why nothing is pushed.

Plugins are not loaded in these workers; they import the app from where they are told to.
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
