"""A trainer in its own process: one order per line on stdin, one outcome per line on stdout, as JSON.

``keen``, if given, has it send what has changed whatever that costs.
"""

import contextlib
import json
import sys
import time

import torch
from safetensors.torch import load_file

from tests.helpers import keen
from tools import models
from weightsync import Sender
from weightsync.errors import WeightSyncError

SPOILED = "model.layers.1.post_attention_layernorm.weight"


def spoil(weights, how):
    """Change the weights so that they do not fit the engine's model."""
    if how == "missing":
        del weights[SPOILED]
    elif how == "unknown":
        weights["model.layers.9.extra.weight"] = torch.ones(3)
    elif how == "misshapen":
        weights[SPOILED] = weights[SPOILED][:-1]
    elif how == "wrong dtype":
        weights[SPOILED] = weights[SPOILED].int()  # a floating-point tensor would be cast
    elif how == "empty":
        weights.clear()
    return weights


def push(sender, order, loaded):
    """Push what was ordered; what engines say."""
    folder, draft = order["model"], order.get("draft")
    if order.get("lora"):
        return told(sender.push(folder, version=order["version"], lora=order["lora"]))
    for one in filter(None, (folder, draft)):
        if one not in loaded:
            loaded[one] = models.load_reference(one)
    weights = loaded[folder]
    if order.get("spoil"):
        weights = spoil(load_file(f"{folder}/model.safetensors"), order["spoil"])
    return told(sender.push(weights, version=order["version"], draft=loaded[draft] if draft else None))


def told(result):
    """What engines say of a push."""
    noticed = [word for engine in result.engines.values() for word in engine.noticed]
    sent = result.delta is not None
    return {"engines": dict.fromkeys(result.engines, "committed"), "noticed": noticed, "delta": sent}


def main():
    """Serve orders until stdin ends."""
    if sys.argv[1:] == ["keen"]:
        keen().start()
    senders, loaded = {}, {}
    # Keeps what libraries print apart from the outcomes.
    outcomes = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.monotonic()
        said = {"error": "", "message": "", "engines": {}, "noticed": [], "built": False}
        try:
            key = json.dumps([order["urls"], order["options"]])
            if key not in senders:
                for old in senders.values():
                    with contextlib.suppress(WeightSyncError):
                        old.close()
                senders.clear()
                senders[key] = Sender(order["urls"], **order["options"])
                said["built"] = True
            if order["version"]:  # without one, only the sender is built
                said |= push(senders[key], order, loaded)
        except WeightSyncError as error:
            said.update(error=type(error).__name__, message=str(error), engines=error.engines)
        said["seconds"] = time.monotonic() - begin
        print(json.dumps(said), file=outcomes, flush=True)


if __name__ == "__main__":
    main()
