"""What a complete push to an engine consists of, from the folder it was started with."""

import shutil

import pytest

from tools import models
from weightsync.engine.expected_checkpoint import expected_of
from weightsync.errors import ManifestMismatch
from weightsync.sources import open_source
from weightsync.tensors.layout import check_manifest


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_the_expected_manifest_is_what_the_trainer_sends(model_folder, tmp_path, kind):
    folder = model_folder(kind, 0)
    shutil.copy(folder / "config.json", tmp_path)
    pushed = open_source(models.load_reference(folder)).specs
    for where in (folder, tmp_path):
        expected = expected_of(str(where), revision=None, dtype="bfloat16")
        check_manifest(pushed, expected.specs, expected.optional)


def test_a_folder_without_a_known_model_is_refused_with_advice(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ManifestMismatch, match=r"cannot tell what a complete push.*start the engine from a folder"):
        expected_of(str(tmp_path), revision=None, dtype="bfloat16")
