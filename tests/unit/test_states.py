"""Every edge of the state tables, and a real receiver that follows them in each of its states."""

from typing import get_args

import pytest
import torch

from tests.helpers import plan_of
from tests.unit.loaders import push_into
from tests.unit.manual import Trainer, answer_of
from tests.unit.test_changing_loaders import around_rank, two_of
from weightsync import errors
from weightsync.engine import receiver
from weightsync.engine.adapter import Expected
from weightsync.engine.loading import loader
from weightsync.engine.receiver import Receiver
from weightsync.errors import WeightSyncError, WrongState
from weightsync.protocol import http
from weightsync.protocol.states import ENGINE, PLAN, PUSH, TOGETHER, Machine, diagram
from weightsync.tensors.layout import Layout, differing, digest_of, spec_of
from weightsync.transports.base import Peer

#: By name: the table, its initial states, and the state that must stay reachable.
TABLES = {
    "engine": (ENGINE, ("serving", "unsynced"), "serving"),
    "push": (PUSH, ("idle",), "idle"),
    "plan": (PLAN, ("unrecorded",), "trusted"),
    "together": (TOGETHER, ("serving",), "serving"),
}


def edges(table):
    """Every state with every event of the table, and the target; None if the event is not legal there."""
    events = sorted({event for edges in table.values() for event in edges})
    return [(state, event, table[state].get(event)) for state in table for event in events]


def reachable(table, *starts):
    seen, todo = set(starts), list(starts)
    for state in todo:  # grows as it goes
        fresh = set(table[state].values()) - seen
        seen |= fresh
        todo += fresh
    return seen


@pytest.mark.parametrize("name", TABLES)
def test_every_event_in_every_state_follows_the_table_or_changes_nothing(name):
    table, _, _ = TABLES[name]
    for state, event, target in edges(table):
        machine = Machine(table, state, "this one")
        assert machine.allows(event) is (target is not None)
        if target is not None:
            assert machine.check(event) == target
            assert machine.state == state
            assert machine.move(event) == machine.state == target
            continue
        for act in (machine.check, machine.move):
            with pytest.raises(WrongState, match=f"this one is {state}: {event} is not possible now") as raised:
                act(event)
            assert all(possible in str(raised.value) for possible in table[state])
            assert raised.value.weights == "unchanged"
            assert machine.state == state


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reachable_and_only_closed_is_final(name):
    table, starts, home = TABLES[name]
    assert reachable(table, *starts) == set(table)
    assert {state for state in table if home not in reachable(table, state)} <= {"closed"}


def test_the_states_on_the_wire_match_the_table():
    assert set(get_args(http.State)) == set(ENGINE)


def test_the_table_of_ranks_that_commit_together_agrees_with_the_engines():
    for state, edges in TOGETHER.items():
        engine = {**ENGINE[state], "load": ENGINE[state].get("rollback")}
        assert {event: engine[event] for event in edges} == edges


def test_a_real_load_plan_takes_every_edge_of_its_table(monkeypatch):
    taken = set()

    class Seen(Machine):
        def move(self, event):
            taken.add((self.state, event))
            return super().move(event)

    def turned(number):
        return dict(reversed(two_of(number).items()))

    monkeypatch.setattr(loader, "Machine", Seen)
    adapter, _, loading = around_rank()  # the plan is trusted and has been replayed
    push_into(loading, turned(3))  # recorded again, and trusted again
    adapter.after = lambda model: model.odd.data.mul_(2)
    push_into(loading, turned(4))  # the replay is found to differ
    push_into(loading, two_of(5))  # recorded again; the first push is found to differ
    for checkpoint in (two_of(6), turned(6), two_of(6)):  # recorded again each time, and never loaded
        loading.accept([spec_of(name, tensor) for name, tensor in checkpoint.items()])
    adapter.loader_hooks = lambda: "it is sealed by now"
    push_into(loading, turned(7))
    assert taken == {(state, event) for state, edges in PLAN.items() for event in edges}
    assert loading.path == "the engine's own loader: it is sealed by now"


@pytest.mark.parametrize("name", TABLES)
def test_a_diagram_has_every_edge(name):
    table, _, _ = TABLES[name]
    drawn = diagram(table).splitlines()
    for state, event, target in edges(table):
        found = [line for line in drawn if line.strip().startswith(f"{state} --> {target}:")]
        assert target is None or event in found[0].split(": ")[1].split(", ")


class DictAdapter:
    """An adapter of a dict of tensors. ``during`` runs in the middle of a load; ``fails`` makes loads fail there."""

    rank, device = 0, torch.device("cpu")

    def __init__(self):
        self.weights = {"a": torch.zeros(300), "b": torch.zeros(7, 3)}
        self.during = None
        self.fails = False

    def drafting(self):
        return ""

    def expected(self):
        return Expected(tuple(spec_of(name, tensor) for name, tensor in self.weights.items()))

    def loader_hooks(self):
        return "it holds a dictionary"

    def load(self, weights):
        for number, (name, tensor) in enumerate(weights):
            if number == 1 and self.during is not None:
                during, self.during = self.during, None
                during()
            if number == 1 and self.fails:
                raise RuntimeError("out of luck")
            self.weights[name].copy_(tensor)

    def digest(self):
        return digest_of(self.weights.items())

    def differing(self, weights):
        return differing(weights, self.weights.items())


class Harness:
    """A real receiver, a real transfer, and pushes of tensors that are full of one number."""

    def __init__(self, keep):
        self.adapter, self.trainer, self.keep = DictAdapter(), Trainer(), keep
        self.receiver = Receiver(self.adapter)
        self.layout = Layout(self.adapter.expected().specs)
        self.pushes = 0
        self.plan = None

    def ask(self, method, message):
        """The rank's error as the exception that it names, None if there is none. Does not raise it."""
        reply = answer_of(self.receiver, method, http.to_json(message))
        if reply.error is None:
            return None
        kind = getattr(errors, reply.error.error)
        assert issubclass(kind, WeightSyncError)
        assert reply.error.weights != "unknown", reply.error
        return kind(reply.error.message, weights=reply.error.weights)

    def prepare(self):
        """Prepare a push without sending it."""
        self.pushes += 1
        self.plan = plan_of(f"push-{self.pushes}", self.layout, 1024, keep=self.keep)
        return self.ask("update_weights_via_ipc_zmq", self.trainer.ask(self.plan, "http://a"))

    def stage(self, value):
        """Send the push that `prepare` announced."""
        self.trainer.await_all({Peer("http://a", 0)})
        self.trainer.send(torch.full_like(tensor, value) for tensor in self.adapter.weights.values())

    def commit(self, **more):
        return self.ask("weightsync_commit", self.asked(**more))

    def asked(self, push=None, version=None, **more):
        push = push or f"push-{self.pushes}"
        return http.CommitRequest(push=push, version=version or push, pause="keep", timeout_s=5.0, **more)

    def push(self, value):
        assert self.prepare() is None
        self.stage(value)
        failed = self.commit()
        if failed is None:
            self.trainer.settle()
        return failed

    @property
    def state(self):
        return self.receiver.status().state

    def value(self):
        """The number that fills the weights."""
        (value,) = {float(number) for tensor in self.adapter.weights.values() for number in tensor.view(-1)}
        return value

    def close(self):
        self.receiver.abort()
        self.receiver.release(self.trainer.here)
        self.trainer.close()
        for end in self.receiver._ends.values():
            end.close()

    def bring(self, state, then):
        """Bring the receiver into a state and call ``then`` there."""
        for value in (1.0, 2.0):
            assert self.push(value) is None
        if state.startswith("dirty"):
            self.adapter.fails = True
            assert self.push(3.0).weights == "dirty"
            self.adapter.fails = False
        if state.endswith(("receiving", "prepared", "applying")):
            assert self.prepare() is None
        if state.endswith(("prepared", "applying")):
            self.stage(4.0)
        if state.endswith("applying"):
            self.adapter.during = then
            self.commit()
            assert self.adapter.during is None
        else:
            then()


def message(harness, name):
    """The method and body of a message as an honest trainer would send it."""
    return {
        "ready": ("weightsync_ready", harness.asked()),
        "commit": ("weightsync_commit", harness.asked()),
        "commit of another": ("weightsync_commit", harness.asked("another")),
        "rollback": ("weightsync_commit", harness.asked("back", "push-1", rollback=True)),
        "restore": ("weightsync_restore", harness.asked()),
        "abort": ("weightsync_abort", http.AbortRequest()),
        "abort of another": ("weightsync_abort", http.AbortRequest(push="another")),
        "release": ("weightsync_abort", http.AbortRequest(release=harness.trainer.here)),
        "status": ("weightsync_status", http.StatusRequest(digest=True)),
        "open": ("weightsync_open", http.OpenRequest(protocol=http.PROTOCOL)),
    }[name]


MESSAGES = (
    "prepare",
    "ready",
    "commit",
    "commit of another",
    "rollback",
    "restore",
    "abort",
    "abort of another",
    "release",
    "status",
    "open",
)
#: A load begins and ends within one call, so messages during it are sent from inside the load.
RANK_STATES = tuple(state for state in ENGINE if state != "unsynced")


def events_of(name, state):
    """The events of the table that a successful message stands for."""
    if name == "restore":
        return ("rollback", "applied")
    if name in ("commit", "rollback"):
        return (name, "applied")
    under_way = ("abort",) if state.endswith(("receiving", "prepared")) else ()
    return {"prepare": (*under_way, "prepare"), "abort": under_way}.get(name, ())


CASES = [(state, name, keep) for keep in (False, True) for state in RANK_STATES for name in MESSAGES]


@pytest.fixture
def harness(monkeypatch, request):
    monkeypatch.setattr(receiver, "_ABORT_WAIT_S", 0.3)
    harness = Harness(keep=request.getfixturevalue("keep"))
    yield harness
    harness.close()


@pytest.mark.parametrize(("state", "name", "keep"), CASES)
def test_a_message_in_any_state_follows_the_table_or_changes_nothing(harness, state, name, keep):
    seen = {}

    def meanwhile():
        seen["before"], seen["weights"] = harness.state, harness.adapter.digest()
        seen["answer"] = harness.prepare() if name == "prepare" else harness.ask(*message(harness, name))
        seen["after"], seen["weights after"] = harness.state, harness.adapter.digest()

    harness.bring(state, meanwhile)
    machine = Machine(ENGINE, state, "the table")
    for event in events_of(name, state) if seen["answer"] is None else ():
        machine.move(event)
    assert seen["before"] == state
    assert seen["after"] == machine.state
    if seen["answer"] is not None or name not in ("commit", "rollback", "restore"):
        assert seen["weights after"] == seen["weights"]
    if state.endswith("applying"):
        assert harness.state == "serving"
        assert harness.value() == 4.0
    elif name == "commit" and state.endswith("prepared"):
        assert harness.value() == 4.0
    else:
        mend(harness)


def mend(harness):
    """Assert that a push by the next trainer is served."""
    harness.ask("weightsync_abort", http.AbortRequest())
    assert harness.push(9.0) is None
    assert (harness.state, harness.value()) == ("serving", 9.0)
