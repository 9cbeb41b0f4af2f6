"""Let vLLM's own kernels use the CPU's matrix unit (AMX), where it has one.

Linux gives a process the unit only if it asks. oneDNN asks when it first multiplies more than a few rows, vLLM's own
kernels do not: a worker whose first prompt is shorter than five tokens dies of an illegal instruction.

A `.pth` file imports this module in every process of the environment, because what was granted ends with `exec`.
"""

import ctypes

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

# Fails harmlessly on a CPU or kernel without the unit: nothing uses it there.
ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
