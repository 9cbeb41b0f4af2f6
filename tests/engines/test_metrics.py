"""The engines' own ``/metrics``, and the id of a push in the logs, on every configuration."""

import contextlib
import logging
import re
import time

import pytest
from safetensors.torch import load_file

from tests.interrupted import Interrupted, push_and_die
from tests.scraping import assert_bounded, assert_equals_results, scrape, scrape_here
from tests.unit.test_guarantees import flip_in
from tools import models
from weightsync.errors import ApplyFailed, DigestMismatch, LeaseHeld, ManifestMismatch

from .conftest import ALL, PATIENCE_S, configurations

pytestmark = configurations(ALL)


def test_what_the_engine_shows_is_what_results_and_errors_say(served, monkeypatch):
    url, weights = served.server.url, load_file(served.b / "model.safetensors")
    name = next(iter(weights))
    a, b = models.load_reference(served.a), models.load_reference(served.b)
    before, own, began = scrape(url), scrape_here(), time.time()
    seen, said = [], []

    @contextlib.contextmanager
    def fails(kind):
        with pytest.raises(kind) as raised:
            yield
        said.append(raised.value.engines[url])

    with served.sender(keep_previous=True) as sender:
        results = [sender.push(model, version=version) for model, version in ((a, "one"), (b, "two"), (a, "three"))]
        results.append(sender.push(Interrupted(weights, lambda: seen.append(scrape(url)))))
        results.append(sender.rollback())
        with fails(ManifestMismatch):
            sender.push({name: weights[name]})
        with served.sender() as second, fails(LeaseHeld):
            second.push(a)
        good = scrape(url)
        with monkeypatch.context() as patch, fails(DigestMismatch):
            flip_in(patch, 0)
            sender.push(Interrupted(weights, lambda: None))
    with served.sender(staging="none", bucket_bytes=8192) as sender:
        with monkeypatch.context() as patch, fails(ApplyFailed):
            flip_in(patch, 1)
            sender.push(Interrupted(weights, lambda: None))
        dirty = scrape(url)
    results.append(served.push(served.b))
    shown, trainer = scrape(url).since(before), scrape_here().since(own)

    assert said == ["unchanged", "unchanged", "unchanged", "dirty"]
    assert_equals_results(shown, results, url)
    assert_equals_results(trainer, results)
    assert shown.nonzero("pushes_total", "kind", "outcome") == {
        ("push", "committed"): 5,
        ("rollback", "committed"): 1,
        ("push", "refused"): 2,
        ("push", "aborted"): 1,
        ("push", "dirty"): 1,
    }
    assert trainer.nonzero("trainer_pushes_total", "kind", "outcome") == {
        ("push", "committed"): 5,
        ("rollback", "committed"): 1,
        ("push", "unchanged"): 3,
        ("push", "dirty"): 1,
    }
    assert [of.state() for of in (seen[0], good, dirty, shown)] == ["receiving", "serving", "dirty", "serving"]
    numbers = [of("commit_number") - before("commit_number") for of in (seen[0], good, dirty, shown)]
    assert numbers == [3, 5, 5, 6]
    assert began < good("lease_taken_timestamp_seconds") < good("commit_timestamp_seconds") < time.time()
    assert shown("lease_taken_timestamp_seconds") == 0
    assert shown.series == before.series
    assert_bounded(shown)


def test_a_push_whose_trainer_dies_is_abandoned(served):
    before = scrape(served.server.url)
    push_and_die(served.server.url, served.b)
    end = time.monotonic() + PATIENCE_S
    while (shown := scrape(served.server.url).since(before)).nonzero("pushes_total", "outcome") != {"abandoned": 1}:
        assert time.monotonic() < end, shown
        time.sleep(0.1)
    assert (shown.state(), shown("lease_taken_timestamp_seconds")) == ("serving", 0)


def test_one_id_is_in_the_logs_of_trainer_front_end_and_every_rank(served, caplog):
    caplog.set_level(logging.INFO, "weightsync")
    served.push(served.a, version="logged here")
    (push,) = set(re.findall(r"push (\w{16}): every engine serves version 'logged here'", caplog.text))
    end = time.monotonic() + 30
    wanted = [f"push {push}: version 'logged here' is served, commit number "]
    wanted += [f"push {push}: rank {rank} has loaded version 'logged here'" for rank in range(served.tp)]
    while lacking := [line for line in wanted if line not in served.server.log.read_text(errors="replace")]:
        assert time.monotonic() < end, (lacking, served.server.tail())
        time.sleep(0.1)
