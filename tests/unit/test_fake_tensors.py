"""The tensors that loaders see while they are recorded."""

import torch

from weightsync.engine.loading.fake_tensor import FakeTensor

#: What older versions of torch have, and this one does not.
FORMERLY = {"names"}


def test_no_attribute_hides_one_of_torch():
    attributes = {*FakeTensor.__annotations__, *vars(FakeTensor)} - {*vars(object), "__module__", "__annotations__"}
    own = {name for name in attributes if not name.startswith("__")}
    assert own
    assert own.isdisjoint({*dir(torch.Tensor), *FORMERLY})
