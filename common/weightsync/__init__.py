"""Push new weights from an RL trainer into running vLLM and SGLang engines."""

from weightsync.results import EngineResult, PushResult
from weightsync.sender import Sender
from weightsync.sources import Fused, LocalShard, Rule
from weightsync.wire import PACKAGE_VERSION as __version__

__all__ = ["EngineResult", "Fused", "LocalShard", "PushResult", "Rule", "Sender", "__version__"]
