"""Run by vLLM's Python: ``waves.py ROUNDS SEED``; pushes, users' pauses and requests in random orders.

Two replicas run vLLM's own loop and calls in threads, with vLLM's own coordinator; scheduler and model are reduced to
numbers of tokens, and a step waits for the other replica as experts do. Two servers call both replicas, and nobody
makes one replica handle the calls of both in the order in which the other does. Ends with an error if a reply or a
request never comes, if the replicas meet in two different collectives, or if a held replica makes a token.
"""

import faulthandler
import itertools
import os
import queue
import random
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import msgspec
import zmq
from torch.distributed import HashStore
from vllm.config import ParallelConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineShutdownState
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_weightsync import compat_agreement, compat_pause

#: Seconds; whatever takes longer never comes.
NEVER_S = 60.0
MODES = ("keep", "wait", "abort")


class Meeting:
    """A collective of two replicas: each waits for the other, and gets what both have brought."""

    def __init__(self):
        self._barrier = threading.Barrier(2)
        self._brought = [None, None]

    def __call__(self, number, kind, value=None):
        self._brought[number] = (kind, value)
        self._barrier.wait()
        kinds, values = zip(*self._brought, strict=True)
        self._barrier.wait()
        if len(set(kinds)) > 1:
            fail(f"the replicas meet in {kinds}")
        return values


def fail(why):
    print(why, *(vars_of(replica) for replica in REPLICAS), sep="\n", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def vars_of(replica):
    names = ("engines_running", "pending_pause", "ignore_start_dp_wave", "current_wave", "step_counter")
    return {name: getattr(replica, name) for name in names}, replica.scheduler.pause_state, replica.scheduler.left


class Scheduler:
    """How many tokens each request still gets; the first of them makes it one of the running."""

    def __init__(self):
        self.pause_state = PauseState.UNPAUSED
        self.left, self.running, self.made = {}, set(), 0

    def set_pause_state(self, state):
        self.pause_state = state

    def _ready(self):
        if self.pause_state == PauseState.PAUSED_ALL:
            return []
        return [key for key in self.left if key in self.running or self.pause_state == PauseState.UNPAUSED]

    def has_unfinished_requests(self):
        return bool(self._ready())

    has_requests = has_unfinished_requests

    def add(self, request):
        self.left[request.key] = request

    def make_tokens(self):
        ready = self._ready()
        for key in ready:
            self.made += 1
            self.running.add(key)
            self.left[key].tokens -= 1
            if not self.left[key].tokens:
                self._finish(key)
        return bool(ready)

    def _finish(self, key):
        self.running.discard(key)
        self.left.pop(key).finished.set()

    def finish_requests(self, ids, status):
        for key in list(self.left):
            self._finish(key)
        return []


class Replica(DPEngineCoreProc):
    def __init__(self, number, meet, store):
        self.dp_size, self.dp_store = 2, store
        self.engine_index = self.dp_rank = number
        self.meet, self.scheduler, self.dp_group = meet, Scheduler(), number
        self.has_coordinator, self.publish_dp_lb_stats, self.enable_fault_tolerance = True, False, False
        self.shutdown_state, self.eep_scaling_state, self.batch_queue = EngineShutdownState.RUNNING, None, None
        self.engines_running = self.pending_pause = self.ignore_start_dp_wave = False
        self.step_counter = self.current_wave = 0
        self.dp_sync_interval = 4
        self.log_stats = self.check_for_draft_tokens = False
        self.vllm_config = SimpleNamespace(observability_config=SimpleNamespace(enable_logging_iteration_details=False))
        self.process_input_queue_block = True
        self.input_queue, self.output_queue, self.aborts_queue = queue.Queue(), queue.Queue(), queue.Queue()
        self._idle_state_callbacks = []
        self.model_executor = SimpleNamespace(is_sleeping=False, collective_rpc=lambda name: None)
        self.replies = {}
        self.must_stand = False

    def step_fn(self):
        executed = self.scheduler.make_tokens()
        if executed:
            self.execute_dummy_batch()
        return {}, executed

    def execute_dummy_batch(self):
        if self.must_stand:
            fail(f"replica {self.engine_index} is held and steps")
        self.meet(self.engine_index, "step")

    def load(self):
        """What both replicas do during a hold, each waiting for the other."""
        self.meet(self.engine_index, "load")

    def _reset_caches(self):
        pass

    def run(self):
        try:
            self.run_busy_loop()
        except BaseException as error:
            fail(f"replica {self.engine_index} ended: {error!r}")

    def hear(self, socket):
        """Pass on what the coordinator says."""
        while True:
            kind, data = socket.recv_multipart()
            self.input_queue.put((EngineCoreRequestType(kind), msgspec.msgpack.decode(data)))

    def speak(self, socket):
        """Send the coordinator what is for it, and note replies."""
        encoder = MsgpackEncoder()
        while True:
            client, outputs = self.output_queue.get()
            outputs.engine_index = self.engine_index
            if client == -1:
                socket.send_multipart(encoder.encode(outputs))
            elif outputs.utility_output is not None:
                self.replies[outputs.utility_output.call_id].set()


def thread(run, *args):
    threading.Thread(target=run, args=args, daemon=True).start()


class Server:
    """An API server: calls both replicas, each in a random order, and sends requests as vLLM's client does."""

    calls = itertools.count()

    def __init__(self, number, context, address, chance):
        self.number, self.chance = number, chance
        self.socket = context.socket(zmq.XSUB)
        self.socket.connect(address)
        self.socket.send(b"\x01")
        self.wave, self.running = 0, False

    def call(self, method, *args):
        call = next(self.calls)
        for replica in self.chance.sample(REPLICAS, 2):
            replica.replies[call] = threading.Event()
            replica.input_queue.put((EngineCoreRequestType.UTILITY, (self.number, call, method, args)))
        return call

    def wait(self, call):
        for replica in REPLICAS:
            if not replica.replies[call].wait(NEVER_S):
                fail(f"replica {replica.engine_index} does not reply to call {call}")

    def ask(self):
        while self.socket.poll(0):
            _, self.wave, self.running = msgspec.msgpack.decode(self.socket.recv())
        request = SimpleNamespace(key=next(self.calls), tokens=self.chance.randint(1, 9), finished=threading.Event())
        replica = self.chance.choice(REPLICAS)
        replica.input_queue.put((EngineCoreRequestType.ADD, (request, self.wave)))
        if not self.running:
            self.running = True
            self.socket.send(msgspec.msgpack.encode((replica.engine_index, self.wave)))
        return request.finished


def agree(chance):
    """Ask both replicas the same question, sometimes one of them too late; both get the same answer."""
    question, late = f"question {next(Server.calls)}", chance.random() < 0.3
    yes = chance.choices((True, False), (4, 1), k=2)
    answers = []
    for replica, says in zip(REPLICAS, yes, strict=True):
        if late and answers:
            answers[0].result(NEVER_S)
        until = time.monotonic() + (0.02 if late else NEVER_S)
        answers.append(getattr(replica, compat_agreement.AGREE)(question, compat_agreement.APPLIED, says, until))
    said = [answer.result(NEVER_S) for answer in answers]
    if said != [all(yes) and not late] * 2:
        fail(f"the replicas said {yes}, {'late' if late else 'in time'}, and were told {said}")


def stand(still):
    for replica in REPLICAS:
        replica.must_stand = still


def push(server):
    """Hold and let go; sometimes too soon, as after a timeout, sometimes dirty in between."""
    hold = server.call(compat_pause.HOLD, server.chance.choice(MODES), "")
    if server.chance.random() < 0.7:
        server.wait(hold)
        stand(True)
        before = [replica.scheduler.made for replica in REPLICAS]
        if server.chance.random() < 0.5:
            server.wait(server.call(compat_pause.HOLD, "", "dirty"))
        server.wait(server.call("load"))
        if before != [replica.scheduler.made for replica in REPLICAS]:
            fail("a held replica made tokens")
        stand(False)
    elif server.chance.random() < 0.5:
        server.call(compat_pause.HOLD, "", "dirty")
    server.call(compat_pause.LET_GO)


def use(server, finished):
    """Pause, resume and ask as users do."""
    for _ in range(server.chance.randint(1, 6)):
        act = server.chance.random()
        if act < 0.5:
            finished.append(server.ask())
        else:
            route = ("resume_scheduler",) if act < 0.75 else ("pause_scheduler", server.chance.choice(MODES))
            call = server.call(*route)
            if server.chance.random() < 0.5:
                server.wait(call)


def play(pusher, user):
    finished = []
    agree(pusher.chance)
    using = threading.Thread(target=use, args=(user, finished))
    using.start()
    for _ in range(pusher.chance.randint(1, 3)):
        push(pusher)
    using.join()
    for server, method in ((pusher, compat_pause.LET_GO), (user, "resume_scheduler")):
        server.wait(server.call(method))
    finished += [user.ask() for _ in range(3)]
    if not all(event.wait(NEVER_S) for event in finished):
        fail("a request does not end")


def main(rounds, seed):
    EngineCore.add_request = lambda self, request, wave=0: self.scheduler.add(request)
    ParallelConfig.sync_dp_state = staticmethod(sync)
    ParallelConfig.has_unfinished_dp = staticmethod(lambda group, unfinished: any(MEET(group, "resume", unfinished)))
    compat_pause.install()
    setattr(EngineCore, compat_pause.ASLEEP, lambda self: [])
    folder, context = tempfile.mkdtemp(), zmq.Context()
    front, out, back = (f"ipc://{folder}/{name}" for name in ("front", "out", "back"))
    thread(DPCoordinatorProc(2).process_input_socket, front, out, back)
    sockets = [(context.socket(zmq.XSUB), context.socket(zmq.PUSH)) for _ in REPLICAS]
    for hears, speaks in sockets:
        hears.connect(back)
        hears.send(b"\x01")
        speaks.connect(out)
    for replica, (hears, speaks) in zip(REPLICAS, sockets, strict=True):
        assert hears.recv() == b"READY"
        thread(replica.hear, hears)
        thread(replica.speak, speaks)
        thread(replica.run)
    pusher, user = (Server(number, context, front, random.Random(seed + number)) for number in (0, 1))
    for _ in range(rounds):
        play(pusher, user)


def sync(group, has_unfinished, pending_pause):
    """What vLLM's all-reduce computes."""
    unfinished, pending = zip(*MEET(group, "sync", (has_unfinished, pending_pause)), strict=True)
    return any(unfinished) or sum(pending) == 1, sum(pending) == 2


if __name__ == "__main__":
    MEET = Meeting()
    STORE = HashStore()
    REPLICAS = [Replica(number, MEET, STORE) for number in (0, 1)]
    main(int(sys.argv[1]), int(sys.argv[2]))
    print("rounds", sys.argv[1])
    os._exit(0)
