"""Let the CUDA build of torchvision be imported on a machine without CUDA.

Its compiled library does not load there, and importing torchvision then fails, because it registers shape functions for
operators that only that library declares. Declaring them first is enough: SGLang calls none of them for text models.

A `.pth` file imports this module in every process of the environment, so it stays cheap: torch is imported only when
torchvision is.
"""

import sys
from importlib.abc import MetaPathFinder

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("torchvision::nms", "torchvision::qnms")


class _BeforeTorchvision(MetaPathFinder):
    """Declares the operators once, when torchvision is first looked for; finds no module itself."""

    def find_spec(self, fullname, path=None, target=None):
        """Return None, so that the usual finders go on to find torchvision."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare_operators()


def _declare_operators():
    import torch

    for name in _OPERATORS:
        torch.library.define(name, _SCHEMA)


sys.meta_path.insert(0, _BeforeTorchvision())
