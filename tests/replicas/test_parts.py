"""Engines whose ranks hold parts of the model that they do not compute with on a CPU, or not alone.

They cannot be asked for tokens there: vLLM's pipelines and experts, and SGLang's experts, fail at the first prompt. So
after a push the digest of every rank is compared with that of a server that was started on the pushed model.
"""

import pytest

from tools import models, servers
from weightsync import Sender

pytestmark = pytest.mark.slow  # two servers for each

#: Of SGLang: nothing asks for a token.
SILENT = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
#: By name: the engine, the model, the number of tensor-parallel ranks, options and environment.
PARTS = {
    "vllm pipeline": ("vllm", "qwen3", 1, ("-pp", "2"), {}),
    "vllm experts": ("vllm", "qwen3_moe", 2, ("--enable-expert-parallel",), {}),
    "sglang experts": ("sglang", "qwen3_moe", 2, ("--ep-size", "2", "--skip-server-warmup"), SILENT),
}


def digests(sender):
    (reply,) = sender.status(digest=True).values()
    return reply.version, [(rank.rank, rank.digest) for rank in reply.ranks]


@pytest.mark.parametrize("name", PARTS)
def test_every_rank_holds_what_a_fresh_server_holds(name, model_folder):
    engine, kind, tp, args, env = PARTS[name]
    a, b = model_folder(kind, 0), model_folder(kind, 1)
    with (
        servers.start(engine, a, tp=tp, args=args, env=env) as server,
        Sender([server.url], timeout_s=120, keep_previous=True, verify="deep") as sender,
    ):
        _, before = digests(sender)
        sender.push(models.load_reference(b), version="b")
        sender.push(models.load_reference(a), version="a")
        assert digests(sender) == ("a", before)
        sender.rollback()
        version, pushed = digests(sender)
        assert (version, [rank for rank, _ in pushed]) == ("b", [0, 1])
    with servers.start(engine, b, tp=tp, args=args, env=env) as server, Sender([server.url], timeout_s=120) as sender:
        _, fresh = digests(sender)
    assert pushed == fresh != before
