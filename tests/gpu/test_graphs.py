"""Pushes to an engine that computes in a CUDA graph: the weights must stay where the graph has them."""

import sys

import pytest
import torch

from tests.helpers import served_digest
from tools import models
from weightsync import Sender
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: run on a machine with CUDA and a CUDA build of torch"
)
PROMPT = list(b"on a device")
WAYS = {
    (): "load plan",
    ("--packs",): "into a standby, by the engine's own loader, and copied",
}


@pytest.fixture(scope="module", params=WAYS)
def engine(request, model_folder):
    launcher = (sys.executable, "-m", "tests.gpu.graphs", *request.param)
    with ReferenceEngine(model_folder("llama", 0), device="cuda", launcher=launcher) as engine:
        engine.loading = WAYS[request.param]
        yield engine


def change(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def assert_served(engine, model):
    """The graph computes with the model's weights."""
    assert served_digest(engine) == digest_of(model.state_dict().items())
    tokens, logprobs = engine.generate(PROMPT, 8)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens], device="cuda")).logits[0, len(PROMPT) - 1 : -1].float()
    own = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].tolist()
    assert max(abs(x - y) for x, y in zip(logprobs, own, strict=True)) < 0.1


@pytest.mark.parametrize("options", [{}, {"verify": "deep"}, {"transport": "nixl"}, {"bucket_bytes": 65536}])
def test_the_graph_computes_with_what_was_pushed(engine, trained, options):
    with Sender([engine.url], **options) as sender:
        for _ in range(3):
            change(trained)
            sender.push(trained)
            assert_served(engine, trained)
        (rank,) = sender.status()[engine.url].ranks
    assert rank.loading.startswith(engine.loading)


def test_the_version_before_is_served_again(engine, trained, model_folder):
    before = models.load_reference(model_folder("llama", 0)).cuda()
    with Sender([engine.url], keep_previous=True) as sender:
        sender.push(before)
        sender.push(trained)
        assert_served(engine, trained)
        sender.rollback()
        assert_served(engine, before)
