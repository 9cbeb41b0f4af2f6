"""The trainer's program: one push per line on stdin, its outcome per line on stdout, as JSON."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping

from safetensors.torch import load_file

from tests.helpers import changed, keen
from weightsync import Sender
from weightsync.errors import WeightSyncError

#: Keeps what libraries print, also from C, apart from the outcomes.
OUTCOMES = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def say(**outcome):
    """Print one outcome."""
    print(json.dumps(outcome), file=OUTCOMES, flush=True)


class Halting(Mapping):
    """Weights that wait for a line on stdin when half of them were sent."""

    def __init__(self, weights):
        self._weights, self._read = weights, 0

    def __getitem__(self, name):
        self._read += 1
        if self._read == len(self) // 2:
            say(halted=name)
            sys.stdin.readline()
        return self._weights[name]

    def items(self):
        """Not counted: it is called before anything is sent."""
        return self._weights.items()

    def values(self):
        """As `items`."""
        return self._weights.values()

    def __iter__(self):
        return iter(self._weights)

    def __len__(self):
        return len(self._weights)


class Trainer:
    """Keeps its sender as long as pushes ask for the same engines and options."""

    def __init__(self):
        self._asked, self._sender = None, None

    def push(self, urls, options, folder, version, halts, changes=None):
        """Push a checkpoint's tensors, with ``changes``; returns the result of each engine.

        With a number for those, what has changed is sent whatever that costs.
        """
        if self._asked != (urls, options):
            self.close()
            self._sender = Sender(urls, **options)
            self._asked = urls, options
        weights = load_file(f"{folder}/model.safetensors")
        with contextlib.nullcontext() if changes is None else keen():
            pushed = changed(weights, changes or 0)
            result = self._sender.push(Halting(pushed) if halts else pushed, version=version)
        delta = None if result.delta is None else result.delta.nbytes
        return {
            url: {
                "transport": engine.transport,
                "reason": engine.transport_reason,
                "noticed": engine.noticed,
                "delta": delta,
                "why": result.delta_reason,
            }
            for url, engine in result.engines.items()
        }

    def close(self):
        """Close the sender."""
        self._asked, sender, self._sender = None, self._sender, None
        if sender is not None:
            sender.close()


def main():
    """Serve orders until stdin ends; an empty order closes the sender."""
    trainer = Trainer()
    for line in sys.stdin:
        begin, said = time.monotonic(), {"error": "", "message": "", "engines": {}}
        try:
            order = json.loads(line)
            said["engines"] = trainer.push(**order) if order else trainer.close()
        except WeightSyncError as error:
            said.update(error=type(error).__name__, message=str(error), engines=error.engines)
        say(**said, seconds=time.monotonic() - begin)


if __name__ == "__main__":
    main()
