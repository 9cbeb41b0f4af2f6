"""A trainer and a rank whose every step a test takes by hand."""

import time

import torch

from tests.helpers import plan_of
from weightsync.deadline import Deadline
from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.protocol import http
from weightsync.sources import open_source
from weightsync.tensors.layout import Layout, digest_of
from weightsync.testing import ModelAdapter
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry
from weightsync.transports.base import Peer

CPU = torch.device("cpu")
SOON_S = 10.0
BUCKET = 64 << 10
#: An engine of one rank, of which nobody asks more than where it would be. Over ipc_zmq any other URL does as well.
HERE = "http://127.0.0.1:1"
RANK = Peer(HERE, 0)


def hello_of(*ranks, host="", instance="once"):
    """What an engine says when it is opened, as far as a trainer's transports care; by default it has one rank."""
    return http.OpenReply(
        protocol=http.PROTOCOL,
        engine="test",
        engine_version="",
        package_version="",
        host=host,
        model="",
        version="",
        ranks=ranks or (http.RankInfo(rank=0, pid=0, device="cpu"),),
        instance=instance,
    )


class Trainer(Transfer):
    """A sender's transfer, and its push under way.

    ``join`` is given what the engine is told before a push, and returns its rank's answer.
    """

    def __init__(self, transport="ipc_zmq", join=None):
        super().__init__(CPU)
        self.transport, self._join = transport, join
        self.greet()

    def greet(self):
        """Introduce itself to the engine at `HERE`, unless it has."""

        def post(asked):
            return {HERE: http.JoinReply((self._join(asked[HERE]),), "once")}

        self.connect({HERE: (self.transport, hello_of())}, post, Deadline(20.0))

    @property
    def here(self):
        """The address that ranks are told."""
        return self.address(HERE, self.transport)

    @property
    def control(self):
        """Where the ranks are heard."""
        return self._ends[self.transport]._control

    def ask(self, plan, url=HERE):
        """The request that makes the ranks of an engine come."""
        self.outgoing = self.begin(plan, Layout(plan.manifest))
        self.greet()
        return self.outgoing.request(url, self.transport)

    def await_all(self, peers, timeout_s=20.0):
        """Return once these have come."""
        self.outgoing.await_ranks({self.transport: peers}, Deadline(timeout_s))

    def send(self, tensors):
        """Return once every rank has them."""
        self.outgoing.send(tensors, None)

    def settle(self):
        """What was sent is served."""
        self.served(self.outgoing)


def setup_method(asked):
    """The one that is sent this handshake."""
    return next(name for name in registry.setup_methods() if isinstance(asked, registry.handshake_of(name)))


class Rank:
    """A real receiver around a real model, and what it must hold whatever it is sent."""

    def __init__(self, folder):
        self.adapter = ModelAdapter(folder, CPU)
        self.receiver = Receiver(self.adapter)
        self.digest = self.adapter.digest()

    def ask(self, method, payload):
        """What it answers to a method, called as an engine does."""
        return http.from_json(handle(lambda: self.receiver, method, payload), http.RankReply)

    def done(self, method, message):
        """The same, where nothing may be wrong."""
        reply = self.ask(method, http.to_json(message))
        assert reply.error is None, reply.error
        return reply.body

    def join(self, asked):
        """Get ready for a trainer."""
        return http.from_json(self.done(setup_method(asked), asked), http.RankJoined)

    def prepare(self, request, transport="ipc_zmq"):
        """Come for a push."""
        self.done(f"update_weights_via_{transport}", request)

    def settled(self):
        """The state, once no push is under way."""
        end = time.monotonic() + SOON_S
        while (state := self.receiver.status().state) == "receiving" and time.monotonic() < end:
            time.sleep(0.0005)
        return state

    def assert_unharmed(self, model):
        """It has what it had, and takes a clean push by every transport."""
        assert self.receiver.status().state == "serving"
        assert self.adapter.digest() == self.digest
        for number, transport in enumerate(registry.names()):
            weights = {name: tensor + number for name, tensor in model.state_dict().items()}
            source, trainer = open_source(weights), Trainer(transport, self.join)
            self.prepare(trainer.ask(plan_of(transport, Layout(source.specs), BUCKET)), transport)
            trainer.await_all({RANK})
            trainer.send(source.tensors())
            self.done("weightsync_commit", http.CommitRequest(transport, "1", "retract", SOON_S))
            assert self.adapter.digest() == digest_of(weights.items())
            self.done("weightsync_abort", http.AbortRequest(release=trainer.here))
            trainer.close()
