"""What a loader asks of all ranks while each of them loads in slices."""

import json
import subprocess
import sys

import pytest

from tools import servers

PATIENCE_S = 120


@pytest.fixture(scope="module")
def seen():
    """What each of two ranks saw, see `ranks`."""
    command = [sys.executable, "-m", "tests.unit.ranks"]
    address = f"tcp://127.0.0.1:{servers.free_port()}"
    started = [
        subprocess.Popen([*command, str(rank), address], stdout=subprocess.PIPE, cwd=servers.ROOT, text=True)
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(lines.splitlines()[-1]) for lines in told]


def test_ranks_reduce_together_between_steps_that_they_take_together(seen):
    expected = [[[1.5, 0.0], [1.0, 7.0]], [3.0]]
    assert [one["sliced"] for one in seen] == [expected, expected]
    assert seen[0]["steps"] == seen[1]["steps"] > 2


def test_a_rank_that_loads_again_finds_what_the_others_wrote(seen):
    assert seen[0]["again"] == seen[0]["sliced"]


def test_what_cannot_be_done_in_slices_is_refused_by_name(seen):
    for one in seen:
        assert "broadcast" in one["broadcast"]
        assert "SUM" in one["sum"]
        assert "all_reduce" in one["recorded"]


def test_a_rank_does_not_wait_for_ever_in_a_pause(seen):
    assert seen[0]["left alone"].startswith("ranks [1] did not come")


def test_a_rank_hears_why_another_failed(seen):
    said = "another rank failed in this load: rank 1: RuntimeError: no luck"
    assert [one["failed"] for one in seen] == [said, "no luck"]


def test_what_was_written_is_kept_for_one_load(seen):
    assert [one["kept"] for one in seen] == [True, True]
    assert seen[0]["forgotten"]
