"""Two models are paired through everything that can be reached from them, and exchanged; or the difference is named."""

import functools
import types

import pytest
import torch

from weightsync.engine.exchange import swap as module
from weightsync.engine.exchange.pairs import Pairs, Rules, Unlike


class Method:
    """What an engine hangs on a layer: an object with tensors of its own."""

    __slots__ = ("kernel",)

    def __init__(self, kernel):
        self.kernel = kernel


class Layer(torch.nn.Module):
    """Holds tensors in every way in which an engine's layer does."""

    def __init__(self, seed):
        super().__init__()
        numbers = torch.Generator().manual_seed(seed)

        def new(*shape):
            return torch.randn(shape, generator=numbers)

        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight  # tied
        self.register_buffer("table", new(3))
        self.plain, closed, bound = new(2), new(5), new(7)
        default = new(5)
        self.packed = lambda x, by=default: x * closed + by
        self.partial = functools.partial(torch.add, new(5))
        self.listed, self.named, self.both = [new(1), new(2)], {"a": new(3)}, (new(2), new(3))
        self.quant_method = Method({"deep": [bound]})
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.scale, self.scales = 0.5, [1.0]
        self.loader = self.load
        self.empty = torch.empty(0)
        for parameter in self.parameters():
            parameter.data = new(*parameter.shape)

    def load(self):
        return self

    def seen(self):
        """Everything that it computes with."""
        x = torch.ones(5)
        tensors = [*self.state_dict().values(), self.plain, self.packed(x), self.partial(x), *self.listed]
        tensors += [self.named["a"], *self.both, *self.quant_method.kernel["deep"]]
        return [tensor.tolist() for tensor in tensors]


def test_everything_that_can_be_reached_is_exchanged_once():
    one, other = Layer(1), Layer(2)
    before = one.seen(), other.seen()
    assert all(left != right for left, right in zip(*before, strict=True))
    held = one.first.weight, one.plain
    pairs = Pairs(one, other, Rules())
    pairs.exchange()
    assert (other.seen(), one.seen()) == before
    assert one.second.weight is one.first.weight is held[0], "the objects stay where they are"
    assert held[1].tolist() == one.plain.tolist()
    pairs.exchange()
    assert (one.seen(), other.seen()) == before


def test_a_buffer_that_is_computed_of_weights_is_exchanged_with_them():
    one, other = Layer(1), Layer(2)
    other.angles += 1
    Pairs(one, other, Rules(computed=frozenset({"angles"}))).exchange()
    assert (one.angles.tolist(), other.angles.tolist()) == ([1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0])


def change(what):
    """A change of one of two models, by the difference that is named."""

    def shape(layer):
        layer.plain = torch.randn(3)

    def strides(layer):
        layer.named["a"] = torch.randn(6)[::2]

    def dtype(layer):
        layer.first.bias.data = layer.first.bias.data.half()

    def untied(layer):
        layer.second.weight = torch.nn.Parameter(layer.second.weight.detach().clone())

    def kind(layer):
        layer.quant_method = types.SimpleNamespace(kernel=1)

    def more(layer):
        layer.listed.append(torch.randn(1))

    def made(layer):
        layer.later = torch.randn(1)

    def text(layer):
        layer.first.prefix = "a"

    def other_function(layer):
        layer.packed = lambda x: x

    def calibrated(layer):
        layer.angles[0] = 3.0

    def scale(layer):
        layer.scale = 0.75

    return locals()[what]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", r"plain: its shape is .*2.* and .*3"),
        ("strides", r"named\.a: its strides are \(1,\) and \(2,\)"),
        ("dtype", r"first\._parameters\.bias: its dtype"),
        ("untied", r"weight is shared with another place in one of them only"),
        ("kind", r"quant_method is a Method in one and a SimpleNamespace"),
        ("more", r"listed\.length is 2 in one and 3 in the other"),
        ("made", r" has later in one of them only"),
        ("calibrated", r"\.angles, which is in no checkpoint, is not the same in both"),
        ("scale", r"scale is 0\.7?5 in one and 0\.7?5 in the other"),
        ("other_function", r"packed\.\w+ is"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_difference_is_named_and_nothing_is_exchanged(what, named, swapped):
    one, other = Layer(1), Layer(2)
    change(what)(other)
    if swapped:
        one, other = other, one
        named = r"\w" if what in ("shape", "strides", "more", "kind", "dtype") else named
    before = one.seen() if what != "kind" else None
    with pytest.raises(Unlike, match=named):
        Pairs(one, other, Rules())
    assert before is None or one.seen() == before


def test_what_both_share_is_no_pair():
    one, other = Layer(1), Layer(2)
    other.plain = one.plain
    with pytest.raises(Unlike, match="plain is the same tensor in both"):
        Pairs(one, other, Rules())
    other.plain = one.plain.view(-1)
    with pytest.raises(Unlike, match="plain has the same memory in both"):
        Pairs(one, other, Rules())


def test_what_is_not_known_is_refused_and_what_is_ignored_is_not():
    one, other = Layer(1), Layer(2)
    one.opaque, other.opaque = iter([1]), iter([2])
    with pytest.raises(Unlike, match="opaque is a list_iterator, whose content is not known"):
        Pairs(one, other, Rules())
    Pairs(one, other, Rules(frozenset(["opaque"])))
    Pairs(one, other, Rules(apart=lambda found: type(found).__name__ == "list_iterator"))


def test_what_a_model_notes_while_it_serves_does_not_matter():
    one, other = Layer(1), Layer(2)
    one.isa, other.loads = "avx512", 3
    Pairs(one, other, Rules())
    one.kv_cache, other.kv_cache = torch.randn(100), torch.randn(0)
    Pairs(one, other, Rules(frozenset(["kv_cache"])))


def test_an_exchange_that_fails_leaves_everything_as_it_was(monkeypatch):
    one, other = Layer(1), Layer(2)
    pairs = Pairs(one, other, Rules())
    before = one.seen(), other.seen()
    swap, left = module._set_data, [3]

    def failing(*both):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room")
        swap(*both)

    monkeypatch.setattr(module, "_set_data", failing)
    with pytest.raises(MemoryError):
        pairs.exchange()
    assert (one.seen(), other.seen()) == before


def test_a_module_is_never_apart_and_every_parameter_is_found():
    one, other = Layer(1), Layer(2)
    before = one.seen(), other.seen()
    apart = Rules(apart=lambda found: isinstance(found, (torch.nn.Module, torch.Tensor)))
    Pairs(one, other, apart).exchange()
    assert (other.seen(), one.seen()) == before
    with pytest.raises(Unlike, match=r"first\.weight was not found"):
        Pairs(one, other, Rules(apart=lambda found: True))
    other.first = one.first
    other.second.weight = one.first.weight
    with pytest.raises(Unlike, match=r"same (module|tensor) in both"):
        Pairs(one, other, Rules())


def test_a_change_after_the_comparison_is_seen():
    one, other = Layer(1), Layer(2)
    pairs = Pairs(one, other, Rules())
    assert pairs.is_current()
    one.packed = lambda x: x
    assert not pairs.is_current()


def test_what_an_engine_has_put_around_a_layer_is_looked_through():
    class Around(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer, self.adapter = layer, torch.ones(3)

    one, other = torch.nn.Sequential(Layer(1)), torch.nn.Sequential(Layer(2))
    one[0] = Around(one[0])
    with pytest.raises(Unlike, match=r"^_modules\.0 is a Around in one and a Layer in the other"):
        Pairs(one, other, Rules())
    pairs = Pairs(one, other, Rules(inner=lambda found: found.base_layer if isinstance(found, Around) else found))
    seen = [one[0].base_layer.seen(), other[0].seen()]
    pairs.exchange()
    assert [other[0].seen(), one[0].base_layer.seen()] == seen
    assert one[0].adapter.tolist() == [1, 1, 1]
