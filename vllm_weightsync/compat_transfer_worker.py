"""The worker's half of `compat_transfer`, which vLLM makes in every worker and which must never be called."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightsync.errors import UnsupportedOption


class WorkerHalf(WeightTransferEngine):  # type: ignore[misc]  # vLLM has no types where this is checked
    """Refuses what reaches it: a worker alone cannot commit for all."""

    supports_draft_weight_update = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> NoReturn:
        """Raise `UnsupportedOption`, as all that follows."""
        raise UnsupportedOption(
            "this call of a weight transfer did not come from an AsyncLLM with weightsync's plugin: have VLLM_PLUGINS "
            "name weightsync in the process of the engine's client, and give an LLM itself to a Sender: Sender([llm])"
        )

    def init_transfer_engine(self, init_info: Any) -> None:
        """See `parse_init_info`."""
        self.parse_init_info({})

    def start_weight_update(self) -> None:
        """See `parse_init_info`."""
        self.parse_init_info({})

    def finish_weight_update(self) -> None:
        """See `parse_init_info`."""
        self.parse_init_info({})

    def receive_weights(self, update_info: Any) -> None:
        """See `parse_init_info`."""
        self.parse_init_info({})

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise `UnsupportedOption`: the trainer's half sends. vLLM 0.27 wants this method, no later version does."""
        raise UnsupportedOption("a worker sends nothing: use TrainerInitInfo of weightsync.integrations.vllm")

    def shutdown(self) -> None:
        """Do nothing: there is nothing to release."""
