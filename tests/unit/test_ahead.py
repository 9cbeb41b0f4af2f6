"""What a first push needs is made before it: the recording of the loader, and a standby that holds no version."""

import itertools
import re

import pytest
import torch
from msgspec import structs

from tests.unit.standbys import NAMES, Moves, Packs, push, ready, stage_of, unlike
from weightsync.engine.adapter import Expected, LoaderHooks
from weightsync.engine.exchange.slices import Unfinished
from weightsync.engine.loading import load_plan
from weightsync.engine.loading.loader import Loading
from weightsync.errors import ManifestMismatch
from weightsync.memory import arenas
from weightsync.protocol.expected import StandbyRequest
from weightsync.tensors.layout import spec_of


def make(loading, name="first", timeout_s=60.0, between=lambda: None):
    """Make it as an engine that is asked again; returns how often it was."""
    asked = 1
    while True:
        try:
            loading.ahead.make(StandbyRequest(name, timeout_s))
        except Unfinished:
            asked += 1
            between()
        else:
            return asked


def storages(loading):
    return {other.untyped_storage().data_ptr() for _, other in loading.standby._set.tensors}


@pytest.fixture
def recorded(monkeypatch):
    """How many tensors each recording of a loader was given."""
    record, counted = load_plan.record, []

    def counting(hooks, specs, *more):
        counted.append(len(specs))
        return record(hooks, specs, *more)

    monkeypatch.setattr(load_plan, "record", counting)
    return counted


@pytest.fixture(params=[Packs, Moves])
def adapter(request):
    return request.param()


def zeros(adapter):
    return all(not adapter.model.get_parameter(name).any() for name in NAMES)


def test_it_is_made_in_slices_while_the_engine_serves_what_it_did(adapter, slices):
    loading, served = Loading(adapter), []
    assert make(loading, between=lambda: served.append(zeros(adapter))) > len(NAMES) / 2
    assert all(served)
    assert zeros(adapter)
    assert not loading.standby.holds_before()
    assert not loading.standby.undo("first")
    assert loading.path == "", "no push was loaded yet"
    for content in (1, 2, 3):
        push(loading, content)
        assert adapter.holds() == content
    assert loading.standby.holds_before()


@pytest.mark.parametrize("can", [True, False])
def test_all_memory_that_a_plan_fills_is_provided(can, monkeypatch, slices):
    populate, provided = arenas.populate, set()

    def noted(memory, between):
        assert memory.numel() == memory.untyped_storage().nbytes()
        provided.add(memory.data_ptr())
        if not can:
            memory.fill_(1)
        return can and populate(memory, between)

    monkeypatch.setattr(arenas, "populate", noted)
    loading = Loading(Moves())
    make(loading)
    assert provided == storages(loading)
    if not can:  # then it is written to
        assert all(not other.any() for _, other in loading.standby._set.tensors)
    push(loading, 1)


def test_the_longest_call_is_named(slices):
    loading = Loading(Packs())
    make(loading)
    assert re.fullmatch(r"\d+\.\d+ s in \w+", loading.standby.longest_call)


def test_a_first_push_makes_no_second_model():
    adapter = Packs()
    loading = Loading(adapter)
    make(loading)
    assert (adapter.made, adapter.loads) == (1, {"live": 0, "standby": 1})
    push(loading, 1)
    assert (adapter.made, adapter.loads) == (1, {"live": 0, "standby": 2})


@pytest.mark.parametrize("turn", [tuple, reversed])
def test_the_loader_is_recorded_once_whatever_the_order_of_the_push(turn, recorded):
    adapter = Moves()
    adapter._specs = tuple(turn(adapter._specs))
    loading = Loading(adapter)
    make(loading)
    memory = storages(loading)
    assert recorded == [len(NAMES)]
    for content in (1, 2):
        staged = stage_of(loading, content, f"push {content}")
        assert recorded.count(len(NAMES)) == 1, "later pushes take samples"
        ready(loading, staged)
        loading.load(staged, staged.push)
        assert adapter.holds() == content
    assert loading.path.endswith("copies, into a standby")
    assert adapter.loads == 0
    assert memory == storages(loading), "it was exchanged twice"


def test_a_push_of_other_tensors_is_recorded_anew(recorded):
    adapter = Moves()
    adapter.expected = lambda: Expected(adapter._specs, frozenset(NAMES[-1:]))
    loading = Loading(adapter)
    make(loading)
    assert recorded == [len(NAMES) - 1]
    for content in (1, 2, 3):
        push(loading, content)
        assert adapter.holds() == content
    assert recorded[1] == len(NAMES)


def test_memory_that_moved_since_is_recorded_anew(recorded):
    adapter = Moves()
    loading = Loading(adapter)
    make(loading)
    for name in NAMES[1:]:
        parameter = adapter.model.get_parameter(name)
        parameter.data = parameter.data.clone()
    for content in (1, 2, 3):
        push(loading, content)
        assert adapter.holds() == content
    assert recorded[:2] == [len(NAMES)] * 2


def test_what_is_there_already_is_left_alone(adapter):
    loading = Loading(adapter)
    for content in (1, 2):
        push(loading, content)
    assert make(loading) == 1
    assert loading.standby.undo("push 2"), "the version before is still there"
    assert adapter.holds() == 1


def test_a_push_in_the_middle_has_its_way(adapter, slices):
    loading = Loading(adapter)
    with pytest.raises(Unfinished):
        loading.ahead.make(StandbyRequest("first", 60.0))
    loading.standby.stop()  # as `Receiver.prepare` does
    for content in (1, 2, 3):
        push(loading, content)
        assert adapter.holds() == content


def test_after_a_failure_the_first_push_tries_again():
    adapter = Packs()
    loading = Loading(adapter)
    adapter.fails = ValueError("no zeros, please")
    for number in range(5):
        make(loading, f"try {number}")
    adapter.fails = None
    assert loading.standby.why == ""
    push(loading, 1)
    assert adapter.holds() == 1
    assert adapter.loads["live"] == 0


def test_a_standby_that_is_unlike_is_not_made_and_the_push_goes_the_engines_way():
    adapter = Packs()
    loading = Loading(adapter)
    adapter.act = lambda model: unlike(adapter)
    make(loading)
    push(loading, 1)
    assert adapter.holds() == 1
    assert adapter.loads["live"] == 1
    assert "no standby" in loading.path


def test_without_room_nothing_is_made(adapter, monkeypatch):
    loading = Loading(adapter)
    adapter.nbytes = 1 << 40
    monkeypatch.setattr(arenas, "free_bytes", lambda device: 100)
    make(loading)
    assert loading.standby._model is loading.standby._set is None
    monkeypatch.undo()
    adapter.nbytes = 1
    for content in (1, 2):
        push(loading, content)
        assert adapter.holds() == content
    assert "no standby" not in loading.path


def test_what_takes_too_long_is_given_up(slices):
    adapter = Packs()
    loading = Loading(adapter)
    assert make(loading, timeout_s=0.0) == 1
    push(loading, 1)
    assert adapter.holds() == 1


def unknown():
    raise ManifestMismatch("it was started without a checkpoint")


def test_an_unknown_checkpoint_makes_nothing(adapter):
    adapter.expected = unknown
    loading = Loading(adapter)
    assert make(loading) == 1
    assert loading.standby._model is loading.standby._set is None


def test_a_tied_tensor_that_may_be_left_out_does_not_keep_a_push_from_the_standby():
    adapter = Packs()
    specs = (*adapter.expected().specs, spec_of("tied", torch.zeros(30, 4)))
    adapter.expected = lambda: Expected(specs, frozenset(["tied"]))
    loading = Loading(adapter)
    make(loading)
    push(loading, 1)
    assert adapter.loads["live"] == 0


def test_a_loader_that_cannot_be_recorded_has_its_standby_all_the_same():
    class Both(Packs):
        def loader_hooks(self):
            return LoaderHooks(self.model, self.reads, lambda: None, standby=self.hooks)

        def reads(self, weights):
            for _, tensor in weights:
                raise RuntimeError(f"its loader looks at values: {tensor.sum().item()}")

    adapter = Both()
    make(Loading(adapter))
    assert adapter.made == 1


class Stepwise(Moves):
    """``between`` is called between two tensors that its loader loads."""

    between = staticmethod(lambda model: None)

    def loader_hooks(self):
        hooks = super().loader_hooks()

        def load(weights):
            for name, tensor in weights:
                self.between(self.model)
                hooks.load([(name, tensor)])

        return hooks._replace(load=load)


def test_the_loader_is_recorded_in_slices(recorded, slices):
    adapter, read = Stepwise(), itertools.count()
    adapter.between = lambda model: next(read)
    loading, met = Loading(adapter), set()
    make(loading, between=lambda: met.add(str(read)))
    assert len(met) > len(NAMES) / 2
    assert recorded == [len(NAMES)]
    for content in (1, 2):
        push(loading, content)
        assert adapter.holds() == content
    assert recorded.count(len(NAMES)) == 1


def test_between_slices_the_engine_has_its_own_tensors(slices):
    adapter = Stepwise()
    served = dict(adapter.model.named_parameters())

    def replace(model):
        for name in NAMES:
            setattr(model, name, torch.nn.Parameter(torch.ones(30, 4)))

    adapter.between = replace
    loading, seen = Loading(adapter), []
    make(loading, between=lambda: seen.append(dict(adapter.model.named_parameters())))
    assert seen
    assert all(found[name] is served[name] for found in seen for name in served)
    assert zeros(adapter)


def moved_between_slices():
    """A loader that is being recorded, and a parameter to which others have given other memory meanwhile."""
    adapter = Stepwise()
    loading, parameter, other = Loading(adapter), adapter.model.layer_0, torch.full((30, 4), 7.0)
    with pytest.raises(Unfinished):
        loading.ahead.make(StandbyRequest("first", 60.0))
    parameter.data = other
    return loading, parameter, other


def test_what_others_do_to_the_model_between_slices_stays(slices):
    loading, parameter, other = moved_between_slices()
    make(loading)
    assert parameter.data_ptr() == other.data_ptr()
    assert loading.ahead._recorded is None


def test_a_recording_that_is_called_off_puts_nothing_back(slices):
    loading, parameter, other = moved_between_slices()
    loading.ahead.stop()
    assert parameter.data_ptr() == other.data_ptr()


def test_the_dtypes_of_parameters_are_found_in_slices_and_once(slices):
    adapter, read = Stepwise(), itertools.count()
    adapter._specs = tuple(structs.replace(spec, dtype="bfloat16") for spec in adapter._specs)
    adapter.between = lambda model: next(read)
    loading, met = Loading(adapter), set()

    def expected():
        while True:
            try:
                return loading.expected()
            except Unfinished:
                met.add(str(read))

    assert expected().served == dict.fromkeys(NAMES, "float32")
    assert len(met) > len(NAMES) / 2
    seen = str(read)
    assert expected().served == dict.fromkeys(NAMES, "float32")
    assert str(read) == seen, "it was not recorded again"
    adapter.model.layer_0.data = torch.zeros(30, 4)
    assert expected().served == dict.fromkeys(NAMES, "float32")
    assert str(read) != seen


def test_a_push_ends_a_recording_that_has_not_ended(slices):
    adapter = Stepwise()
    loading = Loading(adapter)
    with pytest.raises(Unfinished):
        loading.ahead.make(StandbyRequest("first", 60.0))
    work = loading.ahead._recording._work
    for content in (1, 2):
        push(loading, content)
        assert adapter.holds() == content
    assert work._ended
    assert make(loading, "second") == 1


def test_a_long_call_of_a_recorded_loader_is_named(slices):
    adapter = Stepwise()
    adapter.between = lambda model: torch.ones(1).add(1)
    loading = Loading(adapter)
    make(loading)
    assert re.fullmatch(r"\d+\.\d+ s in \w+", loading.ahead.longest_call)
