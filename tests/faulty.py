"""Reference engines that suffer ordered faults."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness import SITE
from tools import servers
from weightsync import Sender
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine

SETTLE_S = 60.0


def digest(model):
    """The digest of an engine that serves this model."""
    return digest_of(model.state_dict().items())


def faulty(model, folder):
    """A faulty engine for a ``with`` block, started on ``model``; ``folder`` holds its orders."""
    orders = folder / "order"
    path = os.pathsep.join([str(SITE), str(servers.ROOT), os.environ.get("PYTHONPATH", "")])
    return Faulty(ReferenceEngine(model, env={**os.environ, "PYTHONPATH": path, "FAULT_FILE": str(orders)}), orders)


@dataclass
class Faulty:
    """A reference engine that suffers an ordered fault once."""

    engine: ReferenceEngine
    orders: Path

    def __enter__(self):
        self.engine.__enter__()
        return self

    def __exit__(self, *_):
        self.thaw()
        self.engine.close()

    @property
    def url(self):
        return self.engine.url

    def order(self, action, tensor=9):
        """Order a fault after this tensor of the next load."""
        self.orders.write_text(json.dumps({"point": "rank loads", "where": {"tensor": tensor}, "action": action}))

    def suffered(self):
        return not self.orders.exists()

    def thaw(self):
        self.engine.process.send_signal(signal.SIGCONT)

    def settled(self):
        """Wait until the engine no longer loads; returns its status with digests."""
        give_up = time.monotonic() + SETTLE_S
        with Sender([self.url], timeout_s=SETTLE_S) as sender:
            while (reply := sender.status(digest=True)[self.url]).state.endswith("applying"):
                assert time.monotonic() < give_up, "it loads for ever"
                time.sleep(0.05)
        return reply

    def heal(self, model):
        with Sender([self.url]) as sender:
            sender.push(model, version="healed")
        reply = self.settled()
        assert (reply.state, reply.version) == ("serving", "healed")
        assert reply.ranks[0].digest == digest(model)


def assert_no_mixture(reply, label, model):
    """Assert that the engine serves ``model`` under ``label`` or is dirty."""
    if reply.state == "serving" and reply.version == label:
        assert reply.ranks[0].digest == digest(model)
    else:
        assert reply.state == "dirty"
