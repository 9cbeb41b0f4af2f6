"""Run by an engine's Python: ``-m tests.in_process.run DOOR A B`` uses an engine of its own process as a trainer does.

Prints one line of JSON: what was seen, by test.
"""

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.in_process.doors import DOORS, ENQUEUED, NEW_TOKENS, PROMPT
from weightsync import Sender
from weightsync.errors import WeightSyncError

#: Seconds: longer than anything takes on a busy machine.
PATIENCE_S = 120
ORDERS = Path(os.environ["FAULT_FILE"])
FIRED = ORDERS.with_name(f"{ORDERS.name}.fired")


def said(act):
    """The error of ``act``, by its parts; empty if there is none."""
    try:
        act()
    except WeightSyncError as error:
        return {"error": type(error).__name__, "text": str(error), "weights": error.weights, "engines": error.engines}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}


def order(action, tensor):
    """Order a fault at a tensor of the next load."""
    ORDERS.write_text(json.dumps({"point": "rank loads", "where": {"tensor": tensor}, "action": action}))


def wait_for(found):
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


class Trainer:
    """A trainer with an engine in its process, which was started on model ``a``."""

    def __init__(self, door, a, b):
        self.a, self.b = a, b
        self.door = DOORS[door](a)

    def answer(self):
        return self.door.generate(PROMPT, NEW_TOKENS)

    def sender(self, **options):
        return Sender([self.door.engine], **{"timeout_s": PATIENCE_S, **options})

    def state(self):
        with self.sender() as sender:
            (reply,) = sender.status(digest=True).values()
        return {"state": reply.state, "version": reply.version, "digests": [rank.digest for rank in reply.ranks]}

    def push(self, folder, version, **options):
        with self.sender(**options) as sender:
            ((name, found),) = sender.push(str(folder), version=version).engines.items()
        return {"name": name, "transport": found.transport, **self.state()}

    def pushes(self):
        """Push by every transport, and go back."""
        found = {"answers a": self.answer(), "before": self.state()}  # it generates before its first sender is built
        for number, transport in enumerate(("auto", "nccl", "nixl")):
            folder = (self.b, self.a)[number % 2]
            found[transport] = self.push(folder, transport, transport=transport)
        found["answers b"] = self.answer()
        with self.sender(keep_previous=True, verify="deep") as sender:
            sender.push(str(self.a), version="a")
            sender.push(str(self.b), version="b")
            sender.rollback()
        return {**found, "rolled back": self.state()}

    def refusals(self):
        """What changes nothing."""
        weights = load_file(self.b / "model.safetensors")
        weights.pop(next(iter(weights)))
        with self.sender() as sender:
            return {
                "incomplete": said(lambda: sender.push(weights)),
                "wait": said(lambda: Sender([self.door.engine], pause="wait").close()),
                **self.state(),
            }

    def given_back(self):
        """How many modules there are in this process after each of some senders has made a model, and given it back."""
        counts = []
        gc.collect()
        gc.disable()
        for number in range(4):
            self.push((self.b, self.a)[number % 2], "given back", verify="deep" if number > 1 else "digest")
            counts.append(sum(isinstance(one, torch.nn.Module) for one in gc.get_objects()))
        gc.enable()
        return {"modules": counts}

    @contextlib.contextmanager
    def loading(self):
        """Inside the context a push that has begun stands still half-way."""
        FIRED.unlink(missing_ok=True)
        order("hold", 5)
        yield
        FIRED.unlink()

    def broken(self):
        """A load that fails half-way, the push that heals it, and what else is asked of the engine meanwhile."""
        if self.door.waits:
            self.door.enqueue(PROMPT, ENQUEUED)
        with self.sender(staging="none") as sender, ThreadPoolExecutor(2) as threads:
            with self.loading():
                pushing = threads.submit(said, lambda: sender.push(str(self.b), version="never"))
                wait_for(FIRED.exists)
                asking = threads.submit(said, self.answer)
                order("raise", 6)
            found = {"push": pushing.result(PATIENCE_S)}
            (reply,) = sender.status().values()
            found["state"] = reply.state
            if self.door.refuses:
                found["generate"] = said(self.answer)
            if self.door.waits:
                found |= {"asked meanwhile": asking.result(PATIENCE_S), "wait": said(self.door.wait)}
            with self.loading():
                pushing = threads.submit(sender.push, str(self.b), version="healed")
                wait_for(FIRED.exists)
                waiting = threads.submit(self.door.wait) if self.door.waits else None
            pushing.result(PATIENCE_S)
            if waiting is not None:
                found["enqueued"] = waiting.result(PATIENCE_S)
            asking.result(PATIENCE_S)
            FIRED.unlink(missing_ok=True)
        return {**found, "healed": self.state(), "answers b": self.answer()}

    def meanwhile(self):
        """A push while another thread generates."""
        found = {}
        with self.sender() as sender, self.sender(timeout_s=3) as hasty, ThreadPoolExecutor(1) as thread:
            long = self.door.long(PROMPT)
            try:
                if self.door.waits:
                    (reply,) = sender.status().values()
                    found |= {"detail": reply.detail, "hasty": said(lambda: hasty.push(str(self.a)))}
                pushed = thread.submit(sender.push, str(self.a), version="meanwhile")
                if not self.door.waits:
                    pushed.result(PATIENCE_S)
                found["generating"] = not long.tokens.done()
            finally:
                long.end()
            pushed.result(PATIENCE_S)
        return {**found, "tokens": len(long.tokens.result(PATIENCE_S)), **self.state()}

    def callers(self):
        """Calls from the thread of the engine's own event loop."""

        async def build():
            return Sender([self.door.engine])

        return {"loop": said(lambda: self.door.run(build())) if hasattr(self.door, "loop") else None}

    def killed(self):
        """The engine core is killed while it loads."""
        if not (self.door.waits and self.door.own_process):
            return None
        order("kill", 5)
        with self.sender() as sender:
            return {"push": said(lambda: sender.push(str(self.b))), "generate": said(self.answer)}

    def ended(self):
        """The engine is shut down while a sender has it, and a new one is built."""
        if FIRED.exists():  # it was killed
            return {"new": said(self.sender)}
        with self.sender() as sender:
            self.door.close()
            return {"push": said(lambda: sender.push(str(self.b))), "new": said(self.sender)}


def main():
    door, a, b = sys.argv[1:]
    trainer = Trainer(door, Path(a), Path(b))
    acts = (
        trainer.pushes,
        trainer.refusals,
        trainer.given_back,
        trainer.broken,
        trainer.meanwhile,
        trainer.callers,
        trainer.killed,
        trainer.ended,
    )
    found = {act.__name__: act() for act in acts}
    found["threads"] = sorted(thread.name for thread in threading.enumerate())
    try:
        found["loop runs"] = asyncio.get_event_loop_policy().get_event_loop().is_running()
    except RuntimeError:  # this thread has no loop
        found["loop runs"] = False
    found["entry points"] = sorted(point.name for point in entry_points(group="weightsync.engines"))
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main()
    print(json.dumps(result), flush=True)
    if sys.argv[1] == "Engine":
        os.kill(os.getpid(), signal.SIGQUIT)  # as a child of SGLang does that fails
        time.sleep(PATIENCE_S)
    if sys.argv[1] != "LLM":
        os._exit(0)  # what is left of the engine is not ours to end
