"""Real trainers of TRL push into a real vLLM, on this CPU and without its development mode."""

import pytest
import requests

from tests.frameworks.running import NEWEST, ROUNDING, apart, label, run
from tools import models, servers, versions
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.frameworks
EXAMPLE = servers.ROOT / "examples" / "trl_grpo.py"


#: As a parameter it says whose version it is, for the table of versions.
TRL = [("trl", version) for version in versions.TRL]
#: The AsyncGRPO of the oldest loads kernels of FlashAttention when it is built, and there are none for a CPU.
OTHERS = [
    pytest.param(trl, program, id=f"{'-'.join(trl)}-{program}")
    for trl in TRL
    for program in ("FSDP2", "DDP", "RLOO", "PEFT", "online DPO", "AsyncGRPO")
    if (trl, program) != (TRL[0], "AsyncGRPO")
]


def train(program, *arguments, trl=NEWEST, **options):
    return run("-m", "tests.frameworks.training", program, *arguments, trl=trl, **options)


@pytest.mark.shows("GRPO")
@pytest.mark.parametrize("trl", TRL, ids="-".join)
def test_the_server_generates_with_what_grpo_has_trained(server, model_folder, tmp_path, trl):
    start = model_folder("qwen3", 0)
    before = label(server.url)
    assert requests.get(f"{server.url}/server_info", timeout=30).status_code == 404
    run(EXAMPLE, start, server.url, tmp_path, trl=trl[1])
    assert apart(server, models.load_reference(tmp_path)) <= ROUNDING
    assert apart(server, models.load_reference(start)) > ROUNDING
    # Pushed when the trainer was built, before each of three steps, and at the end.
    assert int(label(server.url)) - (int(before) if before.isdigit() else 0) == 5


@pytest.mark.shows("{program}")
@pytest.mark.parametrize(("trl", "program"), OTHERS)
def test_other_trainers_and_models(server, model_folder, tmp_path, trl, program):
    processes = 2 if program in ("FSDP2", "DDP") else 1
    train(program, model_folder("qwen3", 0), server.url, tmp_path, trl=trl[1], processes=processes)
    assert apart(server, models.load_reference(tmp_path)) <= ROUNDING


def test_a_server_that_is_not_the_senders_is_refused_before_training(server, model_folder, tmp_path):
    before = label(server.url)
    start = model_folder("qwen3", 0)
    with ReferenceEngine(start) as other:
        done = train("one process", start, server.url, tmp_path, other.url, check=False)
    assert f"the trainer generates at {server.url}, but its Sender pushes to {other.url}" in done.stderr
    assert label(server.url) == before


def test_a_model_that_is_not_the_servers_is_refused_before_training(server, model_folder, tmp_path):
    before = label(server.url)
    done = run(EXAMPLE, model_folder("llama", 0), server.url, tmp_path, trl=NEWEST, check=False)
    assert "ManifestMismatch" in done.stderr
    assert "in _init_vllm" in done.stderr  # while the trainer was built
    assert label(server.url) == before
