"""Every name of vLLM that is not documented as stable, in one place, checked at start.

Written against vLLM 0.32. If a name is gone, `check` says so in every process at start-up, and pushes are refused.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from weightsync.layout import digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

SUPPORTED: Final = "0.32"

#: module -> attributes that this package leans on.
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "vllm.config": ("set_current_vllm_config",),
    "vllm.v1.engine.async_llm": ("AsyncLLM.pause_generation", "AsyncLLM.resume_generation", "AsyncLLM.collective_rpc"),
    "vllm.v1.worker.gpu_worker": ("Worker.reload_weights",),
}


def version() -> str:
    """vLLM's version."""
    import vllm

    return str(vllm.__version__)


def missing() -> list[str]:
    """Names that this package needs and this vLLM lacks."""
    gone = []
    for module, names in _NEEDED.items():
        for name in names:
            try:
                found: Any = importlib.import_module(module)
                for part in name.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                gone.append(f"{module}.{name}")
    return gone


def check() -> str:
    """Empty, or why this vLLM cannot be served; logged once a process."""
    gone = missing()
    if not gone:
        return ""
    reason = f"weightsync needs vLLM {SUPPORTED}; vLLM {version()} lacks {', '.join(gone)}"
    logger.error(reason)
    return reason


def worker_rank(worker: Any) -> int:
    """The worker's rank among all workers of its engine."""
    return int(worker.rank)


def worker_device(worker: Any) -> torch.device:
    """Where the worker's weights live."""
    return torch.device(worker.device)


def model_config(worker: Any) -> Any:
    """The worker's model configuration."""
    return worker.vllm_config.model_config


def reload(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a whole checkpoint through vLLM's own layer-wise reload, which also repacks what was packed at start."""
    worker.reload_weights(weights_iterator=iter(weights), is_checkpoint_format=True)
    _retie_packed(worker.model_runner.get_model())


def _retie_packed(model: torch.nn.Module) -> None:
    """Give each tied layer the packed weight of the layer that was loaded.

    vLLM's reload brings a tied weight to one of its layers only. On a CPU both pack it for their own use, and an output
    layer tied to the embedding would go on computing with the old one.
    """
    loaded: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.numel() == 0 or not hasattr(module, "cpu_linear"):
            continue
        first = loaded.setdefault(weight.data_ptr(), module)
        if first is not module and first.weight.shape == weight.shape:
            module.cpu_linear = first.cpu_linear


def digest(worker: Any) -> str:
    """Hash of the weights the worker computes with, in hex."""
    return digest_of(_weights(worker.model_runner.get_model()))


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the model by name, and what packed copies of it compute."""
    for prefix, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield f"{prefix}.{name}", tensor
        if hasattr(module, "cpu_linear"):
            # The CPU back end packs linear weights into an opaque handle. Applied to the identity it gives the weight
            # back exactly: every sum has one term that is not zero.
            yield f"{prefix}.cpu_linear", _applied_to_identity(module)


@torch.inference_mode()
def _applied_to_identity(module: Any) -> torch.Tensor:
    sizes = (getattr(module, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    eye = torch.eye(next(int(size) for size in sizes if size), dtype=module.weight.dtype)
    computed: torch.Tensor = module.cpu_linear(eye, module.weight, None)
    return computed


def parallel_config(engine_client: Any) -> Any:
    """The engine's parallel configuration, as the API server knows it."""
    return engine_client.vllm_config.parallel_config


def has_prefix_cache(engine_client: Any) -> bool:
    """Whether requests can reuse each other's KV."""
    return bool(engine_client.vllm_config.cache_config.enable_prefix_caching)


def extension_class(engine_client: Any) -> type | None:
    """The worker extension that the engine was started with."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    name = parallel_config(engine_client).worker_extension_cls
    found = resolve_obj_by_qualname(name) if name else None
    return found if isinstance(found, type) else None


async def call_workers(engine_client: Any, method: str, payload: str) -> Sequence[str]:
    """Run a method of the worker extension on every worker."""
    replies: Sequence[str] = await engine_client.collective_rpc(method, args=(payload,))
    return replies
