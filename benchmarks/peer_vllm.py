"""A vLLM worker extension that adds vLLM's own reload, timed inside the worker, to compare with.

For ``--worker-extension-cls peer_vllm.BenchExtension`` with this folder on PYTHONPATH. Its methods are called through
vLLM's ``/collective_rpc`` route, which passes strings.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm_weightsync import WorkerExtension

_ATTRIBUTE = "_weightsync_bench_sets"


class BenchExtension(WorkerExtension):
    """The extension of weightsync, and two methods of the benchmark."""

    def weightsync_bench_hold(self: Any, *folders: str) -> str:
        """Read a checkpoint from each folder into this worker's private memory; returns their number."""
        from safetensors.torch import load_file

        self.__dict__[_ATTRIBUTE] = [
            [(name, value.clone()) for name, value in load_file(Path(folder) / "model.safetensors").items()]
            for folder in folders
        ]
        return str(len(folders))

    def weightsync_bench_reload(self: Any, index: str) -> str:
        """Reload from the checkpoint with this index, which `weightsync_bench_hold` has read; returns seconds."""
        weights = self.__dict__[_ATTRIBUTE][int(index)]
        start = time.perf_counter()
        self.reload_weights(weights_iterator=iter(weights), is_checkpoint_format=True)
        return repr(time.perf_counter() - start)
