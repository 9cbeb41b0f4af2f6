"""Push new weights from an RL trainer into running vLLM and SGLang engines."""

from importlib.metadata import version as _version

__version__ = _version("weightsync")

from weightsync.sender import EngineResult, PushResult, Sender

__all__ = ["EngineResult", "PushResult", "Sender", "__version__"]
