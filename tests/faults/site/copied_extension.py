"""A worker extension with which vLLM's weights stay where they are, and a standby is copied there."""

from benchmarks.staying import Staying
from vllm_weightsync import compat_plans

compat_plans.why_not = lambda worker: "a standby is copied"

__all__ = ["Staying"]
