"""A worker extension with which vLLM's weights stay where they are, and a standby is copied there."""

from vllm import _custom_ops

from vllm_weightsync import WorkerExtension, compat_plans, compat_standby

_custom_ops._supports_onednn = False  # packed layers cannot be copied
compat_standby.addresses_stay = lambda worker: True
compat_plans.why_not = lambda worker: "a standby is copied"


class Extension(WorkerExtension):
    """The extension of weightsync."""
