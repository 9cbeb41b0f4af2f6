"""Push new weights from an RL trainer into running vLLM and SGLang engines."""

from weightsync.results import EngineResult, PushResult
from weightsync.sender import Sender
from weightsync.sources import LocalShard
from weightsync.wire import PACKAGE_VERSION as __version__

__all__ = ["EngineResult", "LocalShard", "PushResult", "Sender", "__version__"]
