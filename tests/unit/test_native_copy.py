"""Loops that threads share: each item is done once, and an error is raised when all threads have ended."""

import os
import signal
import threading
import time
from threading import Barrier

import pytest
import torch
import xxhash

from weightsync.tensors import gpu_copy, native_copy
from weightsync.tensors.native_copy import Block, Copies, Hashes, Run

LARGE = native_copy.LARGE_BYTES


@pytest.fixture(params=[1, 2, 7])
def threads(request, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_byte_is_copied_and_no_other_is_written(threads, monkeypatch):
    monkeypatch.setattr(native_copy, "SHARE_BYTES", 3 * LARGE)  # so that a single run is shared, too
    sizes = [5, 8 * LARGE + 3, 0, LARGE, LARGE - 1, 1, 2 * LARGE + 7] * 3
    source = torch.randint(0, 256, (sum(sizes) + 2 * len(sizes),), dtype=torch.uint8)
    for _ in range(5):
        target, expected, runs, at = torch.zeros_like(source), torch.zeros_like(source), [], 0
        for size in sizes:
            runs.append(Run(source.data_ptr() + at, target.data_ptr() + at, size))
            expected[at : at + size] = source[at : at + size]
            at += size + 2
        Copies(runs).make()
        assert torch.equal(target, expected)
        target.zero_()
        assert sum(1 for _ in Copies(runs).steps(2)) > 12, "3 runs of 8 chunks, with other copies after them"
        assert torch.equal(target, expected)


def test_tensors_are_copied_in_steps(monkeypatch):
    monkeypatch.setattr(gpu_copy, "STEP_BYTES", 100)
    sources = [torch.randn(size, 3)[:, :2] for size in (1, 5, 7, 40, 2, 3)]
    targets = [torch.zeros(source.shape, dtype=torch.bfloat16) for source in sources]
    copied = [
        sum(torch.equal(target, source.bfloat16()) for target, source in zip(targets, sources, strict=True))
        for _ in gpu_copy.TensorCopies(targets, sources).steps()
    ]
    assert copied == sorted(set(copied))
    assert (len(copied) > 1, copied[-1]) == (True, len(sources))


def test_hashes_are_returned_in_order(threads):
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (9, 2 * LARGE, 0, LARGE + 1, 7, LARGE)]
    hashes = Hashes([Block(part.data_ptr(), part.numel()) for part in parts])
    for _ in range(3):
        parts[3].add_(1)
        assert hashes.make() == [xxhash.xxh3_64_intdigest(part.numpy().tobytes()) for part in parts]


def test_as_many_threads_work_as_torch_allows_and_items_exist(threads):
    for count in (0, 1, 3, 40):
        meeting = Barrier(max(1, min(threads, count)))
        first = iter(range(meeting.parties))

        def act(item, meeting=meeting, first=first):
            if next(first, None) is not None:
                meeting.wait(20)  # no thread ends an item before all have begun one
            return 2 * item, threading.get_ident()

        found = native_copy.each(act, range(count))
        assert [value for value, _ in found] == [2 * item for item in range(count)]
        assert len({thread for _, thread in found}) == min(threads, count)


def test_a_thread_with_one_core_works_alone(threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert set(native_copy.each(lambda _: threading.get_ident(), range(20))) == {threading.get_ident()}


def test_an_error_is_raised_after_all_threads_have_stopped(threads):
    working = set()

    def act(item):
        working.add(item)
        if item == 3:
            working.remove(item)
            raise OSError("no such page")
        time.sleep(0.01)
        working.remove(item)

    with pytest.raises(OSError, match="no such page"):
        native_copy.each(act, range(20))
    assert working == set()


def test_an_interrupted_caller_waits_for_the_working_threads(threads):
    """Ctrl-C arrives while the caller works, and again while it waits."""
    main, begun, working, ended = threading.get_ident(), [], threading.Event(), []

    def act(item):
        if threading.get_ident() == main:
            assert threads == 1 or working.wait(20)
            raise KeyboardInterrupt
        begun.append(item)
        working.set()
        for _ in range(3):
            time.sleep(0.05)
            signal.raise_signal(signal.SIGINT)
        ended.append(item)

    with pytest.raises(KeyboardInterrupt):
        native_copy.each(act, range(30))
    assert sorted(begun) == sorted(ended)
    assert native_copy.each(lambda item: item, range(3)) == [0, 1, 2]


def test_nested_work_is_not_shared_again(threads):
    lock, at_work, most = threading.Lock(), 0, 0

    def inner(item):
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.01)
        with lock:
            at_work -= 1
        return item

    assert native_copy.each(lambda item: sum(native_copy.each(inner, range(item))), range(9)) == [
        sum(range(n)) for n in range(9)
    ]
    assert most <= threads


@pytest.mark.parametrize("few", [0, 1, 2])
def test_all_items_are_done_if_no_more_threads_can_start(threads, few, monkeypatch):
    started, start = [], threading.Thread.start

    def refused(self):
        if len(started) == few:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    def broken(item):
        if item == 7:
            raise OSError("no such page")
        time.sleep(0.001)

    native_copy._helpers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert native_copy.each(lambda item: 2 * item, range(50)) == list(range(0, 100, 2))
        with pytest.raises(OSError, match="no such page"):
            native_copy.each(broken, range(50))
    assert native_copy.each(lambda item: 2 * item, range(50)) == list(range(0, 100, 2))


def test_a_forked_process_starts_its_own_threads(threads):
    def meet():
        both = Barrier(min(threads, 2))
        native_copy.each(lambda _: both.wait(20), range(both.parties))

    meet()  # so that threads exist that the child does not inherit
    child = os.fork()
    if not child:
        try:
            meet()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
