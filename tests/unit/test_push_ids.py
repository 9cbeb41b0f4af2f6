"""Every push has one id, in the lines of the log and in the spans of all who take part in it."""

import json
import logging
import re
import subprocess
import sys

import pytest

from tests.unit import two_ranks
from tests.unit.two_ranks import WEIGHTS
from tools import servers
from weightsync import Sender, observe
from weightsync.errors import ApplyFailed, LeaseHeld, ManifestMismatch
from weightsync.protocol import directories


def lines_of(caplog, *names):
    return [record.getMessage() for record in caplog.records if record.name.split(".")[1] in names]


def test_one_id_is_in_the_lines_of_trainer_front_end_and_every_rank(made, caplog):
    caplog.set_level(logging.DEBUG, "weightsync")
    engine = made(two_ranks.Engine())
    with Sender([engine.url], keep_previous=True) as sender:
        for label in ("first", "second"):
            caplog.clear()
            sender.push(WEIGHTS[1], version=label)
            (push,) = set(re.findall(r"^push (\w{16}): ", "\n".join(caplog.messages), re.MULTILINE))
            outcomes = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO and push in r.getMessage()]
            assert [line for line in outcomes if f"rank 0 has loaded version '{label}'" in line]
            assert [line for line in outcomes if f"rank 1 has loaded version '{label}'" in line]
            assert [line for line in outcomes if f"version '{label}' is served, commit number" in line]
            assert [line for line in outcomes if f"every engine serves version '{label}', commit number" in line]
            assert len(outcomes) == 4
            told = [line for line in lines_of(caplog, "trainer", "engine") if line not in outcomes]
            assert all(line.startswith(f"push {push}: ") for line in told)
            assert {"trainer", "engine"} <= {record.name.split(".")[1] for record in caplog.records}
        caplog.clear()
        sender.rollback()
        (rollback,) = set(re.findall(r"rollback (\w{16}): ", caplog.text))
        assert [line for line in caplog.messages if f"{rollback}: rank 1 has loaded version 'first'" in line]
        assert [line for line in caplog.messages if f"{rollback}: every engine serves version 'first'" in line]


def test_the_lines_of_failures_have_the_id_too(made, caplog):
    caplog.set_level(logging.DEBUG, "weightsync")
    engine = made(two_ranks.Engine())

    def ids(said):
        return {match for line in caplog.messages for match in re.findall(rf"^push (\w{{16}}): {said}", line)}

    with Sender([engine.url]) as sender:
        with pytest.raises(ManifestMismatch):
            sender.push({"a": WEIGHTS[1]["a"]})
        engine.ranks[1]._adapter.fails = True
        caplog.clear()
        with pytest.raises(ApplyFailed):
            sender.push(WEIGHTS[1])
        engine.ranks[1]._adapter.fails = False
        assert len(ids("failed while committing: ApplyFailed")) == 1
        assert ids("failed while committing") == ids(r"version '1' was not committed \(dirty\)")
        with Sender([engine.url]) as second, pytest.raises(LeaseHeld):
            second.push(WEIGHTS[1])
        assert len(ids("refused: another trainer pushes here")) == 1
        assert ids("failed while preparing: LeaseHeld") == ids("refused")


# --- spans


def test_the_spans_of_a_push_are_one_trace_across_every_server(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.traced", tmp_path / "private" / directories.SOCKET_NAME],
        cwd=servers.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for spans in json.loads(done.stdout):
        (root,) = [span for span in spans if span["parent"] is None]
        by_id = {span["id"]: span for span in spans}
        assert {span["trace"] for span in spans} == {root["trace"]}
        parents = {(by_id[span["parent"]]["name"], span["name"]) for span in spans if span["parent"] is not None}
        assert parents == {
            ("weightsync.push", "weightsync.prepare"),
            ("weightsync.push", "weightsync.transfer"),
            ("weightsync.push", "weightsync.commit"),
            ("weightsync.prepare", "weightsync.engine.prepare"),
            ("weightsync.commit", "weightsync.engine.commit"),
        }
        ids = {span["attributes"].get("weightsync.push") for span in spans if "engine" in span["name"]}
        assert ids == {root["attributes"]["weightsync.push"]}
        assert root["attributes"]["weightsync.version"] in ("one", "two")
    assert len(json.loads(done.stdout)) == 2


def test_a_process_that_does_not_trace_pays_nothing():
    assert "opentelemetry.sdk" not in sys.modules
    assert observe.trace_headers() == {}
    call = object()
    assert observe.carried(call) is call
    loaded = "import sys; from weightsync import Sender, observe; observe.trace_headers(); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True).stdout.split()
    assert "weightsync.observe" in said
    assert not [name for name in said if name.startswith(("opentelemetry", "prometheus_client"))]
