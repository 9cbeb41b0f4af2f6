"""Every tensor that can be reached from a served model, as Python's garbage collector sees it.

It shares nothing with the product's own walk through two models, and knows no more of an engine than what to leave out.
"""

import gc
import hashlib
import itertools
import types
from collections import deque

import torch

#: What is not looked into: code that everyone shares, and what the model has from elsewhere.
_CODE = (type, types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType, torch._ops.OpOverload)
_ELSEWHERE = (
    *("torch._ops", "torch.distributed", "transformers", "logging", "threading"),
    *("vllm.config", "vllm.distributed", "sglang.srt.configs", "sglang.srt.distributed", "sglang.srt.server_args"),
)
#: The cache of attention, which belongs to requests.
_OF_REQUESTS = {".kv_cache"}


def reached(model, handle=(), unpacked=None):
    """By the path to each tensor: a digest of its content, its form, and the first paths to the same tensor and memory.

    An object of the class ``handle`` has content that torch does not see: ``unpacked`` returns the tensor of it.
    """
    found, tensors, memories = {}, {}, {}
    for path, item in _walk(model, handle):
        if isinstance(item, handle):
            found[path] = *_content(unpacked(item)), tensors.setdefault(id(item), path), ""
        elif isinstance(item, torch.Tensor):
            same, memory = tensors.setdefault(id(item), path), _memory(item)
            found[path] = *_content(item), same, memories.setdefault(memory, path) if memory else ""
    registered = (*model.named_parameters(), *model.named_buffers())
    assert not (lacking := [name for name, tensor in registered if id(tensor) not in tensors]), lacking
    return found


def _walk(model, closed):
    """Every object that the model reaches, by every path; each is looked into once, from the nearest."""
    met, todo = {id(model): model}, deque([("", model)])
    while todo:
        path, holder = todo.popleft()
        for name, item in _inside(holder):
            yield path + name, item
            if id(item) not in met and not isinstance(item, closed):
                met[id(item)] = item
                todo.append((path + name, item))


def _inside(holder):
    """What an object refers to, by name, in an order that does not depend on what happened to it."""
    named = {}
    attributes = getattr(holder, "__dict__", None)  # made now where it was not: the collector then sees it
    if isinstance(holder, dict):
        named |= {f"[{_key(key)}]": item for key, item in holder.items()}
    elif isinstance(holder, (list, tuple, deque)):
        named |= {f"[{number}]": item for number, item in enumerate(holder)}
    elif isinstance(holder, types.FunctionType):
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
        named |= {f"({name})": cell for name, cell in cells}
    if isinstance(attributes, dict):
        named |= {f".{key}": item for key, item in attributes.items()}
    known = {id(attributes), *map(id, named.values())}
    if isinstance(holder, types.FunctionType):
        known |= {id(holder.__globals__), id(holder.__builtins__)}
    rest = (item for item in gc.get_referents(holder) if id(item) not in known)
    of_kind = {}
    for item in filter(_is_of_model, rest):
        number = of_kind.setdefault(type(item), itertools.count())
        named[f"<{type(item).__name__} {next(number)}>"] = item
    for name in sorted(named.keys() - _OF_REQUESTS):
        if _is_of_model(named[name]):
            yield name, named[name]


def _key(key):
    return key if isinstance(key, (str, int, float, bool, type(None))) else type(key).__name__


def _is_of_model(item):
    if isinstance(item, (torch.Tensor, torch.nn.Module)):
        return True
    return gc.is_tracked(item) and not isinstance(item, _CODE) and not type(item).__module__.startswith(_ELSEWHERE)


def _memory(tensor):
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # it has none of its own
        return 0


@torch.inference_mode()
def _content(tensor):
    form = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()}"
    if tensor.is_meta:
        return "meta", form
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()[:16], form
