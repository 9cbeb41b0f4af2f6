"""Work in slices: it runs only while it is waited for, and what is set for the process stays the engine's."""

import contextlib
import gc
import os
import sys
import threading
import types
import weakref

import pytest
import torch

from weightsync.engine.exchange.slices import TORCH, Cancelled, Setting, Sliced, beside, stop_if_over
from weightsync.uncollected import uncollected

SLICE_S = 0.001
ONE = torch.ones(4)


def to_the_end(sliced, between=lambda: None):
    """Advance until the end; returns the number of slices."""
    slices = 1
    while not sliced.advance(SLICE_S):
        slices += 1
        between()
    return slices


def test_work_runs_only_in_slices_and_is_done_in_several():
    done = []

    def work():
        for number in range(4000):
            done.append((ONE + number).sum().item())
        return len(done)

    sliced = Sliced(work)
    seen = []

    def between():
        before = len(done)
        threading.Event().wait(0.01)  # as long as ten slices
        seen.append(len(done) == before)

    assert to_the_end(sliced, between) > 2
    assert all(seen)
    assert sliced.result() == 4000
    assert sliced.advance(SLICE_S)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_work_is_held_once_it_has_ended(monkeypatch, fails):
    class Late(threading.Semaphore):
        """The thread of the work is late to go on."""

        def release(self, n=1):
            super().release(n)
            if threading.current_thread() is not threading.main_thread():
                threading.Event().wait(0.1)

    monkeypatch.setattr(threading, "Semaphore", Late)
    held = torch.ones(1)
    gone = weakref.ref(held)

    def work(held=held):
        assert not fails, held
        return held

    sliced = Sliced(work)
    with pytest.raises(AssertionError) if fails else contextlib.nullcontext():
        to_the_end(sliced)
    del held, work, sliced
    gc.collect()
    assert gone() is None


def test_what_is_set_for_the_process_is_kept_apart():
    mine = {"value": "engine"}
    setting = Setting(lambda: mine["value"], lambda value: mine.__setitem__("value", value))
    random = torch.get_rng_state()

    def work():
        seen = []
        torch.set_default_dtype(torch.float64)
        mine["value"] = "work"
        for _ in range(5000):
            seen.append((torch.ones(1).dtype, mine["value"]))
            torch.rand(1)
        return set(seen)

    sliced = Sliced(work, (*TORCH, setting))
    seen = set()
    slices = to_the_end(sliced, lambda: seen.add((torch.get_default_dtype(), mine["value"])))
    assert slices > 1
    assert seen == {(torch.float32, "engine")}
    assert sliced.result() == {(torch.float64, "work")}
    assert (torch.get_default_dtype(), mine["value"]) == (torch.float32, "engine")
    assert torch.equal(torch.get_rng_state(), random)


def test_no_garbage_is_collected_in_a_slice_and_all_of_it_between_two():
    phases = []

    def note(phase, info):
        phases.append((phase, working.is_set()))

    working, collect = threading.Event(), gc.collect

    def work():
        for _ in range(300):
            working.set()
            [[] for _ in range(1000)]  # more than an automatic collection waits for
            gc.collect()
            working.clear()
            ONE.sum()

    gc.callbacks.append(note)
    try:
        seen = []
        assert to_the_end(Sliced(work), lambda: seen.append((gc.isenabled(), gc.collect, gc.collect(0)))) > 1
    finally:
        gc.callbacks.remove(note)
    assert {found[:2] for found in seen} == {(True, collect)}
    assert gc.isenabled()
    assert gc.collect is collect
    assert {during for _, during in phases} == {False}


def test_slices_of_two_engines_of_one_process_leave_nothing_set():
    ours, theirs = threading.Event(), threading.Event()

    def work(sets, here, other):
        torch.set_default_dtype(sets)
        here.set()
        other.wait(0.2)  # in the slice, unless the other engine is in one
        for _ in range(3000):
            ONE.sum()
        return torch.get_default_dtype()

    one = Sliced(lambda: work(torch.float64, ours, theirs))
    two = Sliced(lambda: work(torch.float16, theirs, ours))
    other = threading.Thread(target=to_the_end, args=(two,))
    other.start()
    to_the_end(one)
    other.join()
    assert (one.result(), two.result()) == (torch.float64, torch.float16)
    assert torch.get_default_dtype() == torch.float32
    assert (gc.isenabled(), gc.collect.__module__) == (True, "gc")


def test_the_collector_is_on_once_neither_a_trainer_nor_an_engine_of_the_process_needs_it_off():
    trainer, engine = contextlib.ExitStack(), threading.Event()

    def work():
        trainer.close()  # as another thread
        engine.set()
        assert not gc.isenabled()

    trainer.enter_context(uncollected())
    to_the_end(Sliced(work))
    assert engine.is_set()
    assert gc.isenabled()


def test_an_error_of_the_work_is_raised_again_and_again():
    def work():
        for _ in range(3000):
            ONE.sum()
        raise ValueError("wrong")

    sliced = Sliced(work)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            to_the_end(sliced)


def test_cancelled_work_cleans_up_and_ends():
    said = []

    def work():
        try:
            while True:
                ONE.sum()
        except Exception:
            said.append("caught")
        finally:
            for _ in range(3000):
                ONE.sum()
            said.append("clean")

    sliced = Sliced(work)
    assert not sliced.advance(SLICE_S)
    sliced.cancel()
    assert said == ["clean"]
    sliced.cancel()
    assert sliced.advance(SLICE_S)


def test_work_that_never_began_is_cancelled_at_once():
    said = []
    sliced = Sliced(lambda: said.append("ran"))
    sliced.cancel()
    assert sliced.advance(SLICE_S)
    assert said == []


def test_a_long_call_goes_on_beside_the_engine_and_the_work_stops_after_it(monkeypatch):
    began, opened, after = threading.Event(), threading.Event(), []

    def slow(tensor):
        began.set()
        assert opened.wait(60)
        return tensor

    monkeypatch.setattr("weightsync.engine.exchange.slices._ALONE", frozenset([slow]))

    def work():
        torch.overrides.handle_torch_function(slow, (ONE,), ONE)
        after.append(1)
        ONE.sum()
        after.append(2)

    sliced = Sliced(work)
    while not began.is_set():
        assert not sliced.advance(SLICE_S)
    assert not sliced.advance(SLICE_S)  # it is still in it
    opened.set()
    while not sliced.advance(SLICE_S):
        assert len(after) < 2
    assert after == [1, 2]


def advanced_until(sliced, event):
    """Advance until the work, which goes on beside the engine by then, has set an event."""
    while not event.is_set():
        assert not sliced.advance(SLICE_S)


def test_work_that_needs_nothing_of_the_engine_goes_on_beside_it_until_it_needs_something():
    far, opened, after = threading.Event(), threading.Event(), []

    def work():
        with beside(), beside():
            while not opened.is_set():
                stop_if_over()  # of which the first would else wait for the next slice
                ONE.sum()
                far.set() if after else after.append("began")
        after.append("needs")
        ONE.sum()

    sliced = Sliced(work)
    assert not sliced.advance(SLICE_S)
    assert far.wait(60)  # though nobody waits for the work
    assert not sliced.advance(SLICE_S)
    opened.set()
    assert "needs" not in after
    to_the_end(sliced)
    assert after == ["began", "needs"]
    assert sliced.stood_still == ""


@pytest.mark.parametrize("caught", [False, True])
def test_work_beside_the_engine_ends_where_it_may_stop_once_it_is_cancelled(caught):
    began, ended = threading.Event(), []

    def work():
        with contextlib.suppress(Cancelled if caught else ()):
            try:
                with beside():
                    while True:
                        began.set()
                        stop_if_over()
            finally:
                ended.append(threading.current_thread())
        ONE.sum()
        ended.append("went on")

    sliced = Sliced(work)
    advanced_until(sliced, began)
    sliced.cancel()
    assert ended[1:] == (["went on"] if caught else [])
    assert sliced.advance(SLICE_S)


def test_outside_of_such_work_nothing_is_different():
    with beside():
        stop_if_over()
        assert ONE.sum() == 4


def test_a_long_call_that_may_not_go_on_alone_is_waited_for_and_named():
    def slow(tensor):
        end = threading.Event()
        threading.Timer(20 * SLICE_S, end.set).start()
        assert end.wait(60)
        return tensor

    sliced = Sliced(lambda: torch.overrides.handle_torch_function(slow, (ONE,), ONE))
    while not sliced.advance(SLICE_S):
        pass
    assert sliced.longest_call.endswith(" s in slow")
    assert sliced.longest_s >= sliced.call_s >= 20 * SLICE_S


def test_work_does_not_stop_while_it_imports_a_module(monkeypatch):
    """Whoever imports the same module would wait for it."""
    name = "imported_in_slices"
    where = {}

    class Finder:
        def find_spec(self, asked, path, target=None):
            if asked != name:
                return None
            return types.SimpleNamespace(
                **dict.fromkeys(("origin", "submodule_search_locations", "cached", "parent"), None),
                **{"name": name, "loader": self, "has_location": False, "loader_state": None},
                _initializing=False,
                _uninitialized_submodules=[],
            )

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            for _ in range(3000):
                ONE.sum()
            where["done"] = True

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, name, raising=False)

    def work():
        __import__(name)
        ONE.sum()

    sliced = Sliced(work)
    sliced.advance(SLICE_S)
    assert where == {"done": True}
    to_the_end(sliced)
    sys.modules.pop(name, None)


def test_work_uses_every_core_of_the_process_though_the_loop_is_bound_to_one():
    cores = os.sched_getaffinity(0)
    bound, done = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (bound.set(), done.wait(60)))
    other.start()
    try:
        assert bound.wait(60)
        os.sched_setaffinity(0, {min(cores)})
        sliced = Sliced(lambda: os.sched_getaffinity(0))
        to_the_end(sliced)
        assert sliced.result() == cores
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, cores)
        done.set()
        other.join()


def test_work_that_may_not_choose_its_cores_runs_on_those_it_has(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: (_ for _ in ()).throw(PermissionError("no")))
    sliced = Sliced(lambda: ONE.sum().item())
    to_the_end(sliced)
    assert sliced.result() == 4.0


def test_a_thread_that_ends_without_a_word_is_noticed(monkeypatch):
    sliced = Sliced(lambda: 1)
    monkeypatch.setattr(sliced, "_run", lambda: None)
    with pytest.raises(RuntimeError, match="has ended"):
        to_the_end(sliced)
