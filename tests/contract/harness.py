"""A trainer and the ranks of two engines for any transport, and the tensors that the tests send."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.contract.sources import Sources
from tests.helpers import plan_of
from weightsync.deadline import Deadline
from weightsync.engine.stage import Stages
from weightsync.protocol import http
from weightsync.tensors.any_order import Order
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.subset import Subset
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry
from weightsync.transports.base import Peer

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8]
A, B = "http://127.0.0.1:8001", "http://localhost:8002"


class Harness:
    """A trainer's transfer, the engine ends of one engine with two ranks and one with a single rank, and pushes."""

    def __init__(self, transport, sources=1):
        self.transport = transport
        self.sources = Sources(transport, sources) if sources > 1 else None
        self.transfer = Transfer(CPU, self.sources)
        self.peers = {peer: registry.spec(transport).engine_end(CPU) for peer in (Peer(A, 0), Peer(A, 1), Peer(B, 0))}
        self.cancelled = threading.Event()
        self.threads = ThreadPoolExecutor(len(self.peers))
        self.stages = {}
        self.pushes = 0
        self.instances = {A: "a", B: "b"}
        #: Wraps what a rank receives before it reaches the stage; tests replace it.
        self.through = lambda incoming: incoming

    def hellos(self):
        """The engines' open replies, with the fields that transports use."""
        return {
            url: (self.transport, hello(url, self.instances[url], sum(peer.engine == url for peer in self.peers)))
            for url in {peer.engine: None for peer in self.peers}
        }

    def join(self, asked):
        """Pass each engine's handshake to its ranks; returns the replies by URL."""
        return {
            url: http.JoinReply(
                tuple(end.join(message, peer.rank) for peer, end in self.peers.items() if peer.engine == url),
                self.instances[url],
            )
            for url, message in asked.items()
        }

    def push(
        self,
        tensors,
        bucket_bytes,
        *,
        timeout_s=60.0,
        absent=(),
        manifest=None,
        slots=2,
        stream=False,
        needs=None,
        order=None,
    ):
        """Push ``tensors``; returns what each rank received, as tensors, by peer.

        ``needs`` maps a peer to the boxes that it needs, by tensor number; other peers need everything. Several
        sources share an arena that holds the whole stream, whatever ``slots`` says. ``order`` has the numbers of the
        tensors in the order in which they are sent.
        """
        self.pushes += 1
        layout = Layout([spec_of(f"t{n}", tensor) for n, tensor in enumerate(manifest or tensors)])
        if self.sources is not None:
            slots = max(slots, layout.buckets(bucket_bytes))
        more = {"slots": slots, "stream": stream, "any_order": order is not None}
        plan = plan_of(f"push-{self.pushes}", layout, bucket_bytes, timeout_s, **more)
        deadline, jobs = Deadline(timeout_s), {}
        outgoing = self.transfer.begin(plan, layout)
        try:
            self.transfer.connect(self.hellos(), self.join, deadline)
            requests = {url: outgoing.request(url, self.transport) for url in self.hellos()}
            jobs = {
                peer: self.threads.submit(
                    self._receive, end, requests[peer.engine], Subset(layout, (needs or {}).get(peer, {})), peer.rank
                )
                for peer, end in self.peers.items()
                if peer not in absent
            }
            outgoing.await_ranks({self.transport: set(self.peers)}, deadline)
            if order is None:
                send(outgoing, self.sources, iter(tensors), deadline)
            else:
                place = Order()
                pairs = (((place.placed(layout.entries[number]),), tensors[number]) for number in order)
                outgoing.send_pairs(pairs, {}, lambda sent: None)
        except BaseException as error:
            self.transfer.cancel(error)
            self.transfer.close()  # as a sender does
            raise
        finally:
            self.outcomes = {peer: job.exception(timeout=60) for peer, job in jobs.items()}
        received = {peer: job.result() for peer, job in jobs.items()}
        if stream:
            return received
        return {peer: [entry.view(stage) for entry in layout.entries] for peer, stage in received.items()}

    def _receive(self, end, request, parts, rank):
        stages = self.stages.setdefault(end, Stages(rank, CPU))
        try:
            incoming = self.through(end.open(request, parts, rank, self.cancelled))
            if request.stream:
                end.confirm(request.push, 0.0)
                return [tensor.clone() for _, tensor in stages.stream(incoming, request, parts.layout)]
            staged, verify_s = stages.fill(incoming, request, parts, None)
        except Exception as error:
            end.fail(request.push, error)
            raise
        end.confirm(request.push, verify_s)
        return staged.data

    def close(self):
        self.cancelled.set()
        self.threads.shutdown()
        if self.sources is not None:
            self.sources.close()
        for end in (self.transfer, *self.peers.values()):
            end.close()
            end.close()


def send(outgoing, sources, tensors, deadline):
    """Send from rank 0 alone or, with ``sources``, from an arena that is filled before the first bucket is sent."""
    if sources is None:
        outgoing.send(tensors, lambda sent: None)
    else:
        outgoing.send_filled(sources, tensors, deadline, lambda sent: None)


def hello(url, instance, ranks):
    """The open reply of an engine on the CPU."""
    infos = tuple(http.RankInfo(rank=rank, pid=os.getpid(), device="cpu") for rank in range(ranks))
    return http.OpenReply(
        protocol=http.PROTOCOL,
        engine="test",
        engine_version="",
        package_version="",
        host="",
        model="",
        version="",
        ranks=infos,
        instance=instance,
    )


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_tensors(seed=0):
    """Tensors of every dtype with odd shapes, scalars, empty tensors and views that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=generator)
    shapes = [(), (1,), (0,), (3, 0, 2), (7,), (511,), (33, 17), (5, 3, 2), (128, 64)]
    tensors = []
    for dtype in DTYPES:
        for shape in shapes:
            size = torch.Size(shape).numel()
            tensors.append(raw[: size * dtype.itemsize].view(dtype).view(shape).clone())
            raw = raw.roll(1)
    dense = torch.arange(64 * 96, dtype=torch.float32).view(64, 96)
    return [*tensors, dense.t(), dense[::2, 1:50], dense.view(4, 16, 96)[:, 3:7]]


def assert_equal(received, sent):
    for tensors in received.values():
        for got, want in zip(tensors, sent, strict=True):
            assert got.shape == want.shape
            assert torch.equal(bits(got), bits(want))


class Flipped:
    """Flips a bit of the stage while a bucket is verified: while each is, or only bucket ``during``."""

    def __init__(self, incoming, at, during=None):
        self.whole, self.arena, self._incoming = incoming.whole, incoming.arena, incoming
        self._at, self._during = at, during
        self.lingers = incoming.lingers

    def buckets(self, stage):
        memory = stage if self.whole is None else self.whole
        for bucket in self._incoming.buckets(stage):
            flipped = int(self._during in {None, bucket.number})
            memory[self._at] ^= flipped
            yield bucket
            memory[self._at] ^= flipped  # the memory may be the trainer's
