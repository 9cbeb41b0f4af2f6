"""A trainer's process holds no more after many pushes than after a few, and leaves nothing behind when it ends."""

import contextlib
import dis
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import NamedTuple

import psutil
import pytest

from tools import servers
from weightsync import Sender
from weightsync.errors import EngineUnreachable, LeaseHeld, ManifestMismatch, TransferFailed
from weightsync.memory import arenas, forks
from weightsync.protocol import directories

PUSHES = 60
#: Pushes in the life of a sender, and rounds of everything that happen before counting starts.
LIFE = 3
WARM_UP = 4


class Held(NamedTuple):
    """What a process holds; the last two are names."""

    files: list[str]
    threads: int
    shared: list[str]
    directories: list[str]


def files_of(pid):
    """The kinds of the open files of a process; descriptor numbers are reused and therefore left out."""
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(entry.path).split(":")[0])
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sorted(found)


def held(pid=None):
    pid = pid or os.getpid()
    shared = [path.name for path in arenas.SHM_DIRECTORY.glob(f"weightsync-{pid}-*")]
    private = [path.name for path in directories.directory().glob(f"weightsync-{pid}-*")]
    return Held(files_of(pid), psutil.Process(pid).num_threads(), shared, private)


def settled(before):
    """What is held now. Waits a moment for ending threads; fewer threads than ``before`` count as equal."""
    end = time.monotonic() + 5
    while (now := held()).threads > before.threads and time.monotonic() < end:
        time.sleep(0.05)
    return now._replace(threads=max(now.threads, before.threads))


def everything(engine, trained):
    """The life of one sender, and failures of others."""
    lacking = dict(trained.state_dict())
    del lacking["model.norm.weight"]
    with Sender([engine.url]) as sender:
        for _ in range(LIFE - 1):
            sender.push(trained)
        with pytest.raises(ManifestMismatch):
            sender.push(lacking)
        sender.push(trained)
        with Sender([engine.url]) as other, pytest.raises(LeaseHeld):
            other.push(trained)
    with pytest.raises(EngineUnreachable):
        Sender([engine.url, f"http://127.0.0.1:{servers.free_port()}"])


def forget(engine, trained):
    """Push with a sender that is never closed."""
    sender = Sender([engine.url])
    sender.push(trained)


def test_many_pushes_hold_no_more_than_a_few(engine, trained):
    for _ in range(WARM_UP):
        everything(engine, trained)
    gc.collect()
    before, engines_before = held(), held(engine.process.pid)
    for _ in range(PUSHES // LIFE):
        everything(engine, trained)
    gc.collect()
    now, engines_now = settled(before), held(engine.process.pid)
    assert now == before
    assert (now.shared, now.directories) == ([], [])
    assert engines_now.files == engines_before.files
    assert engines_now.threads <= engines_before.threads + 1


def test_a_sender_that_was_never_closed_is_released_with_all_it_holds(engine, trained):
    everything(engine, trained)
    gc.collect()
    before = held()
    for _ in range(3):
        forget(engine, trained)
        gc.collect()
        everything(engine, trained)  # its lease is free as well: the next pushes without waiting
    gc.collect()
    assert settled(before) == before
    assert (before.shared, before.directories) == ([], [])


def test_a_closed_sender_unmaps_its_memory_at_once(engine, trained):
    everything(engine, trained)
    gc.collect()
    gc.disable()
    try:
        with Sender([engine.url]) as sender:
            sender.push(trained)
            name = held().shared[0]
        mapped = [line.path for line in psutil.Process().memory_maps(grouped=False) if name in line.path]
        assert mapped == []
        assert not [file for file in files_of(os.getpid()) if name in file]
    finally:
        gc.enable()


def trainer_that_ends(engine, folder, how):
    """Run a trainer that pushes and ends without close(); returns its process."""
    code = (
        "import os, signal; from weightsync import Sender\n"
        f"sender = Sender([{engine.url!r}]); sender.push({str(folder)!r})\n"
        f"print(len([name for name in os.listdir({str(arenas.SHM_DIRECTORY)!r})"
        " if name.startswith(f'weightsync-{os.getpid()}-')]), flush=True)\n"
        f"{how}"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=120)
    assert said.split() == ["1"]
    return process


def test_a_trainer_that_exits_without_close_leaves_nothing_behind(engine, model_folder):
    process = trainer_that_ends(engine, model_folder("llama", 1), "")
    assert process.returncode == 0
    assert not list(arenas.SHM_DIRECTORY.glob(f"weightsync-{process.pid}-*"))
    assert not list(directories.directory().glob(f"weightsync-{process.pid}-*"))


def test_the_next_sender_removes_what_a_killed_trainer_left(engine, trained, model_folder, monkeypatch):
    process = trainer_that_ends(engine, model_folder("llama", 1), "os.kill(os.getpid(), signal.SIGKILL)")
    assert process.returncode == -signal.SIGKILL
    (left,) = arenas.SHM_DIRECTORY.glob(f"weightsync-{process.pid}-*")
    (private,) = directories.directory().glob(f"weightsync-{process.pid}-*")
    # Without the minimum age, below which files may belong to a sender that is just starting.
    for module in (arenas, directories):
        sweep = module.sweep
        monkeypatch.setattr(module, "sweep", lambda *root, sweep=sweep: sweep(*root, older_than_s=0.0))
    with Sender([engine.url]) as sender:
        sender.push(trained)
        assert not left.exists()
        assert not private.exists()
        assert len(held().shared) == len(held().directories) == 1
        sender.push(trained)  # what is alive was spared
    assert (held().shared, held().directories) == ([], [])


def test_a_failed_arena_allocation_leaves_no_file():
    before = held()
    for _ in range(3):
        with pytest.raises(TransferFailed, match="shared memory could not be allocated"):
            arenas.ShmArena(1 << 60)
    assert held() == before


def test_ctrl_c_at_any_point_leaves_no_memory_of_an_arena(monkeypatch):
    """Python raises KeyboardInterrupt in the main thread after a call, or where a function begins or a loop goes on:
    here, at each of these points in turn."""

    class Interrupt:
        """Raise KeyboardInterrupt at the point of this number; ``left`` is how many points are missing to that."""

        def __init__(self, number):
            self.left, self.last = number, {}

        def __call__(self, frame, event, _):
            if "weightsync/memory" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                before = self.last.get(frame, "")
                self.last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if before.startswith("CALL") or before in ("RESUME", "JUMP_BACKWARD"):
                    self.left -= 1
                    if self.left == 0:
                        raise KeyboardInterrupt
            return self

    def made_and_closed():
        arenas.ShmArena(4096).close()

    # pytest's would keep what an interrupted finalizer used.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    made_and_closed()
    before, number, interrupt = held(), 0, None
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        while interrupt is None or interrupt.left <= 0:
            number += 1
            interrupt = Interrupt(number)
            sys.settrace(interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    made_and_closed()
                finally:
                    sys.settrace(None)
            interrupt.last.clear()  # its frames have the files
            arenas.sweep(older_than_s=0.0)  # as the next sender does
            assert held() == before, f"after the interrupt at point {number}"
    assert number > 50
    other = threading.Thread(target=forks.disown, args=(-1,), daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive(), "no lock is held"
