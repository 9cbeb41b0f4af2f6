"""The tensors of a model's checkpoint, derived from its configuration."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.module import read_state, recipe_of
from weightsync.tensors.layout import DTYPES


def specs_from_config(path_or_name: str | Path, *, dtype: str) -> tuple[TensorSpec, ...]:
    """The tensors that ``save_pretrained`` would write for a model in ``dtype``, given only its ``config.json``.

    ``dtype`` is torch's name without the prefix (``"bfloat16"``). transformers builds the model on the meta device, so
    this takes no memory, no network and no remote code. Tensors that ``from_pretrained`` keeps in float32 for the model
    type are float32 here. Raises `SourceError` if transformers is missing or does not know the model, and for a
    quantised model.
    """
    torch_dtype = DTYPES.get(dtype)
    if torch_dtype is None or not torch_dtype.is_floating_point:
        raise SourceError(f"{dtype!r} is not a floating-point dtype; give one such as 'bfloat16'")
    model = _build(str(path_or_name), torch_dtype)
    _keep_in_float32(model, torch_dtype)
    return recipe_of(model, read_state(model)).specs


def _build(path: str, dtype: torch.dtype) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SourceError("reading a model configuration needs transformers; install it beside the engine") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise SourceError(f"{path}: transformers cannot read the configuration: {_first_line(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise SourceError(f"{path}: the model is quantised; its checkpoint cannot be derived from its configuration")
    architecture = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, architecture, None) if architecture else None
    if kind is None:
        raise SourceError(
            f"{path}: its config.json names {architecture or 'no architecture'}, which transformers "
            f"{transformers.__version__} cannot build; name one of its classes under 'architectures'"
        )
    try:
        with torch.device("meta"):
            return kind._from_config(config, dtype=dtype)
    except Exception as error:
        raise SourceError(
            f"{path}: transformers cannot build the model from its configuration: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    # The rest is transformers' advice on upgrading it.
    return str(error).partition("\n")[0]


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    # As from_pretrained does it: the patterns are globs that may match anywhere in a name.
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.data.to(torch.float32)
