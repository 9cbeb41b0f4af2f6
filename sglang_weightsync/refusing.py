"""SGLang's HTTP app as each of several tokenizer workers serves it: with our routes, which say why nothing is pushed.

Plugins are not loaded in these workers; they import the app from where they are told to.
"""

from __future__ import annotations

from sglang_weightsync import compat, compat_config
from weightsync import security
from weightsync.errors import UnsupportedOption
from weightsync.replica import Replica
from weightsync.routes import admin_routes


def _refuse() -> Replica:
    raise UnsupportedOption(compat_config.unsupported(compat.worker_arguments()))


compat.app_routes().append(admin_routes(_refuse, security.engine_token()))
app = compat.app()
