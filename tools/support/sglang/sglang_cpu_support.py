"""Mend what SGLang lacks on a machine without CUDA, each as soon as the module is imported that lacks it.

- The CUDA build of torchvision: its compiled library does not load there, and importing it then fails, because it
  registers shape functions for operators that only that library declares. Declaring them first is enough: SGLang calls
  none of them for text models.
- SGLang's LoRA (with `--lora-backend torch_native`, its kernels in plain torch) puts sizes and offsets into pinned
  memory, of which there is none without an accelerator: ordinary memory does as well.

A `.pth` file imports this module in every process of the environment, so it stays cheap: torch is imported only when
one of these is.
"""

import importlib.machinery
import sys
from importlib.abc import MetaPathFinder

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("torchvision::nms", "torchvision::qnms")


class _Mending(MetaPathFinder):
    """Mends a module when it is first looked for; finds none itself."""

    def __init__(self, name, mend):
        self._name, self._mend = name, mend

    def find_spec(self, fullname, path=None, target=None):
        """Return None, or the spec of the module with a loader that mends it, so that the usual finders find it."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        return self._mend(fullname, path)


def _declare_operators(fullname, path):
    import torch

    for name in _OPERATORS:
        torch.library.define(name, _SCHEMA)


def _without_pinned_memory(fullname, path):
    import torch

    if torch.accelerator.is_available():
        return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path)
    execute = spec.loader.exec_module

    def exec_module(module):
        execute(module)
        module.torch = _Unpinned(torch)
        torch.Tensor.pin_memory = lambda self, *args: self

    spec.loader.exec_module = exec_module
    return spec


class _Unpinned:
    """torch, for one module, whose functions make no pinned tensors."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        return getattr(self._torch, name)

    def zeros(self, *args, pin_memory=False, **options):
        return self._torch.zeros(*args, **options)

    def tensor(self, *args, pin_memory=False, **options):
        return self._torch.tensor(*args, **options)


sys.meta_path.insert(0, _Mending("torchvision", _declare_operators))
for _module in ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend"):
    sys.meta_path.insert(0, _Mending(_module, _without_pinned_memory))
