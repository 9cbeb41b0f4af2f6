"""What a complete push to an engine consists of, found out from the model folder it was started with.

Where there is no such list, the recording of the loader decides alone, see `loading.loader` and `coverage`.
"""

from __future__ import annotations

from weightsync.engine.adapter import Expected
from weightsync.errors import ManifestMismatch, SourceError
from weightsync.sources.checkpoint import local_folder, optional_names, quantization, read_specs
from weightsync.sources.from_config import specs_from_config


def expected_of(model: str, revision: str | None, dtype: object) -> Expected:
    """The checkpoint of ``model``, a folder or the name of a cached hub repository.

    Read from the headers of its safetensors files; where there are none (dummy weights), what transformers would write
    for its configuration, in ``dtype``, of torch or by its name. Raises `ManifestMismatch` where neither can be had.
    """
    try:
        folder = local_folder(model, revision)
        if any(folder.glob("*.safetensors")):
            return Expected(read_specs(folder), optional_names(folder), quantization(folder))
        return Expected(specs_from_config(folder, dtype=str(dtype).removeprefix("torch.")))
    except SourceError as error:
        raise ManifestMismatch(
            f"cannot tell what a complete push to {model} is: {error}; start the engine from a folder with safetensors "
            "files or with a configuration that transformers knows"
        ) from error
