"""Sources in the shape that vLLM's ``WeightSource`` has since 0.33: several trainer ranks own the parts of a tensor."""

from typing import NamedTuple

import pytest
import torch

from weightsync.errors import SourceError
from weightsync.sources import open_source

A, B = ("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))


class Owned:
    """A source in the shape that vLLM's ``WeightSource`` has since 0.33, as one trainer rank of several sees it."""

    def __init__(self, metas, pieces):
        self.metadata, self._pieces = metas, pieces

    def iter_local(self):
        yield from self._pieces


class OwnedWhole(Owned):
    def implements_iter_local(self):
        return False

    def iter_full(self):
        yield from self._pieces


class OwnedMeta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple
    owners: tuple | None = None
    mesh_shape: tuple | None = None
    placements: tuple | None = None


class Split(NamedTuple):
    dim: int


class Same(NamedTuple):
    pass


Owned.metadata = OwnedWhole.metadata = None  # a property of the class in vLLM


def as_rank(monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)


@pytest.mark.parametrize("kind", [Owned, OwnedWhole])
def test_a_source_of_owners_gives_what_a_single_process_owns(kind):
    metas = [OwnedMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in (A, B)]
    metas.append(OwnedMeta("elsewhere", torch.float32, (2,), owners=(1, 2)))
    source = open_source(kind(metas, [A, B]))
    assert [spec.name for spec in source.specs] == ["a", "b", "elsewhere"]
    assert [len(held.boxes) for held in source.held] == [1, 1, 0]
    assert [[part.data_ptr() for part in parts] for parts in source.parts()] == [
        [A[1].data_ptr()],
        [B[1].data_ptr()],
        [],
    ]


@pytest.mark.parametrize("placements", [(Same(), Split(0)), (Split(0), Same()), (Split(1), Split(0)), (Split(0),) * 2])
def test_the_parts_of_all_owners_make_the_tensor(monkeypatch, placements):
    whole = torch.arange(35.0).view(7, 5)
    owners, mesh = (6, 4, 9, 1), torch.arange(4).view(2, 2)
    meta = OwnedMeta("w", whole.dtype, (7, 5), owners, (2, 2), placements)
    made = torch.full_like(whole, -1)
    for position, rank in enumerate(owners):
        as_rank(monkeypatch, rank)
        local = whole
        for axis, placement in enumerate(placements):
            if isinstance(placement, Split):
                chunks = local.chunk(2, placement.dim)
                local = chunks[(mesh == position).nonzero()[0][axis]]
        source = open_source(Owned([meta], [("w", local)]))
        (held,), (parts,) = source.held, source.parts()
        assert held.replicated
        for box, part in zip(held.boxes, parts, strict=True):
            (rows, columns), (height, width) = box
            made[rows : rows + height, columns : columns + width] = part
    assert torch.equal(made, whole)


def test_an_owner_of_an_empty_part_yields_an_empty_tensor(monkeypatch):
    as_rank(monkeypatch, 2)
    meta = OwnedMeta("w", torch.float32, (2,), owners=(0, 1, 2), placements=(Split(0),))
    source = open_source(Owned([meta], [("w", torch.zeros(0))]))
    assert (source.held[0].boxes, list(source.parts())) == ((), [()])
    with pytest.raises(SourceError, match=r"w: was announced as w float32\[0\] and is now w float32\[2\]"):
        list(open_source(Owned([meta], [("w", torch.zeros(2))])).parts())


def test_owned_tensors_must_come_as_the_metadata_announces():
    metas = [OwnedMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in (A, B)]
    for yielded, message in [
        ([A], r"Owned.iter_local\(\) ended before b, which metadata announces"),
        ([B, A], r"yielded 'b' where metadata announces a float32\[2, 3\]"),
        ([A, B, A], r"yielded 'a' after the last tensor that metadata announces"),
    ]:
        with pytest.raises(SourceError, match=message):
            list(open_source(Owned(metas, yielded)).parts())
