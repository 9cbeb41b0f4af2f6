"""Has SGLang start with a draft model on any CPU: without the attention that drafts, which needs a matrix unit (AMX).

It cannot generate then, but it loads both models, and takes pushes.
"""

import importlib.abc
import importlib.util
import sys

_MODULE = "sglang.srt.speculative.draft_utils"


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        module.DraftBackendFactory.create_decode_backend = lambda self: None
        module.DraftBackendFactory.create_draft_extend_backend = lambda self: None


sys.meta_path.insert(0, _AfterImport())
