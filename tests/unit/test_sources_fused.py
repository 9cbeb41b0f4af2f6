"""Megatron's layout by a table: the checkpoint is assembled from what its ranks hold."""

import pytest
import torch

from tests.megatron import checkpoint, megatron
from weightsync import Fused, Rule
from weightsync.errors import SourceError
from weightsync.integrations import megatron as megatron_core
from weightsync.sources import open_source
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.ranks.assembly import orders_of, write
from weightsync.trainer.ranks.assignment import plan


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_assemble_the_checkpoint(size):
    whole = checkpoint()
    sources = [open_source(megatron(whole, rank, size)) for rank in range(size)]
    made = plan([source.held for source in sources])
    assert {one.name: one.shape for one in made.manifest} == {name: tuple(t.shape) for name, t in whole.items()}
    layout = Layout(made.manifest)
    stream = torch.zeros(layout.nbytes, dtype=torch.uint8)
    orders = orders_of(made, layout, Wanted([Subset(layout, {})]), [0] * len(made.pieces))
    for source, one in zip(sources, orders, strict=True):
        write(source, one.write, stream, "xxh3_64")
    for entry in layout.entries:
        assert torch.equal(entry.view(stream), whole[entry.spec.name]), entry.spec.name


def test_one_process_sends_the_whole_checkpoint():
    whole = checkpoint()
    fused = megatron(whole, 0, 1)
    source = open_source(fused)
    for _ in range(2):
        for one, tensor in zip(source.specs, source.tensors(), strict=True):
            assert torch.equal(tensor, whole[one.name]), one.name
        for tensor in (*fused.weights.values(), *whole.values()):
            tensor.zero_()


@pytest.mark.parametrize(
    ("weights", "rules", "said"),
    [
        ({"a": (4,)}, [Rule("b", "b")], r"a: no rule matches it; Rule\('a', None\)"),
        (
            {"a": (5,)},
            [Rule("a", {"b": 2, "c": 1})],
            r"a: dimension 0 of \[5\] cannot be divided into units of \[2, 1\] rows",
        ),
        ({"a": (5,)}, [Rule("a", {"b": None, "c": None})], r"a: dimension 0 of \[5\] cannot be divided into units"),
        ({"a": (5,)}, [Rule("a", "b", 1)], r"a: dimension 1 of \[5\] cannot be divided into units"),
        ({"a1": (5,)}, [Rule("a{layer}", "b{expert}")], r"b\{expert\}: 'expert' has no value, since a\{layer\} does"),
        ({"a": (4,), "b": (4,)}, [Rule("a", "c"), Rule("b", "c")], "c"),
        ({"a": (4,)}, [Rule("a", None)], "holds no tensors"),
        ({"a": (0,)}, [Rule("a", {"b": 2, "c": 1})], r"a: dimension 0 of \[0\] cannot be divided into units"),
        ({"a": (4,)}, [Rule("a{0}", "b")], r"a\{0\}: the words in braces must be different identifiers"),
        ({"a": (4,)}, [Rule("a{x}{x}", "b")], "must be different identifiers"),
    ],
)
def test_tensors_without_a_fitting_rule_are_refused_by_name(weights, rules, said):
    with pytest.raises(SourceError, match=said):
        open_source(Fused({name: torch.zeros(shape) for name, shape in weights.items()}, rules))


def test_one_rank_of_several_cannot_send_alone():
    source = open_source(megatron(checkpoint(), 0, 2))
    with pytest.raises(SourceError, match="one of 2 that share the weights"):
        next(source.tensors())
    with pytest.raises(SourceError, match="rank 2 is out of range: size is 2"):
        open_source(Fused({"a": torch.zeros(4)}, [Rule("a", "a")], rank=2, size=2))


def test_a_changed_or_missing_tensor_is_refused_by_name():
    weights = {"a": torch.zeros(4)}
    source = open_source(Fused(weights, [Rule("a", "b")]))
    weights["a"] = torch.zeros(6)
    with pytest.raises(SourceError, match="a: was announced"):
        list(source.tensors())
    del weights["a"]
    with pytest.raises(SourceError, match="a: no longer among the weights"):
        list(source.tensors())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_padding_is_left_out(size, dim):
    """With four ranks the last holds nothing else."""
    whole = torch.arange(36.0).view(6, 6)
    padded = torch.cat([whole, torch.full_like(whole, 100.0)[:2] if dim == 0 else torch.full((6, 2), 100.0)], dim)
    rules = [Rule("a", "b", dim, rows=6)]
    sources = [
        open_source(Fused({"a": padded.chunk(size, dim)[rank].clone()}, rules, rank, size)) for rank in range(size)
    ]
    made = plan([source.held for source in sources])
    layout = Layout(made.manifest)
    assert made.manifest[0].shape == (6, 6)
    stream = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for source, one in zip(
        sources, orders_of(made, layout, Wanted([Subset(layout, {})]), [0] * len(made.pieces)), strict=True
    ):
        write(source, one.write, stream, "xxh3_64")
    assert torch.equal(layout.entries[0].view(stream), whole)
    if size == 1:
        assert torch.equal(next(sources[0].tensors()), whole)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule("a", "b", rows=9), r"a: 8 rows, fused or not, are not 9 rows of b and padding"),
        (Rule("a", "b", rows=0), r"are not 0 rows"),
        (Rule("a", {"b": None, "c": None}, rows=4), r"are not 4 rows"),
    ],
)
def test_padding_that_cannot_be_is_refused(rule, said):
    with pytest.raises(SourceError, match=said):
        open_source(Fused({"a": torch.zeros(8, 2)}, [rule]))


def test_the_adapter_for_megatron_says_what_is_missing():
    with pytest.raises(ImportError, match="needs Megatron-Core: pip install megatron-core"):
        megatron_core.weights(torch.nn.Linear(1, 1))
