"""Push new weights from an RL trainer into running vLLM and SGLang engines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from weightsync.sources import Fused, LocalShard, Rule
    from weightsync.trainer.results import EngineResult, PushResult
    from weightsync.trainer.sender import Sender

    __version__: str

__all__ = ["EngineResult", "Fused", "LocalShard", "PushResult", "Rule", "Sender", "__version__"]

#: The module of each public name. It is imported on first use, so that `weightsync.errors` alone does not load torch.
_MODULES: Final = {
    "EngineResult": "weightsync.trainer.results",
    "Fused": "weightsync.sources",
    "LocalShard": "weightsync.sources",
    "PushResult": "weightsync.trainer.results",
    "Rule": "weightsync.sources",
    "Sender": "weightsync.trainer.sender",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("weightsync.protocol.http").package_version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
