"""What a served model reaches after pushes is what it reaches in an engine that has started with the last of them."""

import json
from typing import NamedTuple

import pytest

from tests.in_process.test_ways import LOADED, told_by

pytestmark = pytest.mark.slow  # two engines for each

PATIENCE_S = 300
EXTENSION = {"worker_extension_cls": "tests.in_process.reaching_extension.ReachingExtension"}


class Case(NamedTuple):
    kind: str
    options: dict = {}  # noqa: RUF012 - nobody writes to it


CASES = {
    # In this dtype vLLM packs weights on any CPU.
    "tied and packed": Case("qwen3", {"dtype": "float32"}),
    "experts": Case("qwen3_moe"),
    "linear attention": Case("qwen3_next"),
    "latent attention": Case("deepseek_v2"),
    "quantised": Case("llama", {"quantization": "fp8_per_channel"}),
}
#: At least so many of its tensors differ from model to model.
MANY = 10


def ran(case, *folders):
    """What an engine reached that started with the first folder, and got the others, by when."""
    return told_by("reaching", json.dumps({**EXTENSION, **case.options}), *folders, ranks=1, patience_s=PATIENCE_S)


@pytest.mark.parametrize("name", CASES)
def test_nothing_that_the_model_reaches_is_of_another_version(name, model_folder):
    case = CASES[name]
    a, b = (model_folder(case.kind, seed) for seed in (0, 1))
    pushed, fresh = ran(case, a, b, a, b), ran(case, b)
    assert pushed["end"]["loading"] == LOADED + "exchanged"
    before, after, expected = pushed["start"]["tensors"], pushed["end"]["tensors"], fresh["end"]["tensors"]
    differing = {path for path in after.keys() | expected.keys() if after.get(path) != expected.get(path)}
    assert not differing, {path: (after.get(path), expected.get(path)) for path in sorted(differing)}
    old = {content for content, *_ in before.values()} - {content for content, *_ in expected.values()}
    assert len(old) > MANY
    assert not [path for path, (content, *_) in after.items() if content in old]
