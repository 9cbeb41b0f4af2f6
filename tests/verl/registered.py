"""Our checkpoint engines in verl's registry: ``python -m tests.verl.registered [MODULE]``.

Prints them before and after verl imports the module, as it does for ``checkpoint_engine.custom_backend_module``.
"""

import json
import sys

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs


def ours():
    kinds = CheckpointEngineRegistry._registry
    return sorted(name for name, kind in kinds.items() if "weightsync" in name and issubclass(kind, CheckpointEngine))


if __name__ == "__main__":
    before = ours()
    import_external_libs(sys.argv[1] if sys.argv[1:] else None)
    print(json.dumps({"before": before, "after": ours()}))
