"""A model that is pushed with its draft model: one version, or the one before, of both."""

import signal
import sys

import pytest
import torch

from tests.helpers import served_digest
from tests.unit.loaders import AdapterOf
from tools import models
from weightsync import Sender
from weightsync.engine.drafts import Models, apart, why_not
from weightsync.errors import ApplyFailed, ManifestMismatch, SourceError, TransferFailed, UnsupportedOption
from weightsync.protocol.draft import PREFIX
from weightsync.protocol.http import TensorSpec
from weightsync.testing import ReferenceEngine

PROMPT, TOKENS = list(b"Once upon a time"), 4


@pytest.fixture(scope="module")
def folders(model_folder):
    """Two versions of a model, and two of a draft of another architecture."""
    return {
        name: model_folder(kind, seed)
        for name, kind, seed in (("A", "llama", 0), ("B", "llama", 1), ("a", "qwen3", 2), ("b", "qwen3", 3))
    }


@pytest.fixture(scope="module")
def loaded(folders):
    """As a trainer has them; not to be modified."""
    return {name: models.load_reference(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def served(folders):
    with ReferenceEngine(folders["A"], args=["--draft", str(folders["a"])]) as engine:
        yield engine


@pytest.fixture
def engine(served, loaded):
    """An engine that serves A, with the draft a."""
    with Sender([served.url]) as sender:
        sender.push(loaded["A"], draft=loaded["a"], version="start")
    return served


def which(engine, loaded):
    """Of which versions the model and the draft are that an answer is computed from."""
    answer = engine.answer(PROMPT, TOKENS)
    found = ""
    for names, logprobs in (("AB", answer.logprobs), ("ab", answer.drafted)):
        tokens = PROMPT + answer.tokens
        near = [
            name
            for name in names
            if torch.allclose(torch.tensor(own_of(loaded[name], tokens)), torch.tensor(logprobs), atol=0.05)
        ]
        found += near[0] if len(near) == 1 else "?"
    return found


def own_of(model, tokens):
    return models.reference_logprobs(model, tokens, len(PROMPT))


WAYS = [
    {},
    {"transport": "nccl"},
    {"transport": "nixl"},
    {"staging": "none"},
    {"keep_previous": True},
    {"verify": "deep"},
    {"bucket_bytes": 100_000},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_both_are_served_and_only_together(engine, loaded, options):
    with Sender([engine.url], **options) as sender:
        for target, draft in ("Bb", "Aa", "Ba", "Ab"):
            result = sender.push(loaded[target], draft=loaded[draft])
            assert which(engine, loaded) == target + draft
            assert result.kept == ()


def test_without_draft_it_stays_and_is_listed(engine, loaded):
    with Sender([engine.url]) as sender:
        before = served_digest(engine)
        result = sender.push(loaded["B"])
        assert which(engine, loaded) == "Ba"
        assert set(result.kept) == {PREFIX + name for name in dict(loaded["a"].named_parameters())}
        assert served_digest(engine) != before
        assert sender.push(loaded["A"], draft=loaded["b"]).kept == ()
        assert which(engine, loaded) == "Ab"
        sender.push(loaded["B"])
        assert which(engine, loaded) == "Bb"


def test_the_two_ways_may_follow_each_other(engine, loaded):
    """Each with its load plan, from its second push on."""
    with Sender([engine.url]) as sender:
        for _ in range(3):
            for target, draft in ("Bb", "Aa"):
                sender.push(loaded[target], draft=loaded[draft])
            for target in "BA":
                sender.push(loaded[target])
                assert which(engine, loaded) == f"{target}a"
        for _ in range(3):
            sender.push(loaded["B"], draft=loaded["b"])
        (status,) = sender.status().values()
        assert "load plan" in status.ranks[0].loading
        assert which(engine, loaded) == "Bb"


def test_a_rollback_is_of_both(engine, loaded):
    with Sender([engine.url], keep_previous=True) as sender:
        sender.push(loaded["A"], draft=loaded["a"], version="one")
        sender.push(loaded["B"], draft=loaded["b"], version="two")
        assert sender.rollback().version == "one"
        assert which(engine, loaded) == "Aa"
        assert sender.rollback().version == "two"
        assert which(engine, loaded) == "Bb"


def test_no_rollback_leaves_a_later_draft_beside_an_earlier_model(engine, loaded):
    with Sender([engine.url], keep_previous=True) as sender:
        sender.push(loaded["A"], version="one")
        sender.push(loaded["B"], draft=loaded["b"], version="two")
        with pytest.raises(TransferFailed, match="no version to go back to"):
            sender.rollback()
        assert which(engine, loaded) == "Bb"
        sender.push(loaded["A"], version="three")
        sender.rollback()
        assert which(engine, loaded) == "Bb"


@pytest.mark.parametrize("source", ["folder", "mapping", "module"])
def test_a_draft_is_read_as_a_model_is(engine, loaded, folders, source):
    made = {"folder": folders, "mapping": {name: dict(model.state_dict()) for name, model in loaded.items()}}
    target, draft = (made.get(source, loaded)[name] for name in "Bb")
    with Sender([engine.url]) as sender:
        if source != "folder":  # the output layer is tied to the embedding, and written once
            draft = draft if source == "module" else {k: v for k, v in draft.items() if k != "lm_head.weight"}
        for _ in range(3):
            assert sender.push(target, draft=draft).nbytes > sender.push(target).nbytes
        sender.push_async(target, draft=draft).result()
    assert which(engine, loaded) == "Bb"


def refused(engine, loaded, model, draft, match, kind=ManifestMismatch):
    """Assert that a push is refused, and changes nothing."""
    digest = served_digest(engine)
    with Sender([engine.url]) as sender:
        before = sender.status()[engine.url].version
        with pytest.raises(kind, match=match) as caught:
            sender.push(model, draft=draft)
        assert caught.value.weights == "unchanged"
        assert sender.status()[engine.url].version == before
    assert served_digest(engine) == digest


def test_another_draft_is_refused_by_name(engine, loaded, trained):
    weights = dict(loaded["b"].state_dict())
    weights.pop("lm_head.weight")
    narrow = {**weights, "model.embed_tokens.weight": weights["model.embed_tokens.weight"][:500]}
    refused(engine, loaded, loaded["B"], narrow, r"wrong shape: draft:model.embed_tokens.weight .*500, 128")
    refused(engine, loaded, loaded["B"], loaded["B"], "unknown to the engine: draft:lm_head.weight")
    lacking = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    refused(engine, loaded, loaded["B"], lacking, r"missing: draft:model.norm.weight")
    refused(engine, loaded, loaded["B"], {**weights, "more": torch.ones(3)}, "unknown to the engine: draft:more")


def test_an_engine_without_a_draft_refuses_one(model_folder, loaded):
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        refused(engine, loaded, loaded["B"], loaded["b"], "takes no draft model .draft:.*: it has none")


def test_what_cannot_be_a_draft_is_refused_before_an_engine_is_asked(engine, loaded):
    tensors = dict(loaded["B"].state_dict())
    refused(engine, loaded, iter(tensors.items()), loaded["b"], "push modules or mappings", SourceError)
    refused(engine, loaded, loaded["B"], iter(tensors.items()), "push modules or mappings", SourceError)
    marked = {**tensors, "draft:x": torch.ones(1)}
    refused(engine, loaded, marked, loaded["b"], "names that begin with 'draft:'", SourceError)
    with Sender([engine.url]) as sender, pytest.raises(UnsupportedOption, match="an adapter is pushed alone"):
        sender.push(loaded["B"], lora="policy", draft=loaded["b"])


def test_an_earlier_engine_is_refused(model_folder, loaded):
    code = "from weightsync import testing; testing.http.PROTOCOL = (1, 7); testing.main()"
    launcher = (sys.executable, "-c", code)
    with ReferenceEngine(model_folder("llama", 0), launcher=launcher) as engine:
        refused(
            engine,
            loaded,
            loaded["B"],
            loaded["b"],
            "takes no draft model with the model; update it",
            UnsupportedOption,
        )


def test_a_failure_between_the_two_leaves_neither(folders, loaded):
    """In the draft's loader, after all of the model has been loaded."""
    code = (
        "from weightsync import testing\n"
        "load, left = testing.ModelAdapter.load, [0]\n"
        "def fail(self, weights):\n"
        "    weights = list(weights)\n"
        "    if left[0] and self._draft is None and type(weights[0][1]).__name__ != 'FakeTensor':\n"
        "        left[0] -= 1\n"
        "        raise RuntimeError('out of luck')\n"
        "    load(self, weights)\n"
        "testing.ModelAdapter.load = fail\n"
        "testing.ModelAdapter.loader_hooks = lambda self: 'it is sealed'\n"
        "import signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: left.__setitem__(0, 1))\n"
        "testing.main()"
    )
    args = ["--draft", str(folders["a"])]
    with ReferenceEngine(folders["A"], launcher=(sys.executable, "-c", code), args=args) as engine:
        with Sender([engine.url]) as sender:
            sender.push(loaded["A"], draft=loaded["a"])
            engine.process.send_signal(signal.SIGUSR1)
            with pytest.raises(ApplyFailed, match="out of luck") as caught:
                sender.push(loaded["B"], draft=loaded["b"])
            assert caught.value.weights == "dirty"
            with pytest.raises(ManifestMismatch, match="failed half-way; push both again"):
                sender.push(loaded["B"])
            assert sender.status()[engine.url].state == "dirty"
            sender.push(loaded["B"], draft=loaded["b"])
            assert which(engine, loaded) == "Bb"
        with Sender([engine.url], keep_previous=True) as sender:
            sender.push(loaded["B"], draft=loaded["b"])
            engine.process.send_signal(signal.SIGUSR1)
            with pytest.raises(ApplyFailed, match="out of luck") as caught:
                sender.push(loaded["A"], draft=loaded["a"])
            assert caught.value.weights == "unchanged"
            assert which(engine, loaded) == "Bb"


def test_engines_keep_drafts_that_need_not_be_the_same(folders, loaded, engine):
    with ReferenceEngine(folders["A"], args=["--draft", str(folders["b"])]) as other:
        with Sender([engine.url, other.url]) as sender:
            result = sender.push(loaded["B"])
            assert all(name.startswith(PREFIX) for name in result.kept)
            assert result.unverified == ()
        assert [which(one, loaded) for one in (engine, other)] == ["Ba", "Bb"]


def test_a_draft_before_its_model_is_refused(engine, loaded):
    draft = {PREFIX + name: tensor for name, tensor in loaded["b"].state_dict().items() if name != "lm_head.weight"}
    refused(engine, loaded, {**draft, **loaded["B"].state_dict()}, None, "has the tensors of a draft model last")


def two_that_share():
    """A model and a draft with one embedding, as an engine has them."""
    target, draft = (torch.nn.ModuleDict({"model": torch.nn.ModuleDict()}) for _ in "ab")
    for each in (target, draft):
        each["model"]["embed"] = torch.nn.Embedding(4, 2)
        each["model"]["own"] = torch.nn.Linear(2, 2)
    draft["model"]["embed"] = target["model"]["embed"]
    return target, draft


@pytest.mark.parametrize(("name", "said"), [("embed.weight", "the same for embed.weight"), ("model.own.weight", "")])
def test_a_draft_that_would_be_loaded_into_layers_of_the_model_is_refused(name, said):
    target, draft = two_that_share()
    adapter = AdapterOf(draft, None, [TensorSpec(name, "float32", (4, 2))])
    found = why_not(target, draft, adapter)
    assert said in found
    assert bool(found) == bool(said)


def test_what_is_shared_is_the_models():
    target, draft = two_that_share()
    names = [name for name, _ in draft.named_parameters()]
    assert apart(target, draft, names) == ["model.own.weight", "model.own.bias"]
    live, fresh = Models(target, draft), Models(*two_that_share())
    fresh.put("model.embed", torch.nn.Embedding(4, 2))
    assert (live.shared(), fresh.shared()) == ([("model.embed", "model.embed")], [])
    for name, own in live.shared():
        fresh.put(name, fresh.target.get_submodule(own))
    assert fresh.shared() == live.shared()
