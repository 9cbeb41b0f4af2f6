"""The trainer of `benchmarks.files`: pushes, some of them recorded, and says as JSON what they were.

A program of its own, since the packages that it imports may be those of another commit.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from tools import models
from weightsync import Sender


def main() -> None:
    """Push ``warm`` times, then ``pushes`` times with a recording of each; the weights change before every one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("recording", type=Path)
    parser.add_argument("warm", type=int)
    parser.add_argument("pushes", type=int)
    args = parser.parse_args()
    model, pushed = models.load_reference(args.model), []
    now = os.open(args.recording / "now", os.O_WRONLY)
    with Sender([args.url], transport="ipc_zmq") as sender:
        for number in range(1 - args.warm, args.pushes + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            os.pwrite(now, bytes([max(0, number)]), 0)
            result = sender.push(model)
            os.pwrite(now, bytes([0]), 0)
            pushed.append(result.seconds["total"])
        (rank,) = sender.status()[args.url].ranks
    print(json.dumps({"pid": os.getpid(), "seconds": pushed, "nbytes": result.nbytes, "loading": rank.loading}))


if __name__ == "__main__":
    main()
