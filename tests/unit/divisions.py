"""Streams that are divided between memory domains, for tests."""

import itertools

import torch
from hypothesis import strategies as st

from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box, narrowed


@st.composite
def divisions(draw):
    """Tensors that are cut into cells, and the number of the host of each cell."""
    hosts, specs, held = draw(st.integers(1, 4)), [], []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        specs.append(TensorSpec(f"t{number}", draw(st.sampled_from(["uint8", "float32"])), shape))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        for cell in itertools.product(*(itertools.pairwise(ends) for ends in cuts)):
            box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            held.append((draw(st.integers(0, hosts - 1)), number, box))
    return specs, [[(number, box) for at, number, box in held if at == host] for host in range(hosts)]


@st.composite
def boxes_of(draw, spec):
    """Any box of a tensor, empty ones too."""
    start = tuple(draw(st.integers(0, size)) for size in spec.shape)
    return Box(start, tuple(draw(st.integers(0, size - at)) for size, at in zip(spec.shape, start, strict=True)))


def filled(layout, table):
    """A stream whose tensors have elements that all differ, and the arena of each host."""
    stream = torch.zeros(layout.nbytes, dtype=torch.uint8)
    arenas = [torch.zeros(layout.domain_bytes(host), dtype=torch.uint8) for host in range(len(table))]
    for entry in layout.entries:
        entry.view(stream).copy_(torch.arange(entry.nbytes // entry.dtype.itemsize).view(entry.spec.shape) % 251 + 1)
        for cell in layout.cells(entry.number):
            part = narrowed(entry.view(stream), *cell.box).contiguous().view(-1).view(torch.uint8)
            arenas[cell.domain][cell.at : cell.at + part.numel()] = part
    return stream, arenas
