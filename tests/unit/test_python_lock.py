"""Threads that work beside a loop which holds Python's lock get it soon."""

import sys
import threading
import time

import pytest

from weightsync import python_lock


@pytest.fixture
def rests(monkeypatch):
    """The sleeps of loops that rest."""
    found = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_the_interval_is_short_while_any_thread_works():
    before, begun, over = sys.getswitchinterval(), threading.Event(), threading.Event()

    def works():
        with python_lock.passed_soon():
            begun.set()
            over.wait()

    with python_lock.passed_soon():
        assert sys.getswitchinterval() < before
        other = threading.Thread(target=works)
        other.start()
        begun.wait()
    assert sys.getswitchinterval() < before
    over.set()
    other.join()
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_stays():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with python_lock.passed_soon():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)


def test_an_idle_loop_rests_only_while_a_thread_works(rests):
    python_lock.rest()
    assert rests == []
    with python_lock.passed_soon():
        python_lock.rest()
        assert len(rests) == 1
    python_lock.rest()
    assert len(rests) == 1
