"""An engine that serves a quantised checkpoint, in this process, and what quantising makes of a tensor."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from weightsync.engine.adapter import Expected, Sealed
from weightsync.tensors.formats import formats_of
from weightsync.tensors.layout import DTYPES, spec_of
from weightsync.tensors.quantising import Quantising
from weightsync.testing import ModelAdapter, ReferenceFrontEnd, ReferenceInProcess

FINE = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(stored, kind, bits, strategy, **more):
    """The ``quantization_config`` of a model of compressed-tensors."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}


def each_channel(stored, kind, *ignored):
    """A configuration for which vLLM has kernels on a CPU: a scale for each row, and for each token.

    ``ignored``: regular expressions for layers that are not quantised.
    """
    tokens = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    config = {**compressed(stored, kind, 8, "channel"), "ignore": ["lm_head", *(f"re:{one}" for one in ignored)]}
    config["config_groups"]["group_0"]["input_activations"] = tokens
    return config


CONFIGS = {
    "fine-grained": FINE,
    "fine-grained, powers of two": {**FINE, "scale_fmt": "ue8m0"},
    "fp8, tensor": compressed("float-quantized", "float", 8, "tensor"),
    "fp8, channel": compressed("float-quantized", "float", 8, "channel"),
    "fp8, block": compressed("float-quantized", "float", 8, "block", block_structure=[128, 128]),
    "int8, channel": compressed("int-quantized", "int", 8, "channel"),
    "int4, group": compressed("pack-quantized", "int", 4, "group", group_size=128),
}


def format_of(config, work="bfloat16"):
    """The format of a configuration, with the dtype of the scales of the engine's checkpoint."""
    (how,) = formats_of(config)
    return how._replace(work=how.work or work)


def made(how, name, tensor, cut=0):
    """What quantising makes of a tensor, by its names, if ``cut`` elements are asked for at a time."""
    quantising, found = Quantising(name, tensor, how), {}
    for which, spec in enumerate(how.made_of(spec_of(name, tensor))):
        found[spec.name] = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        flat = found[spec.name].view(-1)
        for start in range(0, flat.numel(), cut or flat.numel()):
            quantising.write(which, start, flat[start : start + (cut or flat.numel())])
    return found


def same(one, other):
    """Whether two tensors are equal in every bit."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def quantised_folder(folder, into, config):
    """The model of a folder as a checkpoint of this configuration, in the folder ``into``."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    tensors, how = load_file(into / "model.safetensors"), format_of(config)
    ignored = [one.removeprefix("re:") for one in config.get("ignore", ()) if one.startswith("re:")]
    for name in [name for name in tensors if name.endswith("_proj.weight") and not _matches(ignored, name)]:
        tensors |= made(how, name, tensors[name])
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    told = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return into


def _matches(patterns, name):
    return any(re.match(pattern, name.removesuffix(".weight")) for pattern in patterns)


class Tensors(nn.Module):
    """A model that is a checkpoint: each tensor is a buffer of its name."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            module, _, own = name.rpartition(".")
            for part in filter(None, (module,)):
                self._module(part).register_buffer(own, torch.zeros_like(tensor))

    def _module(self, name):
        found = self
        for part in name.split("."):
            if part not in dict(found.named_children()):
                found.add_module(part, nn.Module())
            found = found.get_submodule(part)
        return found


class Adapter(ModelAdapter):
    """An engine's rank that holds such a checkpoint. ``sealed``: only its loader can load."""

    device = torch.device("cpu")

    def __init__(self, tensors, config, sealed=False):
        self.model, self._config, self._sealed = Tensors(tensors), config, sealed
        self._specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())

    def expected(self):
        return Expected(self._specs, frozenset(), self._config)

    def loader_hooks(self):
        return Sealed(self.model, "it packs layers") if self._sealed else super().loader_hooks()


class Engine(ReferenceInProcess):
    """The reference engine with such a rank; ``draft`` is that of its draft model, if it has one."""

    def __init__(self, tensors, config, sealed=False, draft=None):
        adapter = Adapter(tensors, config, sealed)
        adapter._draft = draft
        self._serve(ReferenceFrontEnd(adapter, Path("quantised"), False))
        self.model, self.draft = adapter.model, draft and draft.model

    @property
    def served(self):
        """What it serves."""
        return self.model.state_dict()
