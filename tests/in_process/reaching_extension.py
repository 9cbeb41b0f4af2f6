"""A worker extension that tells of every tensor that the served model reaches."""

import torch
from vllm import _custom_ops

from tests.reached import reached
from vllm_weightsync import WorkerExtension


class ReachingExtension(WorkerExtension):
    """weightsync's, and what a test asks the workers."""

    def reached(self):
        def unpacked(item):
            """The weight that a handle stands for, in which vLLM packs it for a CPU: its product with the identity."""
            if isinstance(item, _custom_ops.CPUDNNLGEMMHandler):
                return _custom_ops.onednn_mm(item, torch.eye(item.k, dtype=self.model_config.dtype), None)
            return None

        return reached(self.get_model(), unpacked)
