"""Has SGLang start with a draft model on any CPU: without the kernels that drafting takes, which need AMX.

It cannot generate then, but it loads both models, and takes pushes.
"""

import importlib.abc
import importlib.util
import sys


def _drafting(module):
    module.DraftBackendFactory.create_decode_backend = lambda self: None
    module.DraftBackendFactory.create_draft_extend_backend = lambda self: None


def _memory(module):
    module.MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None


_CHANGED = {"sglang.srt.speculative.draft_utils": _drafting, "sglang.srt.mem_cache.memory_pool": _memory}


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self):
        self._loaders = {}

    def find_spec(self, name, path, target=None):
        if name not in _CHANGED or name in self._loaders:
            return None
        self._loaders[name] = None  # so that this is not asked again
        spec = importlib.util.find_spec(name)
        self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module):
        self._loaders[module.__name__].exec_module(module)
        _CHANGED[module.__name__](module)


sys.meta_path.insert(0, _AfterImport())
