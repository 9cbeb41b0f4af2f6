"""Stands in for SGLang's compiled kernels on a CPU: every name can be imported, and nothing can be called.

SGLang imports names from `sgl_kernel` on every platform and calls none of them on the CPU path that weightsync's tests
use. Should a release start to, the error says which.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

    def missing_kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this environment has no compiled SGLang kernels")

    missing_kernel.__name__ = name
    return missing_kernel
