"""SGLang's HTTP app in each of several tokenizer workers, which pass on what they are asked to the main process.

These workers do not load plugins; they import this module's ``app`` instead.
"""

from __future__ import annotations

import os

from sglang_weightsync import compat, compat_workers
from weightsync.engine import servers
from weightsync.engine.routes import HealthGuard, admin_routes
from weightsync.protocol import auth

_path = servers.meeting_point(os.getppid())
_elsewhere = servers.Elsewhere(_path)
compat_workers.follow(_elsewhere, _path)
compat.app_routes().append(admin_routes(lambda: _elsewhere, auth.engine_token()))
compat.app_routes().insert(0, HealthGuard(lambda: _elsewhere))
app = compat.app()
