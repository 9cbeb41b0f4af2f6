"""Worker extensions with which vLLM leaves its layers on a CPU as they are loaded, which it does on a GPU."""

from user_extension import UserExtension
from vllm import _custom_ops

_custom_ops._supports_onednn = False

__all__ = ["PlainLayers", "UserExtension"]


class PlainLayers:
    """Adds no method."""
