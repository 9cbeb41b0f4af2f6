"""Push to an engine whose weights must stay where they are; run by vLLM's Python: `stays FOLDER FOLDER RANKS`.

Prints what it saw, as JSON.
"""

import json
import sys

from vllm import LLM

from tests.in_process.doors import NEW_TOKENS, PROMPT, Llm
from weightsync import Sender
from weightsync.errors import WeightSyncError


class Staying(Llm):
    def __init__(self, folder, ranks):
        self.engine = LLM(
            folder,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            tensor_parallel_size=ranks,
            worker_extension_cls="tests.in_process.staying_extension.StayingExtension",
        )


def main(a, b, ranks):
    door, found = Staying(a, ranks), []
    before = door.engine.collective_rpc("where_weights_are")

    def seen(asked, act):
        told = {"asked": asked}
        try:
            act()
        except WeightSyncError as error:
            told |= {"error": str(error), "weights": error.weights}
        with Sender([door.engine]) as sender:
            (status,) = sender.status(digest=True).values()
        told |= {"state": status.state, "version": status.version, "digests": [rank.digest for rank in status.ranks]}
        told["loading"] = sorted({rank.loading for rank in status.ranks})
        told["stayed"] = door.engine.collective_rpc("where_weights_are") == before
        if status.state == "serving":
            told["answer"] = door.generate(PROMPT, NEW_TOKENS)
        found.append(told)

    with Sender([door.engine]) as sender:
        for name, folder in (("b", b), ("a", a), ("b again", b)):
            seen(name, lambda name=name, folder=folder: sender.push(folder, version=name))
        door.engine.collective_rpc("fail_after_the_next_copy", args=(ranks - 1,))
        seen("fails", lambda: sender.push(a, version="fails"))
        seen("healed", lambda: sender.push(a, version="healed"))
    with Sender([door.engine], keep_previous=True, verify="deep") as sender:
        seen("kept", lambda: sender.push(a, version="kept"))
        seen("deep", lambda: sender.push(b, version="deep"))
        seen("back", sender.rollback)
    door.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
