"""A worker extension that tells of every tensor that the served model reaches."""

import torch
from vllm import _custom_ops

from tests.reached import reached
from vllm_weightsync import WorkerExtension


class ReachingExtension(WorkerExtension):
    """weightsync's, and what a test asks the workers."""

    def reached(self):
        def unpacked(handle):
            """The weight, which vLLM packs for a CPU: its product with the identity."""
            return _custom_ops.onednn_mm(handle, torch.eye(handle.k, dtype=self.model_config.dtype), None)

        return reached(self.get_model(), _custom_ops.CPUDNNLGEMMHandler, unpacked)
