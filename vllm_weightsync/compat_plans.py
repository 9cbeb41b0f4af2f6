"""As `compat`: whether vLLM keeps the weights of a model as its loader writes them, so that a load plan can write them.

vLLM packs, quantizes or transposes layers after loading. What differs from the checkpoint shows when a plan is checked;
a packed copy beside an unchanged weight would not. So only methods of layers are allowed of which it is known that they
make none.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch

from vllm_weightsync import compat, compat_models, compat_standby
from weightsync.engine.private_names import Names

#: Names used in a worker for its load plans.
NAMES: Final[Names] = {
    "vllm.model_executor.layers.linear": ("UnquantizedLinearMethod",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("UnquantizedEmbeddingMethod",),
    "vllm.model_executor.layers.attention": ("Attention",),
    "vllm.v1.attention.backend": ("AttentionImpl.process_weights_after_loading",),
}

#: By model, why no load plan loads it: vLLM decides that when it starts.
_found: Final[weakref.WeakKeyDictionary[torch.nn.Module, str]] = weakref.WeakKeyDictionary()


def why_not(worker: Any) -> str:
    """Why only vLLM's reload loads a worker's weights; empty if a load plan can."""
    model = compat.model(worker)
    if model not in _found:
        _found[model] = compat.VLLM.check(NAMES) or _changed_after_loading(model)
    return _found[model]


def _changed_after_loading(model: torch.nn.Module) -> str:
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} changes its weights after loading"
    for name, module in model.named_modules():
        if what := _change(module):
            return f"vLLM {what} after loading, and only its reload repeats that ({name or 'the model'})"
    return ""


def _change(module: Any) -> str:
    """What vLLM may do to the weights of a layer after loading; empty if nothing."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.attention.backend import AttentionImpl

    method = getattr(module, "quant_method", None)
    if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return f"calls {type(method).__name__}"
    if compat_models.packs(module):
        return "packs layers"
    if not callable(getattr(module, "process_weights_after_loading", None)):
        return ""
    made = type(getattr(module, "impl", None))
    nothing = AttentionImpl.process_weights_after_loading
    if type(module) is Attention and getattr(made, "process_weights_after_loading", None) is nothing:
        return ""
    return f"calls {type(module).__name__}.process_weights_after_loading"


@contextlib.contextmanager
def written_by_others(worker: Any) -> Iterator[None]:
    """Around what a load plan writes, or an exchange."""
    yield
    compat_standby.drop_computed(worker)
