"""The driver of a Ray of several nodes, told what to do: ``python -m tests.ray.nodes ADDRESS``; a line for each step.

Steps and replies are JSON: ``[name, *arguments]``, and ``{"value": ...}`` or ``{"error": ...}``.
"""

import contextlib
import json
import os
import socket
import sys

import ray

from tests.ray import actors
from tests.ray.run import WAIT_S, generated, reference, remote
from tools import models
from weightsync import Sender
from weightsync.errors import WeightSyncError


class Held(actors.HeldByCoroutines):
    """An engine in an actor that says where it is."""

    def host(self):
        return socket.gethostname()


class Trainer:
    """A trainer in an actor."""

    def host(self):
        return socket.gethostname()

    def push(self, engines, folder, options):
        return pushed(engines, folder, options)


def pushed(engines, folder, options):
    """Push once; the version."""
    with Sender(engines, **options) as sender:
        return sender.push(models.load_reference(folder)).version


class Driver:
    """What it can be told to do."""

    def __init__(self):
        self._actors, self._sender = {}, None

    def place(self, kind, node, *arguments):
        """An actor on a node, under the node's name; the host that it is on."""
        actor = remote({"engine": Held, "trainer": Trainer}[kind], *arguments, resources={node: 1})
        self._actors[kind, node] = actor
        return ray.get(actor.host.remote(), timeout=WAIT_S)

    def build(self, nodes, options):
        """A sender of the driver's for the engines on these nodes."""
        self._sender = Sender(self._engines(nodes), **options)

    def push(self, folder):
        """Push with it; the transport to each engine."""
        result = self._sender.push(models.load_reference(folder))
        return [engine.transport for engine in result.engines.values()]

    def join(self, node):
        """Add the engine on a node."""
        self._sender.add_engine(self._actors["engine", node])

    def leave(self, node):
        """Remove the engine on a node."""
        self._sender.remove_engine(self._actors["engine", node])

    def close(self):
        """Close the sender."""
        self._sender.close()

    def train(self, trainer, nodes, folder, options):
        """Have the trainer on a node push into the engines on these nodes; the version."""
        pushing = self._actors["trainer", trainer].push.remote(self._engines(nodes), folder, options)
        return ray.get(pushing, timeout=WAIT_S)

    def answers(self, nodes):
        """What the engines on these nodes generate."""
        return [generated(actor) for actor in self._engines(nodes)]

    def fresh(self, folder):
        """What an engine generates that was started with a folder."""
        return reference(folder)

    def names(self, nodes):
        """The names of the engines on these nodes."""
        return [repr(actor) for actor in self._engines(nodes)]

    def _engines(self, nodes):
        return [self._actors["engine", node] for node in nodes]


def main():
    with contextlib.redirect_stdout(sys.stderr):
        ray.init(address=sys.argv[1], _node_ip_address=sys.argv[1].partition(":")[0], log_to_driver=False)
        driver = Driver()
        for line in sys.stdin:
            step, *arguments = json.loads(line)
            try:
                reply = {"value": getattr(driver, step)(*arguments)}
            except (WeightSyncError, ray.exceptions.RayError) as error:
                error = getattr(error, "cause", None) or error
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=sys.__stdout__, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
