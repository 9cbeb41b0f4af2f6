"""Has SGLang start with a hybrid model on any CPU: without the kernels of linear attention, which need AMX.

It cannot generate then, as it cannot with latent attention, but it loads the model, and takes pushes. Whenever it is
asked for its digest, each rank writes what its model reaches to the folder REACHED.
"""

import json
import os
from pathlib import Path

from tests import after_import


def _without_kernels(module):
    module.attn_backend_wrapper = lambda runner, backend: backend


def _telling(module):
    digest = module.digest

    def telling(runner):
        import torch

        from tests.reached import reached

        Path(os.environ["REACHED"], str(torch.distributed.get_rank())).write_text(json.dumps(reached(runner.model)))
        return digest(runner)

    module.digest = telling


after_import.change(
    {
        "sglang.srt.layers.attention.attention_registry": _without_kernels,
        "sglang_weightsync.compat_loading": _telling,
    }
)
