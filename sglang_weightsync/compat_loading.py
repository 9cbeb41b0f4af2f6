"""As `compat`, which checks the names: how SGLang loads weights, and builds the model it computes with."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang_weightsync import compat
from weightsync.layout import digest_of
from weightsync.sink import apart_from_live

logger = logging.getLogger(__name__)


def load(scheduler: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a whole checkpoint in one begin/end session, draft models included.

    The session is opened on the runners themselves: it begins and ends inside one scheduler handler, so that nothing
    can come in between, and a rank that fails leaves no other waiting in the session's barrier.

    A model reads each tensor before it asks for the next. Several models read them all in turn.
    """
    runners = scheduler.weight_updater._select_runners("all")
    named = weights if len(runners) == 1 else list(weights)
    for _, runner in runners:
        runner.weight_updater.begin_weight_update()
        loaded, message = runner.weight_updater.load_weights_from_distributed(named)
        if not loaded:
            raise RuntimeError(message)
        runner.weight_updater.end_weight_update(run_post_load=False)


def recordable(scheduler: Any) -> tuple[torch.nn.Module, Callable[[Any], Any]] | str:
    """The model and its loader, or why what the loader does cannot be done in its place."""
    runners = scheduler.weight_updater._select_runners("all")
    if len(runners) != 1:
        return "a draft model is loaded with the model"
    model: Any = runners[0][1].model
    return model, model.load_weights


@contextlib.contextmanager
def written_by_others(scheduler: Any) -> Iterator[None]:
    """Around writing all weights past the loader: what SGLang does before and after, and the loader at its end."""
    ((_, runner),) = scheduler.weight_updater._select_runners("all")
    runner.weight_updater.begin_weight_update()
    yield
    runner.weight_updater.end_weight_update(run_post_load=True)


def digest(scheduler: Any) -> str:
    """Hash of the weights the scheduler computes with, in hex."""
    return digest_of(_weights(compat.model(scheduler)))


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def fresh_digest(scheduler: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """What `digest` would give had this rank been started on a checkpoint of these weights.

    Builds a second instance of the model beside the served one, so it needs the memory of both for that long.
    """
    device = compat.device_of(scheduler)
    model = None
    try:
        # A scheduler handles requests in inference mode; a start does not, and what it makes must be like it.
        with torch.inference_mode(False), _apart_from_live(device):
            model = _fresh_model(scheduler.tp_worker.model_runner, weights)
            return digest_of(_weights(model))
    finally:
        # Layers and their weight loaders refer to each other.
        del model
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()


def _fresh_model(runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    """The model as `ModelRunner.load_model` makes it at a start, from these weights instead of files."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.model_executor.model_runner_components.load_model_utils import load_kv_cache_scales
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_model
    from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

    # A loader that quantizes is kept; one that makes weights up (dummy) is not.
    kept = issubclass(type(runner.loader), DefaultModelLoader)
    asked = False

    class Given(type(runner.loader) if kept else DefaultModelLoader):  # type: ignore[misc]
        def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal asked
            asked = True
            yield from weights

    config = copy.copy(runner.load_config)
    if not kept:
        config.load_format, config.model_loader_extra_config = LoadFormat.AUTO, {}
    loader = Given(config)
    with get_model().override(load_format=config.load_format):
        model: torch.nn.Module = loader.load_model(
            model_config=runner.model_config, device_config=DeviceConfig(runner.device, runner.gpu_id)
        )
    if not asked:
        raise RuntimeError(f"{type(runner.loader).__name__} cannot load weights that are not files")
    current_platform.post_load_model(model)
    load_kv_cache_scales(model=model, kv_cache_dtype=get_model().kv_cache_dtype)
    reserve_rope_cache_for_long_sequences(model, runner.model_config, logger)
    return model


def _apart_from_live(device: torch.device) -> AbstractContextManager[None]:
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT
    from sglang.srt.utils.offloader import NoopOffloader, get_offloader, set_offloader

    return apart_from_live(device, _ROPE_DICT, get_offloader(), NoopOffloader(), set_offloader)
