"""A trainer and a rank that a test drives step by step."""

import time

import torch

from tests.helpers import plan_of
from weightsync.deadline import Deadline
from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.protocol import http, rank_replies
from weightsync.sources import open_source
from weightsync.tensors.layout import Layout, digest_of
from weightsync.testing import ModelAdapter
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry
from weightsync.transports.base import Peer

CPU = torch.device("cpu")
SOON_S = 60.0
BUCKET = 64 << 10
#: The URL of an engine with one rank that only needs an address. Over ipc_zmq any other URL works as well.
HERE = "http://127.0.0.1:1"
RANK = Peer(HERE, 0)


def hello_of(*ranks, host="", instance="once"):
    """An engine's open reply with the fields that a trainer's transports use; by default with one rank."""
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
    """A sender's transfer and its current push. ``join`` takes the engine's handshake and returns its rank's answer."""

    def __init__(self, transport="ipc_zmq", join=None):
        super().__init__(CPU)
        self.transport, self._join = transport, join
        self.connect_here()

    def connect_here(self):
        """Connect to the engine at `HERE`, unless that has been done."""

        def post(asked):
            return {HERE: http.JoinReply((self._join(asked[HERE]),), "once")}

        self.connect({HERE: (self.transport, hello_of())}, post, Deadline(20.0))

    @property
    def here(self):
        """The address that ranks are given."""
        return self.address(HERE, self.transport)

    @property
    def control(self):
        """The control end, where messages of ranks arrive."""
        return self._ends[self.transport]._control

    def ask(self, plan, url=HERE):
        """Begin a push; returns the request that makes the ranks of an engine connect."""
        self.outgoing = self.begin(plan, Layout(plan.manifest))
        self.connect_here()
        return self.outgoing.request(url, self.transport)

    def await_all(self, peers, timeout_s=20.0):
        """Wait until these ranks have connected."""
        self.outgoing.await_ranks({self.transport: peers}, Deadline(timeout_s))

    def send(self, tensors):
        """Send the tensors; returns once every rank has them."""
        self.outgoing.send(tensors, lambda sent: None)

    def settle(self):
        """Note that the push is served."""
        self.served(self.outgoing)


def setup_method(asked):
    """The name of the rank method that takes this handshake."""
    return next(name for name in registry.setup_methods() if isinstance(asked, registry.handshake_of(name)))


def answer_of(receiver, method, payload):
    """A rank's reply to a method that is called as an engine calls it. A busy rank is asked again, as by front ends,
    but not from inside a load, which ends only after the call."""
    end = time.monotonic() + SOON_S
    while True:
        reply = http.from_json(handle(lambda: receiver, method, payload), rank_replies.RankReply)
        if not reply.later or receiver.status().state.endswith("applying") or time.monotonic() > end:
            return reply


class Rank:
    """A real receiver around a real model, and the digest that it must keep whatever it is sent."""

    def __init__(self, folder):
        self.adapter = ModelAdapter(folder, CPU)
        self.receiver = Receiver(self.adapter)
        self.digest = self.adapter.digest()

    def ask(self, method, payload):
        """See `answer_of`."""
        return answer_of(self.receiver, method, payload)

    def done(self, method, message):
        """Call a method that must not fail; returns the body of the reply."""
        reply = self.ask(method, http.to_json(message))
        assert reply.error is None, reply.error
        return reply.body

    def join(self, asked):
        """Handle a trainer's handshake."""
        return http.from_json(self.done(setup_method(asked), asked), http.RankJoined)

    def prepare(self, request, transport="ipc_zmq"):
        """Accept a push."""
        self.done(f"update_weights_via_{transport}", request)

    def settled(self):
        """Wait until no push is under way; returns the state."""
        end = time.monotonic() + SOON_S
        while (state := self.receiver.status().state) == "receiving" and time.monotonic() < end:
            time.sleep(0.0005)
        return state

    def assert_unharmed(self, model):
        """Assert that the weights are unchanged and that a push over every transport works."""
        assert self.settled() == "serving"  # what was sent last may have been accepted
        assert self.adapter.digest() == self.digest
        for number, transport in enumerate(registry.available()):
            weights = {name: tensor + number for name, tensor in model.state_dict().items()}
            source, trainer = open_source(weights), Trainer(transport, self.join)
            self.prepare(trainer.ask(plan_of(transport, Layout(source.specs), BUCKET)), transport)
            trainer.await_all({RANK})
            trainer.send(source.tensors())
            self.done("weightsync_commit", http.CommitRequest(transport, "1", "retract", SOON_S))
            assert self.adapter.digest() == digest_of(weights.items())
            self.done("weightsync_abort", http.AbortRequest(release=trainer.here))
            trainer.close()
