"""Tensors that the trainer lacks, and that stay as the engines have them."""

import contextlib

import pytest
import torch

from tests.helpers import served_digest
from tests.unit.loaders import CPU, Model
from tools import models
from weightsync import Sender
from weightsync.engine.adapter import Expected, LoaderHooks, Sealed
from weightsync.engine.loading.loader import Loading
from weightsync.errors import ManifestMismatch, TransferFailed, UnsupportedOption
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.layout import digest_of, spec_of
from weightsync.testing import ReferenceEngine
from weightsync.trainer.fit import agree, fit

LAYER, KEPT = "model.layers.1.*", "model.layers.1."


@pytest.fixture
def partial(trained):
    """The trained weights without the second layer."""
    return {name: tensor.clone() for name, tensor in trained.state_dict().items() if not name.startswith(KEPT)}


@pytest.fixture
def started(model_folder):
    """What the engine was started with."""
    return models.load_reference(model_folder("llama", 0)).state_dict()


@pytest.fixture
def engine(model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        yield engine


def mixed(partial, started):
    return digest_of({**started, **partial}.items())


@pytest.mark.parametrize("options", [{}, {"staging": "none"}, {"transport": "nixl"}, {"keep_previous": True}])
def test_what_the_trainer_lacks_stays_as_the_engine_has_it(engine, partial, started, options):
    with Sender([engine.url], **options) as sender:
        for _ in range(3):  # by the loader, then by the load plan
            partial["model.norm.weight"].add_(1)
            result = sender.push(partial, allow_missing=[LAYER])
            assert result.kept == tuple(sorted(name for name in started if name.startswith(KEPT)))
            assert result.unverified == ()
            assert served_digest(engine) == mixed(partial, started)


def test_a_whole_push_and_one_with_a_pattern_may_follow_each_other(engine, partial, trained, started):
    with Sender([engine.url]) as sender:
        for _ in range(2):
            sender.push(partial, allow_missing=[LAYER])
            assert served_digest(engine) == mixed(partial, started)
            assert sender.push(trained, allow_missing=[LAYER]).kept == ()
            assert served_digest(engine) == digest_of(trained.state_dict().items())
            started = trained.state_dict()
        with pytest.raises(ManifestMismatch, match=r"missing: model\.layers\.1"):
            sender.push(partial)
        with pytest.raises(ManifestMismatch, match=r"missing: lm_head\.weight"):
            sender.push({name: t for name, t in partial.items() if name != "lm_head.weight"}, allow_missing=[LAYER])
        assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_an_engine_that_is_added_has_to_hold_the_same(engine, model_folder, partial, started):
    with Sender([engine.url]) as sender:
        sender.push(partial, allow_missing=[LAYER])
        with ReferenceEngine(model_folder("llama", 0)) as alike, ReferenceEngine(model_folder("llama", 2)) as other:
            sender.add_engine(alike.url)
            assert served_digest(alike) == mixed(partial, started)
            before = served_digest(other)
            with pytest.raises(ManifestMismatch, match="hold different values"):
                sender.add_engine(other.url)
            assert served_digest(other) == before


def test_a_version_is_kept_unless_the_next_push_writes_what_it_lacks(engine, partial, trained):
    whole = digest_of(trained.state_dict().items())
    with Sender([engine.url], keep_previous=True) as sender:
        sender.push(partial, version="part", allow_missing=[LAYER])
        sender.push(trained, version="whole")
        with pytest.raises(TransferFailed, match="no version to go back to"):
            sender.rollback()
        partial["model.norm.weight"].add_(1)
        after = mixed(partial, dict(trained.state_dict()))
        sender.push(partial, version="part again", allow_missing=[LAYER])
        for version, digest in (("whole", whole), ("part again", after), ("whole", whole)):
            assert sender.rollback().version == version
            assert served_digest(engine) == digest


def test_a_pattern_that_matches_nothing_is_refused_by_name(engine, partial):
    with Sender([engine.url]) as sender:
        with pytest.raises(ManifestMismatch, match=r"allow_missing: 'mtp\.\*' matches no tensor"):
            sender.push(partial, allow_missing=[LAYER, "mtp.*"])
        with pytest.raises(UnsupportedOption, match="give a list of patterns"):
            sender.push(partial, allow_missing=LAYER)


def test_a_deep_comparison_is_refused_with_the_reason(engine, partial):
    before = served_digest(engine)
    with Sender([engine.url], verify="deep") as sender, pytest.raises(UnsupportedOption, match="a fresh engine"):
        sender.push(partial, allow_missing=[LAYER])
    assert served_digest(engine) == before


def test_engines_that_hold_different_values_are_named(engine, model_folder, partial):
    with ReferenceEngine(model_folder("llama", 2)) as other, Sender([engine.url, other.url]) as sender:
        both = " and ".join(sorted((engine.url, other.url)))
        with pytest.raises(ManifestMismatch, match=rf"layers\.1\..*{both} hold different values") as it:
            sender.push(partial, allow_missing=[LAYER])
        assert it.value.engines == {engine.url: "unchanged", other.url: "unchanged"}
        sender.push(models.load_reference(model_folder("llama", 2)))
        assert sender.push(partial, allow_missing=[LAYER]).unverified == ()
        assert served_digest(engine) == served_digest(other)


def test_engines_without_a_list_are_refused_and_say_why():
    with pytest.raises(ManifestMismatch, match=r"matches no tensor.*; http://a has no list: nobody knows"):
        fit([TensorSpec("w", "float32", ())], {"http://a": ExpectedReply(why="nobody knows this model")}, ["*"])


# --- parameters that are loaded from several tensors


def fused(model, weights):
    """A loader of a model whose q and k are one parameter."""
    for name, tensor in weights:
        layer, _, which = name.rpartition(".")
        if which in ("q", "k"):
            start = 0 if which == "q" else 4
            model.get_parameter(layer.replace(".", "_") + "_qk").data[start : start + 4].copy_(tensor)
        else:
            model.get_parameter(name.replace(".", "_")).data.copy_(tensor)


CHECKPOINT = {f"layers.{layer}.{which}": torch.randn(4, 2) for layer in range(2) for which in ("q", "k", "other")} | {
    "head.a": torch.randn(4, 2),
    "head.b": torch.randn(4, 2),
}


class Fused:
    """An adapter of such a model; with ``why``, one whose loader can only be called."""

    rank, device = 0, CPU

    def __init__(self, why=""):
        shapes = {f"layers_{layer}_{name}": size for layer in range(2) for name, size in (("qk", 8), ("other", 4))}
        shapes |= {"head_a": 4, "head_b": 4}
        self.model = Model({name: torch.zeros(size, 2) for name, size in shapes.items()})
        self.why = why

    def drafting(self):
        return ""

    def expected(self):
        return Expected(tuple(spec_of(name, tensor) for name, tensor in CHECKPOINT.items()))

    def loader_hooks(self):
        if self.why:
            return Sealed(self.model, self.why)
        return LoaderHooks(self.model, lambda weights: fused(self.model, weights), contextlib.nullcontext)


def accept(loading, *kept):
    specs = [spec_of(name, tensor) for name, tensor in CHECKPOINT.items() if name not in kept]
    loading.accept(specs, kept=kept)
    return loading.accepted()


def test_a_parameter_that_would_be_written_in_part_is_refused_by_name():
    with pytest.raises(ManifestMismatch, match=r"layers\.1\.k cannot be left.*layers_1_qk, with layers\.1\.q"):
        accept(Loading(Fused()), "layers.1.k")
    accepted = accept(Loading(Fused()), "layers.1.k", "layers.1.q")
    assert accepted.unwritten == {}
    assert all(accepted.kept.values())
    assert accepted.kept.keys() == {"layers.1.k", "layers.1.q"}


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (["layers.1.k"], r"layers\.1\.k cannot be left.*rest of layers\.1, such as"),
        (["layers.1.k", "layers.1.q"], r"rest of layers\.1, such as layers\.1\.other"),
    ],
)
def test_where_the_loader_cannot_be_recorded_only_whole_layers_may_stay(kept, said):
    with pytest.raises(ManifestMismatch, match=said):
        accept(Loading(Fused("it packs layers")), *kept)


def test_whole_layers_may_stay_and_are_not_verified():
    kept = ["layers.1.k", "layers.1.q", "layers.1.other", "head.a"]
    assert accept(Loading(Fused("it packs layers")), *kept).kept == dict.fromkeys(kept, "")


def test_other_names_left_out_are_another_push():
    loading = Loading(Fused())
    assert accept(loading, "head.a").kept.keys() == {"head.a"}
    with pytest.raises(ManifestMismatch, match=r"missing: head\.a"):
        loading.accept([spec_of(name, tensor) for name, tensor in CHECKPOINT.items() if name != "head.a"])


def test_digests_are_compared_rank_by_rank():
    one, other = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}], [{"a": "1", "b": "2"}, {"a": "3", "b": "5"}]
    assert agree({"http://1": one}) == ()
    assert agree({"http://1": one, "http://2": one}) == ()
    with pytest.raises(ManifestMismatch, match=r"b is left.*http://1 and http://2"):
        agree({"http://1": one, "http://2": other})
    assert agree({"http://1": one, "http://2": one[:1]}) == ("a", "b")
    assert agree({"http://1": one, "http://2": [{"a": "1", "b": ""}, {"a": "3", "b": "4"}]}) == ("b",)
