"""SGLang's groups of ranks that answer together: one for each stage of each replica. `compat` checks the names.

SGLang has only the first stage of a pipeline (``--pp-size``) answer the tokenizer manager, and stages handle a request
one after the other. So here every stage sends its own reply, and no stage waits for another while it handles a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

#: Names that engines with several stages need too, by module.
STAGES: Final = {
    "sglang.srt.managers.communicator": ("FanOutCommunicator.set_fan_out",),
    "sglang.srt.managers.scheduler_components.output_sender": ("SenderWrapper.send_output",),
    "sglang.srt.utils.network": ("get_zmq_socket",),
}


# --- in a scheduler process -------------------------------------------------------------------------------------------


def has_stages() -> bool:
    """Whether this scheduler is one of several pipeline stages."""
    return int(_parallel().pp_size) > 1


def group_of() -> int:
    """The number of this scheduler's group: by replica (``--dp-size``), then by pipeline stage."""
    parallel = _parallel()
    return int((parallel.dp_rank or 0) * parallel.pp_size + parallel.pp_rank)


def rank_of(scheduler: Any) -> int:
    """This scheduler's rank among all of its engine: by replica, pipeline stage and tensor-parallel rank."""
    return int(group_of() * scheduler.tp_group.world_size + scheduler.tp_group.rank_in_group)


def cpu_group(scheduler: Any) -> Any:
    """The gloo group of the scheduler's tensor-parallel ranks."""
    return scheduler.tp_cpu_group


def replying(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``handler``, whose reply reaches the tokenizer manager from every stage; ``request.reply_to`` is its address."""
    if _parallel().pp_rank == 0:
        return handler
    senders: dict[str, Any] = {}

    def handle(request: Any) -> None:
        import zmq
        from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
        from sglang.srt.utils.network import get_zmq_socket

        output = handler(request)
        if _parallel().tp_rank != 0:
            return
        if request.reply_to not in senders:
            socket = get_zmq_socket(zmq.Context.instance(), zmq.PUSH, request.reply_to, False)
            senders[request.reply_to] = SenderWrapper(socket)
        senders[request.reply_to].send_output(output, request)

    return handle


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


# --- in the process that serves HTTP ----------------------------------------------------------------------------------


def reply_address(tokenizer: Any) -> str:
    """The address at which a tokenizer manager, or the router of several, hears replies."""
    import zmq

    endpoint: bytes = tokenizer.recv_from_detokenizer.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.rstrip(b"\0").decode()
