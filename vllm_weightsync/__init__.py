"""weightsync in vLLM.

Start the server as::

    VLLM_PLUGINS=weightsync vllm serve MODEL --worker-extension-cls vllm_weightsync.WorkerExtension
"""

from __future__ import annotations

from vllm_weightsync.extension import WorkerExtension

__all__ = ["WorkerExtension", "endpoint_plugin"]


def endpoint_plugin() -> object:
    """``vllm.endpoint_plugins`` entry point, run in the API server: the routes."""
    from vllm_weightsync.routes import EndpointPlugin

    return EndpointPlugin()
