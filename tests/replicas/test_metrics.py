"""Engines with several processes that serve HTTP: every one of them shows the metrics of the one with the front end."""

import pytest

from tests.engines.conftest import METRICS
from tests.replicas.test_replicas import PATIENCE_S
from tests.scraping import assert_equals_results, scrape
from tools import models, servers
from weightsync import Sender
from weightsync.errors import ManifestMismatch

pytestmark = pytest.mark.slow  # the same code with the reference engine is in tests/unit/test_metrics.py

#: More than it takes for each process to be asked at least once.
SCRAPES = 12
SEVERAL = {
    "vllm": (("--api-server-count", "2"), {}),
    "sglang": (("--tokenizer-worker-num", "2"), {"OMP_NUM_THREADS": "1"}),
}


@pytest.mark.parametrize("engine", SEVERAL)
def test_every_process_shows_what_the_results_say(engine, model_folder):
    args, env = SEVERAL[engine]
    trained = models.load_reference(model_folder("qwen3", 1))
    with (
        servers.start(engine, model_folder("qwen3", 0), args=(*args, *METRICS[engine]), env=env) as server,
        Sender([server.url], timeout_s=PATIENCE_S) as sender,
    ):
        results = [sender.push(trained, version=str(number)) for number in range(3)]
        with pytest.raises(ManifestMismatch):
            sender.push({"model.norm.weight": trained.model.norm.weight})
        shown = [scrape(server.url) for _ in range(SCRAPES)]
    for each in shown:
        assert each == shown[0]
    assert_equals_results(shown[0], results, server.url)
    assert shown[0].nonzero("pushes_total", "outcome") == {"committed": 3, "refused": 1}
    assert (shown[0].state(), shown[0]("commit_number")) == ("serving", 3)
