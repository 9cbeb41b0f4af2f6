"""Mappings, checkpoint folders and objects in the shape of vLLM's WeightSource."""

import json
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Gemma2Config

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources import open_source
from weightsync.sources.checkpoint import optional_names, read_specs
from weightsync.tensors.layout import DTYPES

INDEX = "model.safetensors.index.json"


def read(source):
    return {spec.name: tensor for spec, tensor in zip(source.specs, source.tensors(), strict=True)}


# --- mapping ----------------------------------------------------------------------------------------------------------


def test_a_mapping_is_sent_as_it_is():
    shared = torch.arange(4.0)
    weights = {"b": nn.Parameter(shared), "a": shared, "n": torch.tensor(3)}
    source = open_source(weights)
    assert source.specs == (
        TensorSpec("b", "float32", (4,)),
        TensorSpec("a", "float32", (4,)),
        TensorSpec("n", "int64", ()),
    )
    tensors = read(source)
    assert tensors["a"].data_ptr() == tensors["b"].data_ptr() == shared.data_ptr()
    assert not tensors["b"].requires_grad
    weights["a"] = torch.zeros(4)
    assert read(source)["a"].tolist() == [0, 0, 0, 0]


def test_a_mapping_that_changed_is_refused_by_name():
    weights = {"a": torch.zeros(4), "b": torch.zeros(2)}
    source = open_source(weights)
    weights["b"] = torch.zeros(3)
    with pytest.raises(SourceError, match=r"b: was announced as b float32\[2\] and is now b float32\[3\]"):
        list(source.tensors())
    del weights["b"]
    with pytest.raises(SourceError, match="b: no longer in the mapping"):
        list(source.tensors())


def test_a_mapping_may_create_its_tensors_one_at_a_time():
    class OnDemand(Mapping):
        def __getitem__(self, name):
            return torch.full((2,), float(name))

        def __iter__(self):
            return iter("123")

        def __len__(self):
            return 3

    assert [tensor.tolist() for tensor in open_source(OnDemand()).tensors()] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({1: torch.zeros(1)}, r"tensor names must be str, not int \(1\)"),
        ({"w": [1.0]}, "w: expected a torch.Tensor, not builtins.list"),
        ({"w": torch.zeros(1, device="meta")}, "w: the tensor is on the meta device"),
        ({"w": torch.eye(2).to_sparse()}, "w: layout torch.sparse_coo cannot be sent"),
        ({"w": torch.zeros(1, dtype=torch.complex64)}, "w: dtype torch.complex64 cannot be sent"),
        (
            {"w": torch.Tensor._make_subclass(type("Odd", (torch.Tensor,), {}), torch.zeros(1))},
            "w: tensors of type Odd",
        ),
    ],
)
def test_mappings_that_cannot_be_sent_are_refused_by_name(weights, message):
    with pytest.raises(SourceError, match=message):
        open_source(weights)


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_are_refused_by_name():
    with pytest.raises(SourceError, match="w: quantised tensors"):
        open_source({"w": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)})


@pytest.mark.parametrize("model", [None, 3, torch.zeros(2), [("w", torch.zeros(2))], object()])
def test_other_objects_are_refused(model):
    with pytest.raises(SourceError, match=rf"cannot read weights from \S*{type(model).__qualname__}; push a torch"):
        open_source(model)


# --- WeightSource -----------------------------------------------------------------------------------------------------


class Meta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple


class Stream:
    """A source in the shape of vLLM's ``WeightSource``; it can yield other tensors than it announces."""

    def __init__(self, announced, yielded=None):
        self.announced = announced
        self.yielded = announced if yielded is None else yielded
        self.passes = 0

    def metadata(self):
        return [Meta(name, tensor.dtype, tensor.shape) for name, tensor in self.announced]

    def __iter__(self):
        self.passes += 1
        yield from self.yielded


A, B = ("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))


def test_a_weight_source_is_read_again_at_every_pass():
    stream = Stream([A, B])
    source = open_source(stream)
    assert stream.passes == 0
    assert source.specs == (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (4,)))
    assert read(source)["a"].data_ptr() == A[1].data_ptr()
    list(source.tensors())
    assert stream.passes == 2


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        ([A], "ended before b, which metadata"),
        ([A, B, B], "yielded 'b' after the last"),
        ([B, A], r"yielded 'b' where metadata\(\) announces a float32\[2, 3\]"),
        ([A, ("b", torch.zeros(4))], "b: was announced as b bfloat16"),
        ([A, ("b", None)], "b: expected a torch.Tensor, not builtins.NoneType"),
    ],
)
def test_a_weight_source_must_yield_what_it_announces(yielded, message):
    with pytest.raises(SourceError, match=message):
        list(open_source(Stream([A, B], yielded)).tensors())


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        ([], r"Stream.metadata\(\) holds no tensors"),
        ([A, A], "holds a twice"),
        ([(3, torch.zeros(1))], "tensor names must be str"),
        ([("w", torch.zeros(1, dtype=torch.complex64))], "w: dtype torch.complex64"),
    ],
)
def test_metadata_that_cannot_be_sent_is_refused(announced, message):
    with pytest.raises(SourceError, match=message):
        open_source(Stream(announced))


@pytest.mark.parametrize("others", ["none", "absent"])
def test_a_weight_source_may_hold_some_of_its_names(others):
    name, tensor = A
    stream = Stream([A, B], [A, (B[0], None)] if others == "none" else [A])
    stream.held_names = lambda: None
    assert [len(held.boxes) for held in open_source(stream).held] == [1, 1]
    stream.held_names = lambda: [name]
    source = open_source(stream)
    assert [one.name for one in source.specs] == [name, B[0]]
    assert [[box.shape for box in held.boxes] for held in source.held] == [[tuple(tensor.shape)], []]
    assert [[part.tolist() for part in parts] for parts in source.parts()] == [[tensor.tolist()], []]
    with pytest.raises(SourceError, match="b: this process holds nothing of"):
        list(source.tensors())
    stream.held_names = lambda: ["c"]
    with pytest.raises(SourceError, match=r"Stream.held_names\(\) lists 'c', but metadata\(\) does not"):
        open_source(stream)


# --- checkpoint folder ------------------------------------------------------------------------------------------------


def write_shards(folder, shards, weight_map=None):
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_single_file(kind, tmp_path):
    tensors = {"x": torch.arange(6).view(2, 3), "y": torch.rand(4).bfloat16(), "s": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"z": torch.zeros(1)}, tmp_path / "other.safetensors")
    source = open_source(kind(tmp_path))
    assert {spec.name: spec.shape for spec in source.specs} == {"x": (2, 3), "y": (4,), "s": ()}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read(source).items())
    assert read_specs(kind(tmp_path)) == source.specs


def test_every_supported_dtype_is_read_back(tmp_path):
    tensors = {name: torch.zeros(2, dtype=torch.uint8).repeat(8).view(dtype) for name, dtype in DTYPES.items()}
    storable = {}
    for name, tensor in tensors.items():
        try:
            save_file({name: tensor.clone()}, tmp_path / "probe.safetensors")
        except (KeyError, ValueError):
            continue
        storable[name] = tensor.clone()
    (tmp_path / "probe.safetensors").unlink()
    save_file(storable, tmp_path / "model.safetensors")
    assert {"bfloat16", "float8_e4m3fn", "int64", "bool"} <= storable.keys()
    assert all(spec.dtype == spec.name for spec in read_specs(tmp_path))
    assert {name: tensor.dtype for name, tensor in read(open_source(tmp_path)).items()} == {
        name: DTYPES[name] for name in storable
    }


def test_shards_are_read_as_their_index_says(tmp_path):
    one, two = torch.ones(2), torch.full((3,), 2.0)
    shards = {
        "model-1.safetensors": {"a": one, "stale": one.clone()},
        "model-2.safetensors": {"b": two},
        "consolidated.safetensors": {"a": two.clone()},
    }
    write_shards(tmp_path, shards, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    assert {name: tensor.tolist() for name, tensor in read(open_source(tmp_path)).items()} == {
        "a": [1, 1],
        "b": [2, 2, 2],
    }


def test_a_checkpoint_is_read_from_its_current_files(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    source = open_source(tmp_path)
    kept = next(source.tensors())
    file.unlink()
    save_file({"a": torch.ones(2)}, file)
    assert next(source.tensors()).tolist() == [1, 1]
    assert kept.tolist() == [0, 0]
    file.unlink()
    save_file({"a": torch.ones(3)}, file)
    with pytest.raises(SourceError, match=r"a: was announced as a float32\[2\]"):
        list(source.tensors())


def test_shards_without_an_index_are_read_if_no_name_is_repeated(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "part-1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "part-2.safetensors")
    assert [spec.name for spec in read_specs(tmp_path)] == ["a", "b"]
    save_file({"a": torch.ones(2)}, tmp_path / "part-2.safetensors")
    with pytest.raises(SourceError, match="holds a twice"):
        read_specs(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no \*.safetensors"),
        ({"pytorch_model.bin": b""}, r"pickle files \(pytorch_model.bin\).*save_pretrained"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "LoRA adapter; merge it"),
        ({"model.safetensors": b"short"}, "model.safetensors cannot be read as safetensors"),
        ({INDEX: b"{"}, "cannot be read as JSON"),
        ({INDEX: b"[]"}, "no weight_map"),
        ({INDEX: b'{"weight_map": {"a": 3}}'}, "no weight_map"),
        (
            {INDEX: b'{"weight_map": {"a": "gone.safetensors"}}'},
            "a is listed in gone.safetensors, which is missing",
        ),
        ({INDEX: b'{"weight_map": {"a": "../up.safetensors"}}'}, "outside the folder"),
        ({INDEX: b'{"weight_map": {}}'}, "holds no tensors"),
    ],
)
def test_damaged_and_foreign_folders_are_refused(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)


def test_an_index_that_lists_a_missing_tensor_is_refused(tmp_path):
    write_shards(tmp_path, {"one.safetensors": {"a": torch.zeros(1)}}, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(SourceError, match="b is missing, though"):
        read_specs(tmp_path)


def test_a_name_that_is_not_a_folder_is_refused():
    with pytest.raises(SourceError, match="some-org/some-model is not a folder; download"):
        open_source("some-org/some-model")


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
        ({"model_type": "no-such-model"}, False),
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma2"}, True),
        ({}, False),
        (None, False),
    ],
)
def test_the_second_half_of_a_tied_pair_is_optional(config, tied, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert ("lm_head.weight" in optional_names(tmp_path)) is tied


def test_the_default_of_the_model_type_applies_if_the_configuration_omits_it(tmp_path):
    Gemma2Config().save_pretrained(tmp_path)
    assert "lm_head.weight" in optional_names(tmp_path)
