"""A folder of safetensors files: its headers only, or its tensors, which are mapped and read when they are used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import Whole, check_same, finish
from weightsync.tensors.layout import DTYPES

_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"

#: torch's names of dtypes, by their names in safetensors headers.
_DTYPES: Final[dict[str, str]] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}

#: Names of the second half of a tied pair, in language models and in multimodal models that wrap one.
_TIED: Final = frozenset({"lm_head.weight", "language_model.lm_head.weight"})


#: The modules that are not quantised, in a ``quantization_config``: the tensors of the checkpoint say so too.
_MODULES: Final = frozenset({"ignore", "modules_to_not_convert"})


class CheckpointSource(Whole):
    """The tensors of a folder, as `read_specs` describes them.

    Every pass opens the files again, so a checkpoint that was replaced between two pushes is read as it is now. Do not
    write into its files during a push: they are mapped into memory.
    """

    specs: tuple[TensorSpec, ...]
    device: Final = torch.device("cpu")

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self.specs = read_specs(path)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        expected = iter(self.specs)
        for file, names in _files(self._path).items():
            with _open(file) as opened:
                for name in _select(file, opened, names):
                    check_same(next(expected, TensorSpec(name, "nothing", ())), _spec(file, opened, name))
                    yield opened.get_tensor(name)
        for missing in expected:
            raise SourceError(f"{missing.name}: no longer in {self._path}; open the source again")


def local_folder(model: str, revision: str | None = None) -> Path:
    """The folder of ``model``: itself, or that of a hub repository in the cache. Raises `SourceError`."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise SourceError(f"{model} is neither a folder nor in the hub's cache ({type(error).__name__})") from error


def read_specs(path: str | Path) -> tuple[TensorSpec, ...]:
    """Names, dtypes and shapes of the tensors in a folder of safetensors files; reads only the headers.

    The tensors are those that ``model.safetensors.index.json`` lists; without an index those of ``model.safetensors``;
    without that file those of all ``*.safetensors`` files. Raises `SourceError` if there are none, if a name occurs
    twice, or if a file is damaged.
    """
    folder = Path(path)
    specs: list[TensorSpec] = []
    for file, names in _files(folder).items():
        with _open(file) as opened:
            specs += [_spec(file, opened, name) for name in _select(file, opened, names)]
    return finish(specs, str(folder))


def optional_names(path: str | Path) -> frozenset[str]:
    """Names that a complete push of the folder's checkpoint may leave out, because the model ties them to others.

    They follow from ``tie_word_embeddings`` in ``config.json`` or a nested text configuration; if neither has it, from
    transformers' default for the model type. Empty without a ``config.json``. Raises `SourceError` if that file cannot
    be read as JSON.
    """
    config = _config(path)
    nested = [part for part in config.values() if isinstance(part, dict)]
    declared = [part["tie_word_embeddings"] for part in (config, *nested) if "tie_word_embeddings" in part]
    tied = any(declared) if declared else bool(config) and _ties_by_default(path)
    return _TIED if tied else frozenset()


def quantization(path: str | Path) -> dict[str, Any] | None:
    """How the folder's checkpoint is quantised: ``quantization_config`` of ``config.json``, without its lists of names.

    None without one. Raises `SourceError` as `optional_names`.
    """
    config = _config(path)
    nested = [part for part in config.values() if isinstance(part, dict)]
    found = next((part["quantization_config"] for part in (config, *nested) if "quantization_config" in part), None)
    return {key: value for key, value in found.items() if key not in _MODULES} if isinstance(found, dict) else None


def _config(path: str | Path) -> dict[str, Any]:
    file = Path(path) / "config.json"
    return _read_json(file) if file.is_file() else {}


def _ties_by_default(path: str | Path) -> bool:
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception:
        return False  # a push must then have every tensor of the checkpoint, which is stricter than needed at worst
    return bool(getattr(config, "tie_word_embeddings", False))


def _files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The files to read, in order, each with the names to take from it (None: all of them)."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; download the checkpoint and pass the folder that holds it")
    if (folder / _INDEX).is_file():
        return _indexed(folder)
    if (folder / _FILE).is_file():
        return {folder / _FILE: None}
    if (folder / "adapter_config.json").is_file():
        raise SourceError(f"{folder} holds a LoRA adapter; merge it into its base model and pass that checkpoint")
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return dict.fromkeys(found)
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickles:
        raise SourceError(
            f"{folder} holds pickle files ({pickles[0]}) and no safetensors; pickle can run code when it is read and "
            "is refused: load the model with transformers and save it again with save_pretrained"
        )
    raise SourceError(f"{folder} holds no *.safetensors files")


def _indexed(folder: Path) -> dict[Path, frozenset[str] | None]:
    index = folder / _INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise SourceError(f"{index}: no weight_map from tensor names to file names; save the checkpoint again")
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise SourceError(f"{index}: {name} is listed in {file!r}, which is outside the folder")
        if file not in by_file and not (folder / file).is_file():
            raise SourceError(f"{index}: {name} is listed in {file}, which is missing; copy the whole checkpoint")
        by_file.setdefault(file, set()).add(name)
    return {folder / file: frozenset(by_file[file]) for file in sorted(by_file)}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{file} cannot be read as JSON: {error}; save the checkpoint again") from error
    return content if isinstance(content, dict) else {}


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise SourceError(f"{file} cannot be read as safetensors: {error}; save the checkpoint again") from error
    with opened:
        yield opened


def _select(file: Path, opened: Any, names: frozenset[str] | None) -> list[str]:
    held: list[str] = list(opened.keys())
    if names is None:
        return held
    if absent := names.difference(held):
        raise SourceError(f"{file}: {min(absent)} is missing, though {_INDEX} lists it here; save the checkpoint again")
    return [name for name in held if name in names]


def _spec(file: Path, opened: Any, name: str) -> TensorSpec:
    header = opened.get_slice(name)
    dtype = _DTYPES.get(header.get_dtype())
    if dtype not in DTYPES:
        raise SourceError(f"{name}: dtype {header.get_dtype()} (in {file}) cannot be sent")
    return TensorSpec(name, dtype, tuple(header.get_shape()))
