"""Modules as sources: the tensors that ``save_pretrained`` would write, read from live parameters."""

import sys
import warnings
import weakref
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weightsync.errors import SourceError
from weightsync.sources import open_source

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def qwen3():
    return Qwen3ForCausalLM._from_config(Qwen3Config(**TINY, tie_word_embeddings=True), dtype=torch.bfloat16)


def llama():
    return LlamaForCausalLM._from_config(LlamaConfig(**TINY, tie_word_embeddings=False), dtype=torch.bfloat16)


def qwen3_moe():
    config = Qwen3MoeConfig(**TINY, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


def hrm_text():
    """A model whose checkpoint fuses parameters of the module, so that it has to be computed."""
    return HrmTextForCausalLM._from_config(HrmTextConfig(**{**TINY, "num_key_value_heads": 4}), dtype=torch.bfloat16)


MODELS = {"qwen3": qwen3, "llama": llama, "qwen3_moe": qwen3_moe, "hrm_text": hrm_text}


@pytest.fixture(params=list(MODELS))
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


def read(source):
    return {spec.name: tensor for spec, tensor in zip(source.specs, source.tensors(), strict=True)}


def saved(model, folder):
    model.save_pretrained(folder, max_shard_size="20KB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same_bytes(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def storages(model):
    return {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate: ``total``, and ``peak`` of those alive at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.total, self.peak = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and not tensor.is_meta and tensor.untyped_storage()._cdata not in known:
                storage, nbytes = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
                self.total += nbytes
                self.alive[storage._cdata] = nbytes
                self.peak = max(self.peak, sum(self.alive.values()))
                weakref.finalize(tensor, self.alive.pop, storage._cdata, None)
        return result


def test_names_and_bytes_are_those_of_save_pretrained(model, tmp_path):
    same_bytes(read(open_source(model)), saved(model, tmp_path))


def test_a_loaded_model_is_sent_unchanged(model, tmp_path):
    expected = saved(model, tmp_path)
    same_bytes(read(open_source(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16))), expected)


def test_specs_describe_the_tensors_in_order(model):
    source = open_source(model)
    for spec, tensor in zip(source.specs, source.tensors(), strict=True):
        assert (spec.dtype, spec.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert not tensor.requires_grad


@pytest.mark.parametrize("build", [qwen3, llama, qwen3_moe])
def test_all_tensors_are_views_of_the_parameters(build):
    model = build()
    with Allocations() as made:
        source = open_source(model)
        tensors = list(source.tensors())
    assert made.total == 0
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= storages(model)


def test_experts_are_sent_as_contiguous_slices_of_the_fused_parameter():
    model = qwen3_moe()
    tensors = read(open_source(model))
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    up = tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert up.is_contiguous()
    assert up.data_ptr() == fused[3, 24:].data_ptr()
    assert up.shape == (24, 32)


def test_a_tied_pair_is_sent_once_under_the_name_that_save_pretrained_keeps():
    names = [spec.name for spec in open_source(qwen3()).specs]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("build", [qwen3, llama])
def test_tensors_that_save_pretrained_omits_are_omitted(build, left_out, tmp_path):
    model = build()
    model._keys_to_ignore_on_save = {left_out}
    expected = saved(model, tmp_path)
    assert left_out not in expected
    same_bytes(read(open_source(model)), expected)


def test_computed_tensors_are_computed_one_group_at_a_time():
    model = hrm_text()
    with Allocations() as opening:
        source = open_source(model)
    assert opening.total == 0
    with Allocations() as pushing:
        for tensor in source.tensors():
            del tensor
    largest = max(spec.shape[0] * spec.shape[1] * 2 for spec in source.specs if len(spec.shape) == 2)
    assert 0 < pushing.peak <= 2 * largest < pushing.total


def test_a_source_opens_and_reads_in_inference_mode(model, tmp_path):
    with torch.inference_mode():
        same_bytes(read(open_source(model)), saved(model, tmp_path))


def test_values_follow_the_optimiser(model):
    source = open_source(model)
    before = {name: tensor.clone() for name, tensor in read(source).items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    after = read(source)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_values_follow_swapped_storages(model, tmp_path):
    source = open_source(model)
    list(source.tensors())
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    assert open_source(model, reuse=source) is source
    same_bytes(read(source), saved(model, tmp_path))


def test_a_source_is_reused_only_for_the_module_and_layout_it_was_opened_on():
    model, other = llama(), llama()
    source = open_source(model)
    assert open_source(model, reuse=source) is source
    assert open_source(other, reuse=source) is not source
    model.lm_head.weight = model.model.embed_tokens.weight
    again = open_source(model, reuse=source)
    assert again is not source
    assert len(again.specs) == len(source.specs) - 1
    with pytest.raises(SourceError, match=r"lm_head\.weight: its shape, dtype, stride, tie or shards have changed"):
        next(source.tensors())


def test_a_changed_dtype_is_noticed():
    model = llama()
    source = open_source(model)
    model.float()
    with pytest.raises(SourceError, match="open the source again"):
        next(source.tensors())
    assert {spec.dtype for spec in open_source(model, reuse=source).specs} == {"float32"}


def test_a_model_that_moved_to_the_meta_device_is_noticed():
    model = llama()
    source = open_source(model)
    model.to("meta")
    with pytest.raises(SourceError, match=r"model.embed_tokens.weight: the tensor is on the meta device"):
        next(source.tensors())


def test_opening_a_large_module_copies_nothing():
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    with Allocations() as made:
        source = open_source(model)
        assert sum(tensor.nbytes for tensor in source.tensors()) == 8 * 2048 * 2048 * 4
    assert made.total == 0


def test_any_module_is_sent_under_its_state_dict_names():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("kept", torch.arange(3))
            self.register_buffer("left", torch.zeros(3), persistent=False)

    source = open_source(Shared())
    assert [spec.name for spec in source.specs] == ["kept", "first.weight", "first.bias"]
    assert source.specs[0].dtype == "int64"


def test_disjoint_views_of_one_storage_are_both_sent():
    flat = torch.arange(8.0)
    module = nn.ParameterDict({"a": flat[:4], "b": flat[4:], "empty": flat[:0], "nothing": flat[:0]})
    tensors = read(open_source(module))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "a": [0, 1, 2, 3],
        "b": [4, 5, 6, 7],
        "empty": [],
        "nothing": [],
    }


def test_a_transposed_parameter_is_sent_with_its_values():
    module = nn.ParameterDict({"w": torch.arange(6.0).view(2, 3).T})
    assert read(open_source(module))["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        nn.parallel.DistributedDataParallel,
        nn.DataParallel,
        lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
        lambda model: nn.parallel.DistributedDataParallel(compiled(model)),
    ],
    ids=["compile", "ddp", "dp", "compile(ddp)", "ddp(compile)"],
)
@pytest.mark.usefixtures("process_group")
def test_wrappers_do_not_change_what_is_sent(wrap):
    model = qwen3_moe()
    same_bytes(read(open_source(wrap(model))), read(open_source(model)))


def test_compiled_layers_do_not_change_what_is_sent():
    model = qwen3_moe()
    expected = read(open_source(model))
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = compiled(layer)
    same_bytes(read(open_source(model)), expected)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("process_group")
def test_a_module_sharded_over_one_process_is_sent_unchanged():
    from torch.distributed.fsdp import fully_shard

    model = qwen3_moe()
    expected = {name: tensor.clone() for name, tensor in read(open_source(model)).items()}
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    same_bytes(read(open_source(model)), expected)


@pytest.mark.usefixtures("process_group")
def test_fsdp1_over_one_process_is_sent_unchanged_until_a_parameter_gets_other_memory():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model, alone = llama(), ShardingStrategy.NO_SHARD
    expected = {name: tensor.clone() for name, tensor in read(open_source(model)).items()}
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # torch would rather have DDP
        sharded = FullyShardedDataParallel(
            model, sharding_strategy=alone, use_orig_params=True, device_id=torch.device("cpu")
        )
    same_bytes(read(open_source(sharded)), expected)
    parameter = next(iter(sharded.parameters()))
    parameter.data = parameter.data.clone()
    with pytest.raises(SourceError, match=r"its \.data was replaced, which FSDP1 notices only later"):
        open_source(sharded)


def test_adapters_and_quantised_modules_are_refused():
    lora = type("LoraLayer", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    with pytest.raises(SourceError, match=r"^0 \(LoraLayer\) is part of a PEFT adapter; merge adapters first"):
        open_source(nn.Sequential(lora(2, 2)))
    four_bit = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    with pytest.raises(SourceError, match="holds quantised weights"):
        open_source(nn.Sequential(four_bit(2, 2)))
    quantised = llama()
    quantised.hf_quantizer = object()
    with pytest.raises(SourceError, match=r"the module \(LlamaForCausalLM\) is quantised"):
        open_source(quantised)


def test_tensors_without_data_are_refused_by_name():
    with pytest.raises(SourceError, match=r"weight: the tensor is on the meta device"):
        open_source(nn.Linear(2, 2, device="meta"))
    with pytest.raises(SourceError, match=r"weight: a lazy parameter has no shape yet"):
        open_source(nn.LazyLinear(2))


def test_a_module_without_tensors_is_refused():
    with pytest.raises(SourceError, match="ReLU holds no tensors"):
        open_source(nn.ReLU())


def test_extra_state_is_refused_by_name():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

        def set_extra_state(self, state): ...

    with pytest.raises(SourceError, match=r"_extra_state: expected a torch.Tensor, not builtins.dict"):
        open_source(Extra(2, 2))


def test_an_old_transformers_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    with pytest.raises(SourceError, match=r"needs transformers 4\.57"):
        open_source(llama())
    open_source(nn.Linear(2, 2))
