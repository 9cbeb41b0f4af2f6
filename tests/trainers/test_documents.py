"""Every block of docs/trainers.md runs as it stands there, in two processes, and what it trains is what is served."""

import pytest

from tests.documents import TRAINERS, blocks, shown
from tests.trainers.documents import KINDS, NEED_PACKAGES
from tests.trainers.running import PACKAGES, check, pushes
from tools import servers
from weightsync.testing import ReferenceEngine

#: The blocks for models that Megatron-Core splits.
PARALLEL = {"Megatron-Core, tensor parallel", "Megatron-Core, pipeline parallel"}


def test_every_block_of_the_page_runs_here():
    found = shown(TRAINERS)
    assert found.keys() == KINDS.keys() | NEED_PACKAGES.keys() | PARALLEL
    assert len(found) == len(blocks(TRAINERS))


def test_every_block_of_the_page_has_at_most_fifteen_lines():
    lines = {heading: len(text.splitlines()) for heading, text in shown(TRAINERS).items()}
    assert {heading: count for heading, count in lines.items() if count > 15} == {}


@pytest.fixture(scope="module")
def seen(engine, model_folder):
    return pushes("documents", model_folder("llama", 1), engine.url, KINDS)


@pytest.mark.parametrize("heading", KINDS)
def test_blocks_that_need_only_torch_push_what_they_train(seen, heading):
    check(seen[heading])


@pytest.mark.frameworks
def test_blocks_that_need_other_packages_push_what_they_train(engine, model_folder):
    seen = pushes("documents", model_folder("llama", 1), engine.url, NEED_PACKAGES, PACKAGES)
    for heading in NEED_PACKAGES:
        check(seen[heading])


@pytest.fixture(params=["llama", "qwen3", "qwen3_moe"])
def parallel(request, model_folder):
    """A folder of each model that Megatron-Core's table is for, and the URL of an engine."""
    kind, folder = request.param, model_folder(request.param, 0)
    # The reference engine knows no experts.
    with servers.start("vllm", folder) if kind == "qwen3_moe" else ReferenceEngine(folder) as started:
        yield model_folder(kind, 1), started.url


@pytest.mark.frameworks
def test_blocks_of_megatron_core_push_what_they_train(parallel):
    seen = pushes("parallel_documents", *parallel, sorted(PARALLEL), PACKAGES)
    for heading in PARALLEL:
        check(seen[heading])
