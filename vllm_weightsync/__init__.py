"""weightsync in vLLM.

Start the server as::

    VLLM_PLUGINS=weightsync vllm serve MODEL
"""

from __future__ import annotations

import logging

from vllm_weightsync.rank import WorkerExtension

__all__ = ["WorkerExtension", "endpoint_plugin", "general_plugin"]


def endpoint_plugin() -> object:
    """``vllm.endpoint_plugins`` entry point, run in the API server: the routes."""
    _show_logs()
    from vllm_weightsync.front_end import EndpointPlugin

    return EndpointPlugin()


def general_plugin() -> None:
    """``vllm.general_plugins`` entry point, run in every process: adds methods to the engine core and to workers,
    and a back end to vLLM's weight transfer.

    An exception would end the process, so a failure is logged; the routes then refuse every push.
    """
    _show_logs()
    try:
        from vllm_weightsync import compat_pause, compat_workers

        compat_workers.install()
        compat_pause.install()
    except Exception:
        logging.getLogger(__name__).exception("weightsync could not add its methods to vLLM's engine core and workers")
    try:
        from vllm_weightsync import compat_transfer

        compat_transfer.install()
    except Exception:
        logging.getLogger(__name__).exception("weightsync could not join vLLM's weight transfers; its routes work")


def _show_logs() -> None:
    """Show what weightsync logs where vLLM shows what it logs: vLLM configures no logger but its own."""
    vllm = logging.getLogger("vllm")
    for logger in (logging.getLogger("weightsync"), logging.getLogger("vllm_weightsync")):
        if vllm.handlers and not logger.hasHandlers():
            logger.handlers = list(vllm.handlers)
            logger.setLevel(vllm.level)
