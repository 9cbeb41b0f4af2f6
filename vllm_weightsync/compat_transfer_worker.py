"""The worker's half of `compat_transfer`, which vLLM makes in every worker and which must never be called."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightsync.errors import UnsupportedOption


class WorkerHalf(WeightTransferEngine):  # type: ignore[misc]  # vLLM has no types where this is checked
    """Refuses what reaches it: a worker alone cannot commit for all."""

    supports_draft_weight_update = False

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsupportedOption(
            "this call of a weight transfer did not come from an AsyncLLM with weightsync's plugin: have VLLM_PLUGINS "
            "name weightsync in the process of the engine's client, and give an LLM itself to a Sender: Sender([llm])"
        )

    parse_init_info = init_transfer_engine = start_weight_update = finish_weight_update = receive_weights = _refuse
    #: vLLM 0.27 wants it, no later version does.
    trainer_send_weights = _refuse

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""
