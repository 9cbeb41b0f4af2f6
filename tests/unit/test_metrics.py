"""Metrics, as a Prometheus server sees them, beside what the results and errors of the same pushes say."""

import json
import os
import subprocess
import sys
import time

import pytest
import requests

from tests.faulty import faulty
from tests.interrupted import Interrupted, push_and_die
from tests.scraping import assert_bounded, assert_equals_results, parse, scrape, scrape_here
from tests.unit import two_ranks
from tests.unit.test_guarantees import flip_in
from tests.unit.two_ranks import WEIGHTS
from tools import servers
from weightsync import Sender
from weightsync.engine import metrics
from weightsync.errors import ApplyFailed, DigestMismatch, LeaseHeld, ManifestMismatch, TransferFailed, WeightSyncError
from weightsync.protocol import directories
from weightsync.testing import ReferenceEngine, ReferenceInProcess


def until(true, what):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def fresh(model_folder):
    """A reference engine of this test alone."""
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        yield engine


def test_what_engine_and_trainer_show_is_what_the_results_say(fresh, trained):
    began, before = time.time(), scrape_here()
    unpushed = scrape(fresh.url)
    assert unpushed.nonzero("pushes_total", "outcome") == {}
    assert (unpushed("commit_number"), unpushed("lease_taken_timestamp_seconds")) == (0, 0)
    seen = []
    with Sender([fresh.url], keep_previous=True) as sender:
        results = [sender.push(trained, version=f"v{number}") for number in range(3)]
        results.append(
            sender.push(Interrupted(trained.state_dict(), lambda: seen.extend([scrape(fresh.url), scrape_here()])))
        )
        pushed = scrape(fresh.url)
        results.append(sender.rollback())
        engine, trainer = scrape(fresh.url), scrape_here().since(before)
        idle = trainer.nonzero("trainer_senders", "state")
    closed = scrape(fresh.url)

    assert_equals_results(engine, results, fresh.url)
    assert_equals_results(trainer, results)
    both = {("push", "committed"): 4, ("rollback", "committed"): 1}
    assert engine.nonzero("pushes_total", "kind", "outcome") == both
    assert trainer.nonzero("trainer_pushes_total", "kind", "outcome") == both
    phases = {"prepare": 4, "transfer": 4, "commit": 5}
    assert engine.nonzero("push_seconds_count", "phase") == phases
    assert engine("push_seconds_sum", phase="commit") <= sum(result.seconds["commit"] for result in results)
    assert (pushed("commit_number"), engine("commit_number")) == (4, 5)
    assert began < pushed("commit_timestamp_seconds") < engine("commit_timestamp_seconds") < time.time()
    assert began < trainer("trainer_commit_timestamp_seconds") < time.time()
    assert (engine.state(), seen[0].state()) == ("serving", "receiving")
    assert seen[1].nonzero("trainer_senders", "state")["transferring"] == 1
    assert idle["idle"] == seen[1].nonzero("trainer_senders", "state").get("idle", 0) + 1
    assert scrape_here().nonzero("trainer_senders", "state").get("idle", 0) == idle["idle"] - 1
    taken = engine("lease_taken_timestamp_seconds")
    assert began < taken < pushed("commit_timestamp_seconds")
    assert taken == seen[0]("lease_taken_timestamp_seconds")
    assert closed("lease_taken_timestamp_seconds") == 0


def test_every_fault_is_counted_once_as_the_error_says(model_folder, trained, tmp_path, monkeypatch):
    before = scrape_here()
    with faulty(model_folder("llama", 0), tmp_path) as engine, Sender([engine.url]) as sender:

        def fails(kind, model=trained):
            with pytest.raises(kind) as raised:
                sender.push(model)
            return raised.value.weights

        said = [fails(ManifestMismatch, {"model.norm.weight": trained.model.norm.weight})]
        sender.push(trained)
        taken = scrape(engine.url)("lease_taken_timestamp_seconds")
        with Sender([engine.url]) as second, pytest.raises(LeaseHeld) as raised:
            second.push(trained)
        said.append(raised.value.weights)
        assert scrape(engine.url)("lease_taken_timestamp_seconds") == taken
        with monkeypatch.context() as patch:
            flip_in(patch, 0)
            said.append(fails(DigestMismatch, Interrupted(trained.state_dict(), lambda: None)))
        with pytest.raises(KeyboardInterrupt):
            sender.push(Interrupted(trained.state_dict(), interrupt))
        refused = sum(scrape(engine.url).nonzero("pushes_total", "outcome").values())
        with pytest.raises(TransferFailed) as raised:
            sender.rollback()
        said.append(raised.value.weights)
        assert sum(scrape(engine.url).nonzero("pushes_total", "outcome").values()) == refused  # nothing was asked of it
        engine.order("raise")
        said.append(fails(ApplyFailed))
        dirty = scrape(engine.url)
        said.append(fails(ManifestMismatch, {"model.norm.weight": trained.model.norm.weight}))
        with monkeypatch.context() as patch:
            flip_in(patch, 0)
            said.append(fails(DigestMismatch, Interrupted(trained.state_dict(), lambda: None)))
        sender.push(trained)
        healed, trainer = scrape(engine.url), scrape_here().since(before)

    assert said == ["unchanged"] * 4 + ["dirty"] * 3
    assert trainer.nonzero("trainer_pushes_total", "kind", "outcome") == {
        ("push", "committed"): 2,
        ("push", "unchanged"): 3,
        ("push", "dirty"): 3,
        ("push", "interrupted"): 1,
        ("rollback", "unchanged"): 1,
    }
    assert healed.nonzero("pushes_total", "kind", "outcome") == {
        ("push", "committed"): 2,
        ("push", "refused"): 3,
        ("push", "aborted"): 3,
        ("push", "dirty"): 1,
    }
    assert (dirty.state(), healed.state()) == ("dirty", "serving")
    assert (dirty("commit_number"), healed("commit_number")) == (1, 2)
    assert healed("push_seconds_count", phase="commit") == 3
    assert healed("push_seconds_count", phase="prepare") == 6
    assert healed("pause_seconds_count") == 2


def interrupt():
    raise KeyboardInterrupt


def out_of_luck():
    raise RuntimeError("out of luck")


def test_a_commit_that_changed_nothing_and_one_that_was_undone_have_failed(made):
    engine = made(two_ranks.Engine())
    start, before = scrape(engine.url), scrape_here()
    with Sender([engine.url], keep_previous=True) as sender:
        sender.push(WEIGHTS[1])
        engine.ranks[1]._adapter.during = out_of_luck
        with pytest.raises(ApplyFailed, match="the version before was loaded again") as raised:
            sender.push(WEIGHTS[2])
        assert raised.value.weights == "unchanged"
        shown, trainer = scrape(engine.url).since(start), scrape_here().since(before)
    assert shown.nonzero("pushes_total", "kind", "outcome") == {("push", "committed"): 1, ("push", "failed"): 1}
    assert trainer.nonzero("trainer_pushes_total", "outcome") == {"committed": 1, "unchanged": 1}
    assert (shown.state(), shown("commit_number")) == ("serving", 1)


def test_of_two_engines_each_counts_its_own_outcome_and_the_trainer_the_whole(model_folder, trained, tmp_path):
    before = scrape_here()
    with (
        faulty(model_folder("llama", 0), tmp_path) as one,
        ReferenceEngine(model_folder("llama", 0)) as two,
        Sender([one.url, two.url]) as sender,
    ):
        one.order("raise")
        with pytest.raises(WeightSyncError) as raised:
            sender.push(trained)
        assert raised.value.engines == {one.url: "dirty", two.url: "committed"}
        shown = [scrape(url) for url in (one.url, two.url)]
        (caught_up,) = sender.catch_up().values() if sender._driver.pushed else [None]
        result = sender.push(trained)
        assert [scrape(url).state() for url in (one.url, two.url)] == ["serving"] * 2
        trainer = scrape_here().since(before)
    assert [of.nonzero("pushes_total", "outcome") for of in shown] == [{"dirty": 1}, {"committed": 1}]
    assert caught_up is None
    assert trainer.nonzero("trainer_pushes_total", "kind", "outcome") == {
        ("push", "dirty"): 1,
        ("push", "committed"): 1,
    }
    assert trainer("trainer_pause_seconds_count") == len(result.engines) == 2


def test_of_two_engines_one_may_commit_while_the_other_changes_nothing(made):
    one, two = made(two_ranks.Engine()), made(two_ranks.Engine())
    with Sender([one.url, two.url], keep_previous=True) as sender:
        sender.push(WEIGHTS[1])
        before = scrape_here()
        two.ranks[0]._adapter.during = out_of_luck
        with pytest.raises(WeightSyncError) as raised:
            sender.push(WEIGHTS[2])
        assert raised.value.engines == {one.url: "committed", two.url: "unchanged"}
        trainer = scrape_here().since(before)
    assert trainer.nonzero("trainer_pushes_total", "kind", "outcome") == {("push", "partial"): 1}


def test_it_may_be_unknown_what_an_engine_serves(model_folder, trained, tmp_path):
    before = scrape_here()
    with faulty(model_folder("llama", 0), tmp_path) as engine, Sender([engine.url], timeout_s=20) as sender:
        engine.order("kill")
        with pytest.raises(WeightSyncError) as raised:
            sender.push(trained)
        assert raised.value.weights == "unknown"
    trainer = scrape_here().since(before)
    assert trainer.nonzero("trainer_pushes_total", "kind", "outcome") == {("push", "unknown"): 1}


def test_an_engine_that_is_caught_up_is_a_push_of_its_own(model_folder, fresh, trained):
    with Sender([fresh.url]) as sender:
        result = sender.push(trained)
        before = scrape_here()
        with ReferenceEngine(model_folder("llama", 0)) as late:
            added = sender.add_engine(late.url)
            shown, trainer = scrape(late.url), scrape_here().since(before)
            sender.remove_engine(late.url)
    assert shown.nonzero("pushes_total", "outcome") == {"committed": 1}
    assert trainer.nonzero("trainer_pushes_total", "kind", "outcome") == {("catch_up", "committed"): 1}
    assert shown("pushed_bytes_total") == trainer("trainer_pushed_bytes_total") == result.nbytes
    assert shown("pause_seconds_sum") == trainer("trainer_pause_seconds_sum") == added.pause_s


def test_a_push_whose_trainer_dies_is_abandoned_and_its_lease_is_shown_as_free(fresh, model_folder):
    push_and_die(fresh.url, model_folder("llama", 1))
    until(lambda: scrape(fresh.url).nonzero("pushes_total", "outcome") == {"abandoned": 1}, "it is not forgotten")
    shown = scrape(fresh.url)
    assert (shown.state(), shown("lease_taken_timestamp_seconds")) == ("serving", 0)


def test_the_number_of_series_does_not_grow(fresh, trained):
    before, own = scrape(fresh.url), scrape_here()
    with Sender([fresh.url]) as sender:
        for number in range(100):
            sender.push(trained, version=f"a version nobody has seen before: {number}")
    after = scrape(fresh.url)
    assert after("pushes_total", kind="push", outcome="committed") == 100
    assert after.series == before.series
    assert scrape_here().series == own.series
    assert_bounded(after)
    assert_bounded(own)


# --- several processes, and none of it


@pytest.fixture
def pair(model_folder, tmp_path):
    """Two servers of one engine, in multi-process mode; the first has the front end."""
    path, shared = tmp_path / "private" / directories.SOCKET_NAME, tmp_path / "metrics"
    shared.mkdir()
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(shared)}
    command = (sys.executable, "-m", "tests.unit.two_servers")
    started = [
        ReferenceEngine(model_folder("llama", 0), launcher=(*command, role, str(path)), env=env)
        for role in ("first", "other")
    ]
    with started[0] as first, started[1] as other:
        yield first, other


def test_every_server_of_an_engine_shows_the_same(pair, trained):
    unpushed = [scrape(engine.url) for engine in pair]
    with Sender([pair[1].url], keep_previous=True) as sender:
        results = [sender.push(trained, version=f"v{number}") for number in range(2)]
        with pytest.raises(ManifestMismatch):
            sender.push({"model.norm.weight": trained.model.norm.weight})
        results.append(sender.rollback())
        shown = [scrape(engine.url) for engine in pair]
    closed = scrape(pair[1].url)
    assert shown[0] == shown[1]
    assert unpushed[0].series == shown[0].series
    assert [of.state() for of in (*unpushed, *shown)] == ["serving"] * 4
    assert_equals_results(shown[1], results, pair[1].url)
    found = {("push", "committed"): 2, ("push", "refused"): 1, ("rollback", "committed"): 1}
    assert shown[1].nonzero("pushes_total", "kind", "outcome") == found
    assert shown[1]("commit_number") == 3
    assert shown[1]("commit_timestamp_seconds") > shown[1]("lease_taken_timestamp_seconds") > 0
    assert closed("lease_taken_timestamp_seconds") == 0


TRAINER = """
import json, sys
from tools import models
from weightsync import Sender
with Sender([sys.argv[1]]) as sender:
    result = sender.push(models.load_reference(sys.argv[2]))
    try:
        import prometheus_client
        from prometheus_client import multiprocess
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        text = prometheus_client.generate_latest(registry).decode()
    except (ImportError, ValueError) as error:
        text = type(error).__name__
print(json.dumps([result.nbytes, text]))
"""


def trainer_in(env, engine, folder):
    """Push from a trainer with this environment: the bytes pushed, its metrics, and its log."""
    command = [sys.executable, "-c", TRAINER, engine.url, folder]
    done = subprocess.run(command, cwd=servers.ROOT, env=env, capture_output=True, text=True, check=True)
    return *json.loads(done.stdout), done.stderr


def test_a_trainer_of_several_processes_has_its_metrics_in_their_folder(engine, model_folder, tmp_path):
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    nbytes, text, _ = trainer_in(env, engine, model_folder("llama", 1))
    shown = parse(text)
    assert shown.nonzero("trainer_pushes_total", "kind", "outcome") == {("push", "committed"): 1}
    assert shown("trainer_pushed_bytes_total") == nbytes
    assert (shown("trainer_commit_number"), shown("trainer_senders", state="idle")) == (1, 1)
    assert shown.series == {key for key in scrape_here().series if key[0].startswith("trainer_")}


def test_without_prometheus_client_pushes_work_and_nothing_is_shown(model_folder, tmp_path):
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('it is not installed')")
    path = os.pathsep.join([str(tmp_path), str(servers.ROOT)])
    env = {**os.environ, "PYTHONPATH": path}
    with ReferenceEngine(model_folder("llama", 0), env=env) as engine:
        nbytes, text, log = trainer_in(env, engine, model_folder("llama", 1))
        assert requests.get(f"{engine.url}/metrics", timeout=30).status_code == 404
    assert nbytes > 0
    assert text == "ImportError"
    assert "metrics" not in log


def test_metrics_that_cannot_be_made_are_missed_and_fail_no_push(model_folder, tmp_path):
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")}
    with ReferenceEngine(model_folder("llama", 0), env=env) as engine:
        nbytes, text, log = trainer_in(env, engine, model_folder("llama", 1))
        assert requests.get(f"{engine.url}/metrics", timeout=30).status_code == 404
    assert nbytes > 0
    assert text == "ValueError"
    assert "there are no metrics of weightsync: FileNotFoundError" in log


def test_an_engine_of_the_trainers_process_counts_nothing_of_its_own(model_folder, trained, made):
    known = metrics.of_server()
    before, counted = scrape_here(), {key: value._value.get() for key, value in known.pushes.items()}
    with Sender([made(ReferenceInProcess(model_folder("llama", 0)))]) as sender:
        result = sender.push(trained)
    assert {key: value._value.get() for key, value in known.pushes.items()} == counted
    trainer = scrape_here().since(before)
    assert trainer("trainer_pushed_bytes_total") == result.nbytes
    assert trainer.nonzero("trainer_pushes_total", "outcome") == {"committed": 1}


# --- the log
