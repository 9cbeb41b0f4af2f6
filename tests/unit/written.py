"""Weights that tests write as files, and how they read them."""

import os

import torch

from weightsync.files.places import open_place
from weightsync.files.shelf import read_version
from weightsync.protocol import auth
from weightsync.tensors.layout import DTYPES


def weights(seed=0):
    """Tensors of every dtype and of unusual shapes."""
    chance = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randint(0, 2 if dtype == torch.bool else 256, (300 * dtype.itemsize,), generator=chance)
        .to(torch.uint8)
        .view(dtype)
        for name, dtype in DTYPES.items()
    }
    turned = torch.randn(64, 512, generator=chance).bfloat16().t()
    return {**made, "turned": turned, "nothing": torch.empty(0, 3), "one": torch.tensor(1.5), "large": _large(chance)}


def _large(chance):
    return torch.randn(1500, 1000, generator=chance).bfloat16()


def stepped(before, seed=1):
    """The same, with one element in a hundred of the large tensor changed, and one of another."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    flat = after["large"].view(-1)
    at = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(seed))[: flat.numel() // 100]
    flat.view(torch.int16)[at] += 1
    after["float32"][7] = float("nan")
    return after


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(_bytes(found[name]), _bytes(expected[name])) for name in expected
    )


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def take(held, where, number):
    """Have ``held`` read a version and those between."""
    place = open_place(where)
    version = read_version(place, number, auth.sender_token())
    if version.manifest.parent != held.number and version.manifest.parent:
        take(held, where, version.manifest.parent)
    held.take(place, version)


def files(where, ending=""):
    return sorted(name for name in os.listdir(where) if name.endswith(ending))
