"""How a rank loads, with the reference engine's adapter and adapters that differ from it in one point."""

import contextlib
import sys

import pytest
import requests
import torch

from tools import models
from weightsync import Sender
from weightsync.engine.adapter import Expected, LoaderHooks
from weightsync.engine.coverage import check_read
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.errors import ManifestMismatch
from weightsync.protocol.rank_replies import Accepted
from weightsync.tensors.layout import Layout, digest_of, spec_of
from weightsync.tensors.subset import Subset
from weightsync.testing import ModelAdapter, ReferenceEngine

CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.up_proj.weight"


class Counting(ModelAdapter):
    """Counts the tensors that its loader is given, except while it is recorded."""

    given = 0

    def load(self, weights):
        super().load(self._counted(weights))

    def _counted(self, weights):
        for name, tensor in weights:
            self.given += type(tensor) is torch.Tensor
            yield name, tensor


class Unknown(Counting):
    """An adapter without a checkpoint that says what is complete."""

    def expected(self):
        raise ManifestMismatch("nobody knows this model")


@pytest.fixture
def checkpoints(model_folder):
    """Three checkpoints of one model."""
    return [models.load_reference(model_folder("llama", seed)).state_dict() for seed in range(3)]


@pytest.fixture
def folder(model_folder):
    return model_folder("llama", 0)


def push(loading, checkpoint, again=None):
    """Load a push as a receiver does; returns the stage."""
    layout = loading.accept([spec_of(name, tensor) for name, tensor in checkpoint.items()])
    data = torch.zeros(layout.nbytes, dtype=torch.uint8) if again is None else again.data
    for entry in layout.entries:
        entry.view(data).copy_(checkpoint[entry.spec.name])
    staged = Staged("push", Subset(layout, {}), data)
    loading.prepare_load(staged)
    loading.load(staged)
    return staged


def test_the_engine_loads_the_first_push_and_the_plan_loads_later_ones(folder, checkpoints):
    adapter = Counting(folder, CPU)
    loading = Loading(adapter)
    assert loading.path == ""
    tensors = len(checkpoints[1])
    for number, checkpoint in enumerate((*checkpoints, checkpoints[0])):
        staged = push(loading, checkpoint)
        assert adapter.digest() == digest_of(checkpoint.items())
        assert loading.path == f"load plan, {tensors} copies"
        assert adapter.given == tensors, number
    assert loading.accept([entry.spec for entry in staged.layout.entries]) is staged.layout


def test_streams_and_other_layouts_are_loaded_by_the_engine(folder, checkpoints):
    adapter = Counting(folder, CPU)
    loading = Loading(adapter)
    first = push(loading, checkpoints[0])
    given = adapter.given
    turned = dict(reversed(checkpoints[1].items()))
    push(loading, turned)
    assert adapter.given == 2 * given  # another layout is another plan
    assert adapter.digest() == digest_of(turned.items())
    loading.load(first)
    assert adapter.given == 3 * given
    assert adapter.digest() == digest_of(checkpoints[0].items())


def test_a_model_whose_memory_moved_is_recorded_again(folder, checkpoints):
    adapter = Counting(folder, CPU)
    loading = Loading(adapter)
    push(loading, checkpoints[0])
    staged = push(loading, checkpoints[1])
    for move in (
        lambda: setattr(adapter.model.lm_head.weight, "data", torch.zeros_like(adapter.model.lm_head.weight)),
        lambda: setattr(
            adapter.model.model.norm, "weight", torch.nn.Parameter(adapter.model.model.norm.weight.detach() * 2)
        ),
        lambda: setattr(
            adapter.model.model.layers[0], "mlp", type(adapter.model.model.layers[0].mlp)(adapter.model.config)
        ),
    ):
        move()
        adapter.model.to(torch.bfloat16)
        given = adapter.given
        push(loading, checkpoints[2], staged)
        assert adapter.given > given
        assert adapter.digest() == digest_of(checkpoints[2].items())
        given = adapter.given
        push(loading, checkpoints[0], staged)
        assert adapter.given == given
        assert adapter.digest() == digest_of(checkpoints[0].items())


def test_memory_that_moves_after_the_push_was_accepted_is_noticed(folder, checkpoints):
    adapter = Counting(folder, CPU)
    loading = Loading(adapter)
    staged = push(loading, checkpoints[0])
    old = adapter.model.lm_head.weight.data
    adapter.model.lm_head.weight.data = torch.zeros_like(old)
    loading.prepare_load(staged)
    assert "checked by the first push" in loading.path
    loading.load(staged)
    assert adapter.digest() == digest_of(checkpoints[0].items())
    assert loading.path.startswith("load plan")


class Arithmetic(Counting):
    """Computes one parameter instead of copying it."""

    def load(self, weights):
        super().load((name, tensor * 2 if name == NAME else tensor) for name, tensor in weights)


def test_a_parameter_that_the_loader_computes_is_loaded_by_the_loader(folder, checkpoints):
    adapter = Arithmetic(folder, CPU)
    loading = Loading(adapter)
    for number, checkpoint in enumerate(checkpoints):
        push(loading, checkpoint)
        want = {name: tensor * 2 if name == NAME else tensor for name, tensor in checkpoint.items()}
        assert adapter.digest() == digest_of(want.items())
        assert adapter.given == len(checkpoint) + number
    assert loading.path == (
        f"load plan, {len(checkpoints[0]) - 1} copies; the engine's own loader for {NAME} "
        "(what is copied into it is computed)"
    )


class WorkedOn(Counting):
    """Processes a parameter after loading."""

    def loader_hooks(self):
        return LoaderHooks(self.model, super().load, contextlib.nullcontext)

    @torch.no_grad()
    def load(self, weights):
        super().load(weights)
        self.model.get_parameter(NAME).neg_()


class LaidOutAnew(WorkedOn):
    """Replaces a parameter with every load."""

    @torch.no_grad()
    def load(self, weights):
        Counting.load(self, weights)
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.clone())


class Threads(Counting):
    """Its loader cannot be recorded."""

    def load(self, weights):
        super().load((name, torch.from_numpy(tensor.float().numpy()).bfloat16()) for name, tensor in weights)


class Says(Counting):
    """Declares that its loader cannot be planned."""

    def loader_hooks(self):
        return "it packs layers"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (WorkedOn, f"{NAME} is not what was recorded: it is processed after loading"),
        (LaidOutAnew, "it moves the parameters with every load"),
        (Threads, "it cannot be recorded ("),
        (Says, "it packs layers"),
    ],
)
def test_a_push_that_cannot_be_planned_is_loaded_by_the_engine_and_status_says_so(folder, checkpoints, kind, why):
    adapter = kind(folder, CPU)
    loading = Loading(adapter)
    for number, checkpoint in enumerate(checkpoints):
        push(loading, checkpoint)
        negated = {name: -tensor if name == NAME else tensor for name, tensor in checkpoint.items()}
        assert adapter.digest() == digest_of((negated if kind is WorkedOn else checkpoint).items())
        assert adapter.given == (number + 1) * len(checkpoint)
        assert loading.path.startswith(f"the engine's own loader: {why}")


# --- what a complete push is, without a checkpoint on disk ------------------------------------------------------------


def specs(checkpoint, *, without=(), **more):
    named = {**checkpoint, **more}
    return [spec_of(name, tensor) for name, tensor in named.items() if name not in without]


class Skips(Unknown):
    """Skips tensors that it does not know."""

    def load(self, weights):
        super().load(pair for pair in weights if pair[0] in self.model.state_dict())


def test_without_a_checkpoint_a_push_is_complete_if_it_fills_the_model(folder, checkpoints):
    adapter = Skips(folder, CPU)
    loading, before = Loading(adapter), adapter.digest()
    with pytest.raises(ManifestMismatch, match=f"no pushed tensor is loaded into {NAME};.*start the engine from"):
        loading.accept(specs(checkpoints[1], without={NAME}))
    with pytest.raises(ManifestMismatch, match=r"sent twice: lm_head\.weight"):
        loading.accept([*specs(checkpoints[1]), *specs(checkpoints[1])[-1:]])
    extra = torch.zeros(2)
    loading.accept(specs(checkpoints[1], **{"model.extra.weight": extra}))
    assert loading.accepted().unread == ("model.extra.weight",)
    assert adapter.digest() == before
    push(loading, checkpoints[1])
    assert loading.accepted().unread == ()
    assert adapter.digest() == digest_of(checkpoints[1].items())


def test_without_a_checkpoint_a_tensor_that_does_not_fit_is_refused_with_the_loaders_error(folder, checkpoints):
    adapter = Unknown(folder, CPU)
    loading, before = Loading(adapter), adapter.digest()
    for manifest in (
        specs({**checkpoints[1], NAME: torch.zeros(3, 5)}),
        specs(checkpoints[1], **{"model.extra.weight": torch.zeros(2)}),
    ):
        with pytest.raises(
            ManifestMismatch,
            match=r"nobody knows this model; and the engine.s loader does not show it.*cannot be recorded",
        ):
            loading.accept(manifest)
    assert adapter.digest() == before


def test_a_tensor_has_to_be_read_by_one_rank_only():
    check_read([Accepted(("a", "b")), Accepted(("c",))])
    check_read([Accepted()])
    with pytest.raises(ManifestMismatch, match=r"no rank loads b$"):
        check_read([Accepted(("a", "b")), Accepted(("b", "c"))])


class Scaled(Counting):
    """Has a parameter with a default, and a buffer, that no checkpoint holds."""

    def __init__(self, *args):
        super().__init__(*args)
        self.model.register_parameter("k_scale", torch.nn.Parameter(torch.ones(())))
        self.model.register_buffer("table", torch.arange(5.0))

    def digest(self):
        return digest_of((n, t) for n, t in self.model.state_dict().items() if n not in ("k_scale", "table"))


def test_with_a_checkpoint_parameters_that_it_lacks_are_accepted(folder, checkpoints):
    adapter = Scaled(folder, CPU)
    loading = Loading(adapter)
    for checkpoint in checkpoints:
        push(loading, checkpoint)
        assert adapter.digest() == digest_of(checkpoint.items())
    assert loading.path.startswith("load plan")


class Optional(Counting):
    """Takes a push without its output layer for a complete one, as tied models do; its own is not tied."""

    def expected(self):
        return Expected(super().expected().specs, frozenset({"lm_head.weight"}))


def test_a_tied_tensor_may_be_omitted_only_if_its_parameter_is_filled(folder, checkpoints):
    loading = Loading(Optional(folder, CPU))
    without = specs(checkpoints[1], without={"lm_head.weight"})
    with pytest.raises(ManifestMismatch, match=r"without lm_head.weight nothing is loaded into lm_head.weight"):
        loading.accept(without)
    adapter = Optional(folder, CPU)
    adapter.model.lm_head.weight = adapter.model.model.embed_tokens.weight
    tied = Loading(adapter)
    assert isinstance(tied.accept(without), Layout)


# --- seen from a sender -----------------------------------------------------------------------------------------------

UNKNOWN = """
from weightsync import testing
from weightsync.errors import ManifestMismatch
load = testing.ModelAdapter.load
def expected(self):
    raise ManifestMismatch("nobody knows this model")
def known_alone(self, weights):
    load(self, (pair for pair in weights if pair[0] in self.model.state_dict()))
testing.ModelAdapter.expected, testing.ModelAdapter.load = expected, known_alone
testing.main()
"""


def test_an_engine_with_an_unknown_model_takes_complete_pushes_and_refuses_others_by_name(folder, checkpoints):
    with ReferenceEngine(folder, launcher=(sys.executable, "-c", UNKNOWN)) as engine, Sender([engine.url]) as sender:
        before = sender.status(digest=True)[engine.url].ranks[0]
        assert before.loading == ""
        lacking = {name: tensor for name, tensor in checkpoints[1].items() if name != NAME}
        with pytest.raises(ManifestMismatch, match=f"no pushed tensor is loaded into {NAME}") as raised:
            sender.push(lacking)
        assert raised.value.engines == {engine.url: "unchanged"}
        with pytest.raises(ManifestMismatch, match=r"no rank loads model\.extra\.weight") as raised:
            sender.push({**checkpoints[1], "model.extra.weight": torch.zeros(2)})
        assert raised.value.engines == {engine.url: "unchanged"}
        assert requests.get(f"{engine.url}/health", timeout=10).status_code == 200
        assert sender.status(digest=True)[engine.url].ranks[0].digest == before.digest
        for checkpoint in checkpoints:
            sender.push(checkpoint)
            rank = sender.status(digest=True)[engine.url].ranks[0]
            assert rank.digest == digest_of(checkpoint.items())
            assert rank.loading == f"load plan, {len(checkpoint)} copies"
