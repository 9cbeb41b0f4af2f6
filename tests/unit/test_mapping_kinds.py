"""Only what has its tensors before and after they are read can be read in place."""

from collections import OrderedDict, UserDict

import pytest
import torch

from weightsync.sources.mapping import MappingSource
from weightsync.sources.module import ModuleSource
from weightsync.trainer.ranks.in_place import lasting

WEIGHTS = {"a": torch.zeros(3), "b": torch.ones(2, 2)}


class Collective(dict):
    """Asks other ranks for each of its values."""


@pytest.mark.parametrize(
    ("weights", "lasts"),
    [(WEIGHTS, True), (OrderedDict(WEIGHTS), True), (Collective(WEIGHTS), False), (UserDict(WEIGHTS), False)],
)
def test_of_mappings_only_a_dict_can(weights, lasts):
    assert lasting(MappingSource(weights)) == lasts


def test_a_module_can():
    assert lasting(ModuleSource(torch.nn.Linear(2, 2)))
