"""Changes modules right after they were imported, for the `sitecustomize` of a test; standard library only."""

import importlib.abc
import importlib.machinery
import sys


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, name, path, target=None):
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self._changes[name](module)

        spec.loader.exec_module = exec_module
        return spec


def change(changes):
    """Have each of ``changes``, by the name of a module, called with that."""
    sys.meta_path.insert(0, _Finder(changes))
