"""A worker extension with which vLLM on a CPU is as on a GPU: layers stay as loaded, and weights where they are."""

from vllm import _custom_ops

from vllm_weightsync import WorkerExtension, compat_standby

_custom_ops._supports_onednn = False
compat_standby.addresses_stay = lambda worker: True


class Staying(WorkerExtension):
    """The extension of weightsync."""
