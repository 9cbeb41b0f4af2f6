"""vLLM with a draft model: what it accepts of its proposals tells of which version each of the two models is."""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import requests
import torch

from tests.drafts import bigrams
from tests.engines.conftest import NEW_TOKENS, PROMPT, assert_same
from tools import models, servers
from weightsync import Sender
from weightsync.cli import main
from weightsync.errors import ManifestMismatch
from weightsync.protocol.draft import PREFIX
from weightsync.sources import open_source

_COUNTS = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")


@dataclass
class Served:
    """A server that was started on model A, with a draft that proposes what A does.

    ``mtp``: how the names of its layer for multi-token prediction begin.
    """

    server: servers.Server
    a: Path
    b: Path
    mtp: str = ""

    def _counts(self):
        text = requests.get(f"{self.server.url}/metrics", timeout=10).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines()]
        return [sum(float(value) for name, value in lines if name.partition("{")[0] == count) for count in _COUNTS]

    def ask(self):
        """An answer, and the share of the proposed tokens that were accepted for it."""
        before = self._counts()
        answer = servers.greedy(self.server, PROMPT, NEW_TOKENS)
        accepted, proposed = (now - then for now, then in zip(self._counts(), before, strict=True))
        assert proposed > 0
        return answer, accepted / proposed

    def digests(self):
        with Sender([self.server.url]) as sender:
            return [rank.digest for rank in sender.status(digest=True)[self.server.url].ranks]


#: The last proposals may go beyond the answer's end.
MOST, FEW = 0.8, 0.3


def started(a, tp, *args, **spec):
    return servers.start("vllm", a, tp=tp, args=["--speculative-config", json.dumps(spec), *args])


#: What is packed, as in FP8, vLLM's own loader loads into a standby; else a load plan does.
WAYS = [
    ("qwen3", 1, ""),
    *(
        pytest.param(way, marks=pytest.mark.slow)
        for way in (
            ("qwen3", 2, ""),
            ("qwen3", 1, "fp8_per_channel"),
            ("qwen3_moe", 1, ""),
            ("qwen3_moe", 2, ""),
        )
    ),
]


@pytest.fixture(scope="module", params=WAYS, ids="{0[0]}-tp{0[1]}{0[2]}".format)
def drafted(request, model_folder):
    """With a draft model, which is a second A."""
    kind, tp, quantization = request.param
    a, b = (model_folder(kind, seed) for seed in (0, 1))
    spec, args = {"method": "draft_model", "model": str(a), "num_speculative_tokens": 3}, []
    if quantization:
        spec["quantization"], args = quantization, ["--quantization", quantization]
    with started(a, tp, *args, **spec) as server:
        yield Served(server, a, b)


@pytest.fixture(scope="module")
def fresh(drafted):
    """Of the server as it started: its answer, its digests."""
    answer, accepted = drafted.ask()
    assert accepted >= MOST
    return answer, drafted.digests()


def test_acceptance_falls_with_the_model_alone_and_is_back_with_its_draft(drafted, fresh):
    a, b = map(models.load_reference, (drafted.a, drafted.b))
    with Sender([drafted.server.url]) as sender:
        result = sender.push(b)
        assert set(result.kept) == {PREFIX + spec.name for spec in open_source(drafted.a).specs}
        alone, accepted = drafted.ask()
        assert accepted <= FEW
        for _ in range(3):
            assert sender.push(b, draft=b).kept == ()
            answer, accepted = drafted.ask()
            assert accepted >= MOST
            assert_same(answer, alone)
            assert drafted.digests() != fresh[1]
            sender.push(a, draft=a)
            answer, accepted = drafted.ask()
            assert accepted >= MOST
            assert_same(answer, fresh[0])
            assert drafted.digests() == fresh[1]
        sender.push(a, draft=b)
        assert drafted.ask()[1] <= FEW
        (status,) = sender.status().values()
        assert all("into a standby" in rank.loading for rank in status.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"transport": "nccl"}, {"transport": "nixl"}, {"staging": "none"}, {"verify": "deep"}], ids=str
)
def test_every_way_to_push_serves_both(drafted, fresh, options):
    a, b = map(models.load_reference, (drafted.a, drafted.b))
    with Sender([drafted.server.url], **options) as sender:
        for model in (b, a):
            sender.push(model, draft=model)
            assert drafted.ask()[1] >= MOST
    assert drafted.digests() == fresh[1]


def test_a_rollback_goes_back_to_both(drafted, fresh):
    a, b = map(models.load_reference, (drafted.a, drafted.b))
    with Sender([drafted.server.url]) as sender:
        sender.push(a, draft=a)
        sender.push(b, draft=b)
        sender.rollback()
        assert drafted.digests() == fresh[1]
        assert drafted.ask()[1] >= MOST


def test_a_draft_of_another_vocabulary_or_architecture_is_refused_by_name(drafted, fresh, model_folder):
    a = models.load_reference(drafted.a)
    narrow = {name: tensor for name, tensor in a.state_dict().items() if name != "lm_head.weight"}
    narrow["model.embed_tokens.weight"] = narrow["model.embed_tokens.weight"][:256]
    # What a Llama has that a tied Qwen3 has not, and one of experts.
    unknown = r"unknown to the engine: draft:(lm_head|model\.layers\.0\.mlp\.down_proj)\.weight"
    with Sender([drafted.server.url]) as sender:
        sender.push(a, draft=a)
        for draft, words in (
            (narrow, r"draft:model.embed_tokens.weight .*256, 128"),
            (models.load_reference(model_folder("llama", 0)), unknown),
        ):
            with pytest.raises(ManifestMismatch, match=words) as caught:
                sender.push(models.load_reference(drafted.b), draft=draft)
            assert caught.value.weights == "unchanged"
    assert drafted.digests() == fresh[1]


def test_status_tells_of_a_draft(drafted, capsys):
    assert main(["status", drafted.server.url]) == 0
    assert "draft model" in capsys.readouterr().out


@pytest.fixture(scope="module", params=list(product(bigrams.MTP, (1, 2))), ids="{0[0]}-tp{0[1]}".format)
def predicting(request, tmp_path_factory):
    """With a layer for multi-token prediction."""
    (kind, tp), root = request.param, tmp_path_factory.mktemp("bigrams")
    a, b = (bigrams.make(root / str(seed), seed, kind) for seed in (0, 1))
    # Prefixes of linear attention are copied by kernels that need Triton.
    args = ["--no-enable-prefix-caching"] if kind == "qwen3_next" else []
    with started(a, tp, *args, method="mtp", num_speculative_tokens=1) as server:
        yield Served(server, a, b, bigrams.MTP[kind])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"staging": "none"}, {"verify": "deep"}, {"transport": "nixl"}], ids=str)
def test_layers_for_multi_token_prediction_are_of_the_models_version(predicting, options):
    a, b = map(bigrams.weights_of, (predicting.a, predicting.b))
    with Sender([predicting.server.url], **options) as sender:
        sender.push(a)
        before = predicting.digests()
        assert predicting.ask()[1] >= MOST
        for _ in range(2):
            sender.push(b)
            assert predicting.ask()[1] >= MOST
            sender.push(a)
            assert predicting.ask()[1] >= MOST
            assert predicting.digests() == before


@pytest.mark.slow
def test_layers_for_multi_token_prediction_may_stay(predicting):
    a, b = map(bigrams.weights_of, (predicting.a, predicting.b))
    alone = {name: tensor for name, tensor in b.items() if not name.startswith(predicting.mtp)}
    with Sender([predicting.server.url]) as sender:
        sender.push(a)
        result = sender.push(alone, allow_missing=[f"{predicting.mtp}*"])
        assert set(result.kept) == {name for name in a if name.startswith(predicting.mtp)}
        assert predicting.ask()[1] <= FEW
        with pytest.raises(ManifestMismatch, match="it has none with a checkpoint of its own"):
            sender.push(a, draft={"w": torch.ones(1)})
        sender.push(b)
        assert predicting.ask()[1] >= MOST
