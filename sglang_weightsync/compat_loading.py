"""Loading weights into SGLang's models, and building a fresh model. `compat` checks the names."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from sglang_weightsync import compat_config
from weightsync.engine import fresh_model
from weightsync.tensors.layout import digest_of

logger = logging.getLogger(__name__)

#: SGLang's LoRA wrapper of experts, in `sglang.srt.lora.layers`, which only processes with LoRA import.
_EXPERT_LORA: Final = "FusedMoEWithLoRA"
#: Attributes of layers, which are neither parameters nor buffers: what latent attention computes of a weight when that
#: is loaded, and a view of the weight that linear attention has.
_PLAIN: Final = ("w_kc", "w_vc", "w_kc_qrep", "w_scale", "w_scale_k", "w_scale_v", "conv_weights")
#: Models in which nothing hinders a push that SGLang decides when it starts: looking takes milliseconds.
_fit: Final[weakref.WeakSet[torch.nn.Module]] = weakref.WeakSet()


def runners(scheduler: Any, which: str) -> list[Any]:
    """The runners of ``"target"``, the model, of ``"draft"``, its draft models, or of ``"all"``."""
    return [runner for _, runner in scheduler.weight_updater._select_runners(which)]


def draft_runner(scheduler: Any) -> Any | str:
    """The runner of the draft model; or why nothing can be pushed into that, empty if there is none."""
    found = runners(scheduler, "draft")
    if len(found) > 1 and draft_has_own_checkpoint():
        return f"SGLang drafts with {len(found)} models"
    return found[0] if len(found) == 1 else ""


def draft_has_own_checkpoint() -> bool:
    """Whether the draft has a checkpoint of its own; otherwise its layers are in the model's (NEXTN)."""
    from sglang.srt.runtime_context import get_model, get_spec

    return compat_config.has_own_checkpoint(get_spec().speculative_draft_model_path, get_model().model_path)


def refused(scheduler: Any) -> str:
    """Why weights cannot be loaded into one of the models; empty if they can."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    for runner in runners(scheduler, "all"):
        try:
            runner.weight_updater._assert_weight_cache_inactive("a push")
        except RuntimeError as error:
            return str(error)
        if runner.model in _fit:
            continue
        if reason := weight_updater._unsupported_derived_weight_cache_error(runner.model):
            return str(reason)
        if any(kind.__name__ == _EXPERT_LORA for kind in _kinds(runner.model)):
            return (
                "LoRA is enabled for experts, which hides their weights from the model's own loader: leave the experts "
                "out of --lora-target-modules, or start the engine without --enable-lora"
            )
        _fit.add(runner.model)
    return ""


def _kinds(model: torch.nn.Module) -> set[type]:
    """The classes of the model and its parts; faster than `torch.nn.Module.modules`, which makes names too."""
    found, left = set[type](), [model]
    while left:
        part = left.pop()
        found.add(type(part))
        left += filter(None, part._modules.values())
    return found


def load(updater: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a whole checkpoint in one begin/end session, by the ``weight_updater`` of a runner.

    It is not a session of SGLang's requests: it begins and ends within one call of the scheduler's handler, so nothing
    can come in between, and a rank that fails leaves no other waiting in a barrier.
    """
    with _session(updater, run_post_load=False):
        loaded, message = updater.load_weights_from_distributed(weights)
        if not loaded:
            raise RuntimeError(message)


@contextlib.contextmanager
def _session(updater: Any, *, run_post_load: bool) -> Iterator[None]:
    """Weights may be written inside. The session also ends if the load fails, so that the next load can begin one."""
    updater.begin_weight_update()
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # half-loaded weights may not survive its checks
            updater.end_weight_update(run_post_load=False)
        raise
    updater.end_weight_update(run_post_load=run_post_load)


def written_by_others(runner: Any) -> AbstractContextManager[None]:
    """The steps of SGLang around a load plan's writes, which do not go through the loader."""
    return _session(runner.weight_updater, run_post_load=True)


def updater_of(runner: Any, model: torch.nn.Module) -> Any:
    """What loads into ``model`` as the runner's own ``weight_updater`` does into the served model."""
    return dataclasses.replace(runner.weight_updater, get_model=lambda: model)


def digest(runner: Any) -> str:
    """The hash, in hex, of the weights that a runner computes with."""
    return digest_of(_weights(runner.model))


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything by its name that layers compute with."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name in _PLAIN:
            if isinstance(found := vars(module).get(name), torch.Tensor):
                yield f"{prefix}.{name}", found


def differing(runner: Any, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> list[str]:
    """Names of the weights that a runner would hold otherwise if it had been started on a checkpoint of ``weights``.

    Builds a second instance of the model for the time of the call, which takes the memory of both.
    """

    return fresh_model.differing(runner.model, lambda: fresh(runner, weights, device), _weights, device)


def fresh(runner: Any, weights: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> torch.nn.Module:
    """A second instance of a runner's model, that shares nothing with the first."""
    # A scheduler handles requests in inference mode, but the served model was built outside of it.
    with torch.inference_mode(False), shared().apart(device):
        return _fresh_model(runner, weights)


def _fresh_model(runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """Build the model as `ModelRunner.load_model` does at start, from these weights instead of files."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_executor.model_runner_components.load_model_utils import load_kv_cache_scales
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_model
    from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

    # Keep a loader that quantizes; replace one that invents weights (dummy).
    kept = issubclass(type(runner.loader), DefaultModelLoader)
    asked = False

    def given(model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal asked
        asked = True
        yield from weights

    config = copy.copy(runner.load_config)
    if not kept:
        config.load_format, config.model_loader_extra_config = LoadFormat.AUTO, {}
    loader = (type(runner.loader) if kept else DefaultModelLoader)(config)
    loader._get_all_weights = given
    with get_model().override(load_format=config.load_format):
        model: torch.nn.Module = loader.load_model(
            model_config=runner.model_config, device_config=DeviceConfig(runner.device, runner.gpu_id)
        )
    if not asked:
        raise RuntimeError(f"{type(runner.loader).__name__} cannot load weights that are not files")
    if hasattr(current_platform, "post_load_model"):  # since SGLang 0.5.22
        current_platform.post_load_model(model)
    load_kv_cache_scales(model=model, kv_cache_dtype=get_model().kv_cache_dtype)
    reserve_rope_cache_for_long_sequences(model, runner.model_config, logger)
    return model


def shared() -> fresh_model.Shared:
    """What models of a scheduler share."""
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT
    from sglang.srt.utils.offloader import NoopOffloader, get_offloader, set_offloader

    return fresh_model.Shared(_ROPE_DICT, get_offloader, set_offloader, NoopOffloader)
