"""Push folders to an LLM of vLLM; run by vLLM's Python: ``reaching OPTIONS STARTED PUSHED...``, the first as JSON.

Prints, as JSON, every tensor that its model reaches at its start and in the end, and how it is loaded.
"""

import json
import sys

from vllm import LLM

from tests.in_process.doors import PROMPT, Llm
from weightsync import Sender


class Door(Llm):
    def __init__(self, folder, options):
        self.engine = LLM(folder, enforce_eager=True, max_model_len=1024, **{"dtype": "bfloat16", **options})


def main(options, started, *folders):
    door, found = Door(started, json.loads(options)), {}
    for name, pushed in (("start", ()), ("end", folders)):
        with Sender([door.engine]) as sender:
            for folder in pushed:
                sender.push(folder)
            (status,) = sender.status().values()
        door.generate(PROMPT, 2)
        (tensors,) = door.engine.collective_rpc("reached")
        found[name] = {"tensors": tensors, "loading": status.ranks[0].loading}
    door.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
