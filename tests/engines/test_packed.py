"""SGLang with layers that it packs after it has loaded them: they are packed in a standby, before the pause."""

import os

import pytest

from tools import models, servers
from weightsync import Sender
from weightsync.errors import WeightSyncError

from .conftest import BF16_ROUNDING, HERE, NEW_TOKENS, PROMPT, apart

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 2])
def packing(request, model_folder, tmp_path_factory):
    """A server of the first of two models, the file that has it pack wrongly, and the folders of both models."""
    folders = [model_folder("qwen3", seed) for seed in (0, 1)]
    path = os.pathsep.join(filter(None, (str(HERE / "packing_site"), str(servers.ROOT), os.environ.get("PYTHONPATH"))))
    wrongly = tmp_path_factory.mktemp("packing") / "wrongly"
    env = {"PYTHONPATH": path, "PACK_WRONGLY": str(wrongly)}
    with servers.start("sglang", folders[0], tp=request.param, args=["--sleep-on-idle"], env=env) as server:
        yield server, wrongly, folders


def assert_serves(server, folder):
    tokens, logprobs = servers.greedy(server, PROMPT, NEW_TOKENS)
    own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
    assert apart(logprobs, own) <= BF16_ROUNDING


def served(sender):
    (status,) = sender.status(digest=True).values()
    return status.version, [rank.digest for rank in status.ranks]


def test_packed_layers_are_loaded_into_a_standby_and_exchanged(packing):
    server, _, (a, b) = packing
    with Sender([server.url]) as sender:
        assert_serves(server, a)
        for folder in (b, a, b, a, b):
            (result,) = sender.push(models.load_reference(folder)).engines.values()
            assert_serves(server, folder)
        assert result.loading == ("into a standby, by the engine's own loader, and exchanged",)
        sender.rollback()
        assert_serves(server, a)


def test_a_layer_that_is_packed_wrongly_is_refused_by_name(packing):
    server, wrongly, (a, b) = packing
    with Sender([server.url], verify="deep") as sender:
        for folder, version in ((a, "a"), (b, "b")):
            sender.push(models.load_reference(folder), version=version)
        before = served(sender)
        wrongly.touch()
        with pytest.raises(
            WeightSyncError, match=r"it differs in model\.layers\.0\.self_attn\.qkv_proj\.weight"
        ) as raised:
            sender.push(models.load_reference(a), version="wrong")
        assert not wrongly.exists()
        assert raised.value.weights == "unchanged"
        assert served(sender) == before
        assert_serves(server, b)
        (result,) = sender.push(models.load_reference(a), version="a").engines.values()
        assert result.loading == ("into a standby, by the engine's own loader, and exchanged",)
        _, right = served(sender)
        sender.push(models.load_reference(b), version="b")
        assert served(sender) == before
    with Sender([server.url]) as sender:
        sender.push(models.load_reference(b))
        wrongly.touch()
        sender.push(models.load_reference(a), version="unseen")
        _, unseen = served(sender)
        assert [one == two for one, two in zip(unseen, right, strict=True)].count(False) == 1
        sender.push(models.load_reference(a), version="a")
        assert served(sender) == ("a", right)
