"""Python programs that start in a fraction of a second: they are forked from a process that has loaded their packages.

Loading torch and transformers takes five seconds on two cores, and the tests start hundreds of reference engines and
trainers.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from multiprocessing import reduction
from pathlib import Path

LOADED = ("weightsync.testing", "transformers.models.llama.modeling_llama", "uvicorn", "torch.distributed.fsdp")


def start(command, env=None):
    """As `subprocess.Popen`, for a command that needs nothing but this interpreter and what it has loaded."""
    environment = dict(os.environ if env is None else env)
    python, *rest = map(str, command)
    if python != sys.executable or rest[0] not in ("-c", "-m") or decisive(environment) != decisive(os.environ):
        return subprocess.Popen(command, env=env)
    return Forked(rest, environment)


def decisive(environment):
    """What decides, before a program begins, how modules are loaded."""
    names = ("PYTHON", "LD_", "PROMETHEUS")
    return {name: value for name, value in environment.items() if name.startswith(names) and name != "PYTHONPATH"}


class Forked:
    """A process with the part of the interface of `subprocess.Popen` that `ReferenceEngine` and its tests use.

    With ``piped`` it has `stdin` and `stdout`, in lines of text; it has read the end of its input when it ends.
    """

    def __init__(self, arguments, environment, *, piped=False):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(LOADED))
        (theirs_in, ours_in), (ours_out, theirs_out) = (os.pipe(), os.pipe()) if piped else ((None, None), (None, None))
        pipes = [reduction.DupFd(end) for end in (theirs_in, theirs_out)] if piped else []
        self._process = context.Process(target=run, args=(arguments, environment, pipes), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        if piped:
            os.close(theirs_in)
            os.close(theirs_out)
            self.stdin, self.stdout = os.fdopen(ours_in, "w", buffering=1), os.fdopen(ours_out)

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def terminate(self):
        self._process.terminate()

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=None):
        """Close the pipes, and wait for the end of the process."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self.wait(timeout)


def run(arguments, environment, pipes=()):
    """Run ``-m MODULE ARGUMENT ...`` or ``-c CODE ARGUMENT ...``, as the interpreter would.

    ``pipes``: what becomes the standard input and output.
    """
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.detach(), number)
    if pipes:
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:0] = [place for place in places if place not in sys.path]
    if any(Path(place, "sitecustomize.py").exists() for place in places):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    how, what, *rest = arguments
    try:
        if how == "-m":
            sys.argv = [what, *rest]
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, str(Path.cwd()))
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # a forked process ends without
