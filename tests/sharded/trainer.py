"""One rank of a sharded trainer, controlled by lines of its standard input.

``python -m tests.sharded.trainer RANK SIZE ADDRESS PORT FOLDER`` answers each line, the name of a method of `Rank` and
its argument, with a line of JSON.
"""

import contextlib
import io
import json
import os
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers import keen
from tests.sharded import placements
from tests.sharded.splits import Splits
from tools import models
from weightsync import LocalShard, Sender
from weightsync.errors import WeightSyncError
from weightsync.memory import arenas
from weightsync.protocol import http
from weightsync.sources.lora import LoraSource, open_lora
from weightsync.testing import ReferenceInProcess
from weightsync.trainer import push_plan
from weightsync.trainer.ranks import assembly, follower
from weightsync.trainer.ranks.messages import Called, Greeting
from weightsync.transports.nccl.groups import Group
from weightsync.transports.nixl.agents import Transfers

#: How torch gathers a DTensor, which only iterators may do here.
FULL_TENSOR = DTensor.full_tensor


#: How a process finds out which host it is on.
HOST_ID = arenas.host_id


def refused(*_, **__):
    raise AssertionError("a push gathers nothing")


class Rank(Splits):
    """The state of a rank: its weights and its sender."""

    def __init__(self, folder):
        self.folder, self.size = folder, dist.get_world_size()
        self.weights = self.sender = self.group = None
        self.written = []
        write = assembly.write

        def counting(*args):
            work = write(*args)
            self.written.append(work.nbytes)
            return work

        assembly.write = counting
        #: Bytes of each broadcast, and the number of each bucket written, of this rank; what happens before the second;
        #: by how much torch ends broadcasts earlier.
        self.sent, self.happens, self.sooner_s = [], None, 0.0
        broadcast, post = Group.broadcast, Transfers.post

        def broadcasting(group, tensor, timeout_s):
            self._note(tensor.nbytes)
            return broadcast(group, tensor, timeout_s - self.sooner_s)

        def writing(transfers, bucket, *rest):
            if transfers.moves(bucket):
                self._note(bucket)
            return post(transfers, bucket, *rest)

        Group.broadcast, Transfers.post = broadcasting, writing

    def _note(self, sent):
        self.sent.append(sent)
        if self.happens is not None and len(self.sent) == 2:
            self.happens()

    def shard(self, how):
        """Load the model and split it in the way that ``how`` names."""
        model = models.load_reference(self.folder)
        self.weights = getattr(self, f"_{how}")(model, model.state_dict(), dist.get_rank())

    def load(self, folder):
        """From now on this rank has the model of another folder."""
        self.folder = folder

    def release(self, folder):
        """From now on this rank has the version of the package that the metadata in a folder says; empty: its own."""
        sys.path[:] = [folder, *sys.path] if folder else sys.path[1:]
        http.package_version.cache_clear()

    def greet(self, how):
        """From now on this rank greets as a release with other fields does; as this one, if ``how`` is empty."""
        follower.Greeting = (lambda nonce, *rest: Called(nonce, rest[7])) if how else Greeting

    def build(self, options):
        options = json.loads(options)
        self.sender = Sender(options.pop("urls"), group=self.group, **options)

    def build_apart(self, options):
        """As `build`, with options that may differ between the ranks: one for each."""
        self.build(json.dumps(json.loads(options)[dist.get_rank()]))

    def gather(self, ranks):
        """From now on these ranks are the trainer."""
        self.group = dist.new_group(list(map(int, ranks.split())))

    def to_gpu(self, _):
        """Move what this rank holds, which are boxes of tensors, to the GPU."""
        state = self._state().items()
        self.weights = {name: LocalShard(one.tensor.cuda(), one.shape, one.start) for name, one in state}

    def arenas(self, _):
        """The devices of the arenas that this rank has."""
        first = dist.get_rank() == 0
        own = self.sender._driver._transfer._arenas if first else self.sender._ranks._own.values()
        return [arena.bytes.device.type for arena in own]

    def device_bytes(self, _):
        """The GPU memory that this rank holds beside its weights."""
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated() - sum(one.tensor.nbytes for one in self._state().values())

    def share(self, _):
        """Move what this rank holds into shared memory, where others can map it."""
        for tensor in self._local():
            tensor.share_memory_()

    def move(self, _):
        """Move every other tensor of this rank, which holds plain ones, to other shared memory."""
        for tensor in list(self._state().values())[::2]:
            before = tensor.data_ptr()
            tensor.data = tensor.clone().share_memory_()
            assert tensor.data_ptr() != before

    def shares(self, minor):
        """From now on engines of an older minor version of the protocol cannot read in place what ranks hold."""
        push_plan.SHARED_SHARDS_MINOR = int(minor)

    def diverge(self, number):
        """Change one element of this rank's last tensor."""
        tensor = list(self._state().values())[-1]
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).view(-1)[int(number)] += 1

    def elsewhere(self, host):
        """From now on this rank reports another host; its own again if none is named."""
        arenas.host_id = (lambda: host) if host else HOST_ID

    def apart(self, _):
        """From now on this process has an arena of its own, as on a GPU."""
        arenas.is_shared = lambda device: False

    def needs(self, minor):
        """From now on engines of an older minor version of the protocol are too old for several hosts."""
        push_plan.SEVERAL_HOSTS_MINOR = int(minor)

    def unreachable(self, _):
        """From now on this rank cannot reach a store."""
        dist.TCPStore, self.store = self._no_store, dist.TCPStore

    def _no_store(self, *_, **__):
        raise RuntimeError("no route to host")

    def frozen(self, signal):
        """From now on this rank gets a signal when it connects to a store."""
        store = dist.TCPStore

        def find(*args, **kwargs):
            os.kill(os.getpid(), int(signal))
            return store(*args, **kwargs)

        dist.TCPStore, self.store = find, store

    def reachable(self, _):
        dist.TCPStore = self.store

    def push(self, _):
        return self._push(self.weights)

    def push_without(self, prefix):
        """Push what lacks tensors whose names begin so, which the engines may keep."""
        result = self.sender.push(self.weights, allow_missing=[f"{prefix}*"])
        return {"version": result.version, "kept": result.kept}

    def push_adapter(self, asked):
        """Push the adapter of a folder, of which each rank holds the part that ``asked`` says."""
        how, folder, version = asked.split()
        opened, rank = open_lora(folder, "policy"), dist.get_rank()
        tensors = dict(zip((spec.name for spec in opened.specs), opened.tensors(), strict=True))
        held = LoraSource(getattr(self, f"_{how}")(tensors, tensors, rank), opened.adapter)
        own = self.sender._sources.open
        self.sender._sources.open = lambda *_: held
        try:
            result = self.sender.push(folder, lora="policy", version=version)
        finally:
            self.sender._sources.open = own
        return {"version": result.version, "lora": result.lora, "nbytes": result.nbytes}

    def push_drafted(self, folder):
        """Push the model with a draft from a folder, which FSDP2 shards too."""
        result = self.sender.push(self.weights, draft=self._fsdp(models.load_reference(folder)))
        return {"version": result.version, "kept": result.kept}

    def rollback_adapter(self, _):
        return {"version": self.sender.rollback(lora="policy").version}

    def watch(self, _):
        """Push, and return what was drawn of it."""
        with contextlib.redirect_stderr(io.StringIO()) as drawn:
            self.sender.push(self.weights)
        return drawn.getvalue()

    def spoil(self, _):
        """Push a tensor with a partial placement, whose values no rank holds."""
        state = self._state()
        name, mesh = next(iter(state)), dist.init_device_mesh("cpu", (self.size,))
        whole = torch.zeros(state[name].shape, dtype=torch.bfloat16)
        return self._push({**state, name: DTensor.from_local(whole, mesh, [Partial()])})

    def lose(self, _):
        """Push tensors of which one can no longer be read when it is written."""

        def lose():
            raise OSError("the disk is gone")

        return self._push(self._once_opened(lose))

    def halt(self, signal):
        """Push and get a signal while writing."""
        return self._push(self._once_opened(lambda: os.kill(os.getpid(), int(signal))))

    def stall(self, signal):
        """Push and get a signal while sending."""
        self.happens = lambda: os.kill(os.getpid(), int(signal))
        try:
            return self._push(self.weights)
        finally:
            self.happens = None

    def hasten(self, seconds):
        """From now on torch ends broadcasts this many seconds earlier."""
        self.sooner_s = float(seconds)

    def _once_opened(self, happens):
        state, asked = self._state(), []

        class Mapping(dict):
            def __getitem__(self, name):
                asked.append(name)
                if len(asked) == 3:
                    happens()
                return super().__getitem__(name)

        return Mapping(state)

    def _push(self, weights):
        self.written.clear()
        self.sent.clear()
        with CommDebugMode() as comm:
            result = self.sender.push(weights)
        assert comm.get_total_counts() == 0
        return {
            "version": result.version,
            "nbytes": result.nbytes,
            "written": sum(self.written),
            "sent": self.sent,
            "cast": result.cast,
            "delta": None if result.delta is None else (result.delta.whole + result.delta.changed, result.delta.same),
        }

    def keen(self, _):
        """From now on this rank sends what has changed whatever that costs."""
        keen().start()

    def push_async(self, _):
        """Push in the background, and train at once."""
        future = self.sender.push_async(self.weights)
        self.change("")
        result = future.result()
        self.change("")
        return {"version": result.version, "read": result.read}

    def fail_async(self, _):
        """Push in the background what can no longer be read when it is written."""

        def lose():
            raise OSError("the disk is gone")

        self.sender.push_async(self._once_opened(lose)).result()

    def iterate(self, early):
        """Push an iterator that makes each tensor together with the other ranks; only rank 0's are right."""

        def gathered():
            for number, (name, tensor) in enumerate(self._state().items()):
                if early and number == int(early):
                    return
                yield name, self._gathered(tensor)

        result = self.sender.push(gathered())
        return {"version": result.version, "read": result.read}

    def iterate_shuffled(self, unknown):
        """Push an iterator of a module's parameters, in random order; ``unknown``: the third has another name."""
        found = dict(self.weights.named_parameters())
        names = random.Random(1).sample(sorted(found), len(found))
        pairs = ((name, self._gathered(found[name])) for name in names)
        renamed = ((unknown if unknown and name == names[2] else name, whole) for name, whole in pairs)
        result = self.sender.push(renamed)
        return {"version": result.version, "read": result.read}

    def _gathered(self, tensor):
        if isinstance(tensor, DTensor):
            tensor = FULL_TENSOR(tensor)
        else:
            dist.all_reduce(torch.ones(1))
        return tensor.clone() if dist.get_rank() == 0 else torch.zeros_like(tensor)

    def _state(self):
        return self.weights if isinstance(self.weights, dict) else dict(self.weights.state_dict())

    def change(self, name):
        """Negate all weights, or those of one name, on every rank alike."""
        for found, tensor in zip(self._state(), self._local(), strict=True):
            if name in ("", found):
                tensor.neg_()

    def _local(self):
        for tensor in self._state().values():
            yield tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "tensor", tensor)

    def status(self, _):
        replies = self.sender.status(digest=True)
        return {url: [rank.digest for rank in reply.ranks] for url, reply in replies.items()}

    def rollback(self, _):
        return {"version": self.sender.rollback().version}

    def add(self, url):
        caught_up = self.sender.add_engine(url)
        return {"transport": caught_up.transport if caught_up is not None else ""}

    def own(self, _):
        """Add an engine of this process, which each rank would have."""
        engine = ReferenceInProcess(self.folder)
        try:
            self.sender.add_engine(engine)
        finally:
            engine.close()

    def remove(self, url):
        self.sender.remove_engine(url)

    def catch_up(self, _):
        return sorted(self.sender.catch_up())

    def close(self, _):
        self.sender.close()

    def keys(self, _):
        """The number of keys in the process group's store."""
        return dist.distributed_c10d._get_default_store().num_keys()

    def placements(self, _):
        """Check the local parts of DTensors against torch; returns what this rank holds of each."""
        return placements.check_all()

    def modules(self, _):
        """The same for modules that FSDP2 has sharded."""
        return [placements.check_modules(), placements.check_computed()]


def main():
    rank, size, host, port, folder = sys.argv[1:]
    # Keeps what libraries print apart from the answers.
    answers, sys.stdout = os.fdopen(os.dup(1), "w", buffering=1), sys.stderr
    address = f"tcp://{host}:{port}"
    dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=int(size))
    here = Rank(folder)
    DTensor.full_tensor = refused
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        try:
            said = getattr(here, word)(rest)
        except WeightSyncError as error:
            said = {"error": type(error).__name__, "message": str(error), "engines": error.engines}
        answers.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
