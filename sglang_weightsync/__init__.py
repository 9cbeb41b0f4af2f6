"""weightsync in SGLang.

Start the server as::

    SGLANG_PLUGINS=weightsync python -m sglang.launch_server --model-path MODEL
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """``sglang.srt.plugins`` entry point, run in every SGLang process: installs the hooks."""
    from sglang_weightsync import plugin

    plugin.install()
