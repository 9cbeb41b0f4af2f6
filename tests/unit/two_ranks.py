"""A front end over two small ranks, with trainers driven by hand or by `Sender`; all of them the real ones."""

import asyncio
import functools
import socket
import threading
import time

import torch
import uvicorn
from starlette.applications import Starlette

from tests.helpers import plan_of
from tests.unit import manual
from tests.unit.test_states import DictAdapter
from weightsync import testing
from weightsync.engine import front_end, metrics, rank_methods, receiver, routes
from weightsync.protocol import auth, http
from weightsync.tensors import layout
from weightsync.transports.base import Peer

#: Seconds: longer than anything takes on a busy machine.
PATIENCE_S = 60
SERVING = {x: [("serving", x)] * 2 for x in range(4)}
WEIGHTS = {x: {name: torch.full_like(t, x) for name, t in DictAdapter().weights.items()} for x in range(4)}


class Front(testing.ReferenceFrontEnd):  # of two small ranks; a method in `gates` comes to them when its gate opens
    def __init__(self, adapter=DictAdapter):
        super().__init__(adapter(), "none", False)
        self.ranks, self.gates = [self._receiver, receiver.Receiver(adapter())], {}
        self.ranks[1]._adapter.rank = 1
        self.front_end = front_end.FrontEnd(self, metrics.of_server())

    async def call(self, method, payload):
        if gate := self.gates.get(method):
            await asyncio.to_thread(gate.wait, PATIENCE_S)
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self._loop, rank_methods.handle)
        return [await run(lambda r=rank: r, method, payload) for rank in self.ranks]

    def seen(self):  # the state of each rank, and the numbers its weights are made of: one, unless it is torn
        made_of = [{float(x) for t in rank._adapter.weights.values() for x in t.view(-1)} for rank in self.ranks]
        return [(rank.status().state, *numbers) for rank, numbers in zip(self.ranks, made_of, strict=True)]

    def close(self):
        for rank in self.ranks:
            rank.abort()
            for end in rank._ends.values():
                end.close()
        self._loop.shutdown()


class Trainer(manual.Trainer):  # by hand: it calls the methods of a replica
    def __init__(self, front_end, owner):
        super().__init__()
        self.front_end, self.owner, self.layout = front_end, owner, layout.Layout(DictAdapter().expected().specs)

    async def stage(self, push, value=None, **more):
        plan = plan_of(push, self.layout, 1024, **{"owner": self.owner, "holder": self.owner, "keep": True, **more})
        await self.front_end.prepare(self.ask(plan, "http://a"), "update_weights_via_ipc_zmq")
        if value is not None:
            await self.transfer(value)

    async def transfer(self, value):
        peers = {Peer("http://a", 0), Peer("http://a", 1)}
        await asyncio.to_thread(self.await_all, peers, PATIENCE_S)
        await asyncio.to_thread(self.send, WEIGHTS[value].values())

    async def commit(self, version, **more):
        more = {"push": version, "version": version, "pause": "keep", "timeout_s": 5.0, "owner": self.owner, **more}
        await self.front_end.commit(http.CommitRequest(**more))
        self.settle()


class Engine(Front):  # behind the real routes, on a real socket
    def __init__(self, adapter=DictAdapter):
        super().__init__(adapter)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        admin = routes.admin_routes(lambda: self.front_end, auth.engine_token())
        app = Starlette(routes=[*testing.metrics_routes(), admin])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([listening],))
        self._thread.start()

    def close(self):
        super().close()
        self._server.should_exit = True
        self._thread.join()


def one_engine(made, adapter=DictAdapter):
    """A front end, and two trainers that may push to it."""
    front = made(Front(adapter))
    return front, made(Trainer(front.front_end, "one")), made(Trainer(front.front_end, "two"))


def driven(test):
    return functools.wraps(test)(lambda **fixtures: asyncio.run(test(**fixtures)))


def until(true, what):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


async def queued(front, coroutine):
    turn = front.front_end._turn
    before, task = turn._waiting, asyncio.ensure_future(coroutine)
    await asyncio.to_thread(until, lambda: turn._waiting > before, "it does not wait")
    return task
