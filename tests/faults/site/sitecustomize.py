"""Injects faults into any process that has this folder on its PYTHONPATH, at the points where weightsync acts.

The file named by FAULT_FILE orders one fault: ``{"point": ..., "where": {...}, "action": ...}``. The first process that
reaches the point renames the file to ``.fired`` and suffers the fault. The code under test is not replaced: each method
runs unchanged, and the fault happens before it, after it, or to the data that passes through it.
"""

import functools
import itertools
import json
import os
import signal
import sys
import threading
import time

import plan_faults

from tests import after_import

FILE = os.environ.get("FAULT_FILE", "")


#: The rank that this process is.
HERE = {}


class Injected(RuntimeError):
    """The injected exception."""


def at(point, **facts):
    """Suffer the fault that is ordered for this point, if any; returns its action."""
    try:
        with open(FILE) as file:
            order = json.load(file)
        if order["point"] != point or any(facts.get(key) != value for key, value in order["where"].items()):
            return ""
        if (times := order.get("times", 1)) > 1:
            with open(FILE + ".next", "w") as file:
                json.dump({**order, "times": times - 1}, file)
            os.rename(FILE + ".next", FILE)
        else:
            os.rename(FILE, FILE + ".fired")
            os.utime(FILE + ".fired")
    except (OSError, ValueError):
        return ""
    action = order["action"]
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        # A signal to the thread takes effect at once; one to the process may be delivered later.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif action == "raise":
        raise Injected(f"injected at {point}")
    elif action == "hold":
        # Wait until the file is removed by the process that ordered the fault.
        while os.path.exists(FILE + ".fired"):
            time.sleep(0.002)
    elif action in ("clock forward", "clock back"):
        real, shift = time.time, 86400.0 * (1 if action == "clock forward" else -1)
        time.time = lambda: real() + shift
    return action


def around(owner, name):
    """Replace a method by ``wrapper(original, self, ...)``."""

    def put(wrapper):
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs)))

    return put


# --- in a rank --------------------------------------------------------------------------------------------------------


def faulty(adapter, first, *, last):
    """The loader of an adapter, whose tensors are numbered from ``first`` on; ``last``: nothing is loaded after it."""
    load = adapter.load

    def loading(weights):
        recorded = False

        def passing():
            nonlocal recorded
            for number, pair in enumerate(weights, first):
                recorded = type(pair[1]).__name__ == "FakeTensor"
                yield pair
                if not recorded:
                    at("rank loads", tensor=number, rank=adapter.rank)

        arm_post_load(adapter)
        load(passing())
        if last and not recorded:
            at("rank loaded", rank=adapter.rank)

    return loading


def receiver(module):
    @around(module.Receiver, "__init__")
    def made(original, self, adapter):
        original(self, adapter)
        draft = getattr(adapter, "_draft", None)
        adapter.load = faulty(adapter, 0, last=draft is None)
        if draft is not None:  # it is loaded after the model
            draft.load = faulty(draft, len(adapter.expected().specs), last=True)
        HERE["rank"] = adapter.rank

    @around(module.Receiver, "prepare")
    def prepare(original, self, *args):
        at("rank prepares", rank=self._adapter.rank)
        return original(self, *args)

    @around(module.Receiver, "_quiesce")
    def quiesce(original, self):
        at("rank stops", rank=self._adapter.rank)
        return original(self)


def standby(module):
    def counted(self, weights, check):
        rank = self._adapter.rank

        def passing():
            for number, pair in enumerate(weights()):
                yield pair
                at("rank loads", tensor=number, rank=rank)

        def checked(model):
            at("rank loaded", rank=rank)
            check(model)

        arm_post_load(self._adapter)
        return passing, checked

    @around(module.Standby, "load")
    def load(original, self, push, layout, weights, check, *more):
        original(self, push, layout, *counted(self, weights, check), *more)

    @around(module.Standby, "prove")
    def prove(original, self, push, plan, hooks, staged, weights, check, *more):
        original(self, push, plan, hooks, staged, *counted(self, weights, check), *more)

    @around(module.Standby, "fill")
    def fill(original, self, *args):
        arm_post_load(self._adapter)
        original(self, *args)

    @around(module.Standby, "exchange")
    def exchange(original, self):
        module, copies = sys.modules["weightsync.engine.exchange.swap"], sys.modules["weightsync.tensors.native_copy"]
        swap, run, numbers = module._set_data, copies._run, itertools.count()

        def count():
            at("rank exchanges", tensor=next(numbers), rank=self._adapter.rank)

        def faulty(*both):
            count()
            swap(*both)

        module._set_data, copies._run = faulty, lambda calls: run((call, count())[0] for call in calls)
        try:
            original(self)
        finally:
            module._set_data, copies._run = swap, run


def arm_post_load(adapter):
    """Make the engine's own post-load step fail once."""
    if type(adapter).__name__ == "VllmAdapter":
        for layer in adapter._worker.model_runner.get_model().modules():
            method = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                break
        kind, name = type(method), "process_weights_after_loading"
    elif type(adapter).__name__ == "SglangAdapter":
        kind, name = type(adapter._scheduler.tp_worker.model_runner.weight_updater), "end_weight_update"
    else:
        return
    if not hasattr(getattr(kind, name), "__wrapped__"):

        @around(kind, name)
        def post_load(original, *args, **kwargs):
            at("post-load hook", rank=adapter.rank)
            return original(*args, **kwargs)


def adapters(module):
    @around(module.LoraLoading, "__init__")
    def made(original, self, adapter):
        original(self, adapter)
        hooks = adapter.lora_hooks

        def faulty():
            found = hooks()
            serve = found.serve

            def serving(*served):
                serve(*served)
                at("rank serves adapter", rank=adapter.rank)

            found.serve = serving
            return found

        adapter.lora_hooks = faulty


def engine_control(module):
    @around(module.EngineControl, "open")
    def open_control(original, self, request, subset, rank, mapped, cancelled):
        self.fault_rank = rank
        at("rank connects", rank=rank)
        session, offer = original(self, request, subset, rank, mapped, cancelled)
        session.fault_rank = rank
        if at("rank connected", rank=rank) == "cut":
            self._sockets[0].disconnect(request.address)
        return session, offer

    @around(module.EngineControl, "confirm")
    def confirm(original, self, push, verify_s):
        action = at("rank confirms", rank=self.fault_rank)
        if action != "drop":
            original(self, push, verify_s)


def trainer_control(module):
    @around(module.PushSession, "announce")
    def announce(original, self, index, *args, **more):
        if getattr(self, "cut_short", False):
            return
        action = at("trainer announces", number=index)
        original(self, index, *args, **more)
        self.cut_short = action == "truncate"

    @around(module.PushSession, "tell")
    def send(original, self, peer, message):
        kind = type(message).__name__
        action = at("trainer tells", kind=kind, number=getattr(message, "index", 0))
        if action == "drop":
            return
        if action == "cut":
            for address in self._control._addresses.values():
                self._control.socket.unbind(address)
        if action == "reorder":
            message = type(message)(push=message.push, index=message.index + 1, digests=message.digests)
        original(self, peer, message)
        if action == "duplicate":
            original(self, peer, message)


def incoming(*names):
    def patch(module):
        for name in names:

            @around(getattr(module, name), "buckets")
            def buckets(original, self, stage):
                for bucket in original(self, stage):
                    action = at("rank takes", bucket=bucket.number, rank=self._session.fault_rank)
                    if action == "flip":
                        bucket.data[bucket.data.numel() // 2] ^= 1
                    if action == "cut":
                        self._session._socket.disconnect(self._request.address)
                    yield bucket

    return patch


def outgoing(module):
    @around(module.Outgoing, "_announce")
    def announce(original, self, number, *more):
        plan = self.plan
        action = at("trainer packs", number=number)
        if action == "flip":
            self.arena.bytes[number % plan.slots * plan.bucket_bytes + 1000] ^= 1
        original(self, number, *more)


# --- in the ranks of a trainer ----------------------------------------------------------------------------------------


def follower(module):
    @around(module.Follower, "_take_part")
    def take_part(original, self, what, *more):
        self.fault_call, self.fault_number = what, -1
        return original(self, what, *more)

    @around(module.Follower, "_attempt")
    def attempt(original, self, *asked):
        self.fault_number += 1
        where = {"call": self.fault_call, "number": self.fault_number}
        at("trainer rank begins", **where)
        done = original(self, *asked)
        at("trainer rank has done", **where)
        return done


def nccl_group(module):
    @around(module.Group, "broadcast")
    def broadcast(original, self, *what):
        work = original(self, *what)
        at("bytes are under way")
        return work


def nixl_transfers(module):
    @around(module.Transfers, "post")
    def post(original, self, bucket, *more):
        original(self, bucket, *more)
        if self.moves(bucket):
            at("bytes are under way")


# --- in the trainer and in an engine's front end ----------------------------------------------------------------------


def client(module):
    @around(module.EngineClient, "__init__")
    def made(original, self, url, token):
        original(self, url, token)
        ask = self._server.ask

        def faulty(method, path, body, *more, **options):
            route = path.rpartition("/")[2]
            at("trainer asks", route=route)
            if body and at("trainer is cut off", route=route) == "cut":
                raise module.http_client.NoAnswer("injected before the request")
            reply = ask(method, path, body, *more, **options)
            if at("trainer was answered", route=route) == "cut":
                raise module.http_client.NoAnswer("injected before the reply")
            return reply

        self._server.ask = faulty


def front_end(module):
    @around(module.FrontEnd, "prepare")
    async def prepare(original, self, asked, method):
        at("front end prepares")
        return await original(self, asked, method=method)

    @around(module.FrontEnd, "_commit")
    async def commit(original, self, asked):
        at("front end commits")
        reply = await original(self, asked)
        at("front end committed")
        return reply


def compat_pause(module):
    @around(module.HeldScheduler, "pause")
    def pause(original, self, core, mode):
        at("replica stops", replica=getattr(core, "engine_index", 0))  # an engine in process has none
        return original(self, core, mode)


PATCHES = {
    "vllm_weightsync.compat_pause": compat_pause,
    "weightsync.engine.lora": adapters,
    "weightsync.engine.receiver": receiver,
    "weightsync.engine.loading.standby": standby,
    "weightsync.transports.control.engine": engine_control,
    "weightsync.transports.control.trainer": trainer_control,
    "weightsync.transports.ipc_zmq": incoming("MappedIncoming"),
    "weightsync.transports.nccl.engine": incoming("BroadcastIncoming"),
    "weightsync.transports.nixl.incoming": incoming("NixlIncoming"),
    "weightsync.transports.nccl.groups": nccl_group,
    "weightsync.transports.nixl.agents": nixl_transfers,
    "weightsync.trainer.ranks.follower": follower,
    "weightsync.trainer.outgoing": outgoing,
    "weightsync.trainer.client": client,
    "weightsync.engine.front_end": front_end,
    **plan_faults.patches(at, around, HERE),
}


if FILE:
    for loaded in PATCHES.keys() & sys.modules.keys():  # where this process was forked, see `tests.forked`
        PATCHES[loaded](sys.modules[loaded])
    after_import.change(PATCHES)
