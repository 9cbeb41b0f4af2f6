"""Push to an LLM of vLLM; run by vLLM's Python: `ways STARTED A B OPTIONS`, the latter as JSON.

It starts from the folder STARTED, which has the model of the folder A. Prints what it saw, as JSON.
"""

import json
import sys

from safetensors.torch import load_file
from vllm import LLM

from tests.helpers import changed, keen
from tests.in_process.doors import NEW_TOKENS, PROMPT, Llm
from weightsync import Sender
from weightsync.errors import WeightSyncError


class Door(Llm):
    def __init__(self, folder, options):
        self.engine = LLM(folder, **{"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, **options})

    def seen(self, asked, act=lambda: None):
        """What the engine is after ``act``, and the error of that."""
        told = {"asked": asked}
        try:
            act()
        except WeightSyncError as error:
            told |= {"error": str(error), "weights": error.weights}
        with Sender([self.engine]) as sender:
            (status,) = sender.status(digest=True).values()
        told |= {"state": status.state, "version": status.version, "digests": [rank.digest for rank in status.ranks]}
        told["loading"] = sorted({rank.loading for rank in status.ranks})
        if status.state == "serving":
            told["answer"] = self.generate(PROMPT, NEW_TOKENS)
        return told


def main(started, a, b, options):
    door, found = Door(started, options), []
    stays = "Staying" in options.get("worker_extension_cls", "")

    def where():
        return door.engine.collective_rpc("where_weights_are") if stays else None

    before = where()

    def seen(*asked):
        found.append({**door.seen(*asked), "stayed": where() == before})

    seen("start")
    with Sender([door.engine]) as sender:
        for name, folder in (("b", b), ("a", a), ("b again", b)):
            seen(name, lambda name=name, folder=folder: sender.push(folder, version=name))
        if stays:
            door.engine.collective_rpc("fail_in_the_next_copy", args=(options["tensor_parallel_size"] - 1,))
        seen("fails", lambda: sender.push(a, version="fails"))
        seen("next", lambda: sender.push(b, version="next"))
    with Sender([door.engine], keep_previous=True if stays else "auto", verify="deep") as sender:
        seen("kept", lambda: sender.push(a, version="kept"))
        seen("deep", lambda: sender.push(b, version="deep"))
        seen("back", sender.rollback)
    few = []

    def change_few():
        weights = load_file(f"{b}/model.safetensors")
        near = {name: tensor.clone() for name, tensor in weights.items()}
        with Sender([door.engine], transport="nixl") as sender, keen():
            for state in (changed(near, 1), weights):
                few.append(sender.push(state, version="few").delta is not None)

    seen("few", change_few)
    assert few == [False, True], few
    door.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
