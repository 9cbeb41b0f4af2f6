"""Build the virtual environments: one for the trainer side and one for each engine.

Usage: python3 tools/env.py [trainer|vllm|sglang|all ...]        (default: all; an engine brings the trainer's along)

The engines pin different versions of the same packages, so each has an environment of its own. The trainer's has this
package editable; the engines' have it as a wheel, because that is what users install. Every step is stamped when it is
complete: a second run does nothing, and a run after an interrupted one repeats only what was not finished.

Runs on any Python 3.8 or later, standard library only: its first task is to find the Python 3.11 it builds with.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".work"
LOGS = WORK / "logs"
PYTHON_VERSION = (3, 11)
PROGRESS_INTERVAL_S = 5.0
LOG_TAIL_LINES = 15
COMPILE_ALL = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=2)"
# What a wheel of this package is made from; the editable install only depends on the metadata.
METADATA_FILES = ("pyproject.toml", "README.md", "LICENSE")
SOURCE_FOLDERS = ("common", "vllm_weightsync", "sglang_weightsync")


class SetupError(Exception):
    """Set-up cannot go on; the message says what is missing or which step failed."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment: its folder in the repository, what is installed in it, and the disk it needs (GB)."""

    name: str
    folder: str
    requirements: tuple[str, ...]
    disk_gb: float
    support: str | None = None

    @property
    def path(self) -> Path:
        return ROOT / self.folder

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("trainer", ".venv", ("trainer.txt", "dev.txt"), disk_gb=1.7),
        Environment("vllm", ".venv-vllm", ("vllm.txt",), disk_gb=3.2, support="vllm"),
        Environment("sglang", ".venv-sglang", ("sglang.txt",), disk_gb=4.2, support="sglang"),
    )
}


# ---- stamps: what is complete, and from which inputs -----------------------------------------------------------------


def digest(paths: Iterable[Path], *extra: str) -> str:
    """Hash `extra` and the names and contents of the files, and of those below the folders, in `paths`."""
    result = hashlib.sha256("\0".join(extra).encode())
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                result.update(f"\0{file.relative_to(ROOT)}\0{content}".encode())
    return result.hexdigest()


class Stamps:
    """The completed steps of one environment, kept in its folder; each has the digest of what it was made from."""

    def __init__(self, environment: Environment) -> None:
        self._file = environment.path / "weightsync-setup.json"

    def _read(self) -> dict[str, str]:
        try:
            return dict(json.loads(self._file.read_text()))
        except (OSError, ValueError):
            return {}

    def has(self, step: str, inputs: str) -> bool:
        """Tell whether `step` was completed from these very inputs."""
        return self._read().get(step) == inputs

    def add(self, step: str, inputs: str) -> None:
        """Record `step` as complete, in one atomic write."""
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self._read(), step: inputs}, indent=1))
        temporary.replace(self._file)


# ---- commands: quiet, logged, and stopped together -------------------------------------------------------------------


class Runner:
    """Runs commands with their output in a log file, and knows what is running for the progress lines."""

    def __init__(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._started_s = time.monotonic()
        self._running: dict[str, str] = {}
        self.cancelled = threading.Event()

    def run(self, name: str, step: str, command: Sequence[object]) -> None:
        """Run one command of environment `name`; raises SetupError with the end of its log if it fails."""
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"env-{name}.log"
        self._running[name] = step
        try:
            with log.open("a") as output:
                output.write(f"\n$ {' '.join(map(str, command))}\n")
                output.flush()
                start = output.tell()
                code = self._wait(command, output.fileno())
            if code != 0:
                tail = log.read_bytes()[start:].decode(errors="replace").splitlines()
                lines = [line for line in tail if "is ignored: it is neither" not in line][-LOG_TAIL_LINES:]
                raise SetupError(f"{name}: {step} failed (exit code {code}); {log} ends with:\n  " + "\n  ".join(lines))
        finally:
            self._running.pop(name, None)

    def _wait(self, command: Sequence[object], output_fd: int) -> int:
        if self.cancelled.is_set():
            raise SetupError("interrupted")
        # The child inherits the lock: should this process be killed, the next run waits for the pip it left behind.
        child = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=_pip_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=subprocess.STDOUT,
            pass_fds=(self._lock_fd,),
            start_new_session=True,
        )
        while True:
            try:
                return child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if self.cancelled.is_set():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGTERM)

    def say(self, text: str) -> None:
        print(f"env: [{time.monotonic() - self._started_s:4.0f} s] {text}", flush=True)

    def progress(self) -> None:
        running = "; ".join(f"{name}: {step}" for name, step in sorted(self._running.items()))
        if running:
            self.say(running)


def _pip_environment() -> dict[str, str]:
    """Return the caller's environment, so that pip's configuration holds, without what sends pip elsewhere."""
    environment = dict(os.environ, PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONNOUSERSITE="1")
    for variable in ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV"):
        environment.pop(variable, None)
    return environment


# ---- the steps -------------------------------------------------------------------------------------------------------


def install_packages(environment: Environment, python: str, runner: Runner) -> None:
    """Create the environment and install its pinned packages, unless that was completed from the same pins.

    The two are one step: an installation that was cut short, or made from other pins, is removed and made again, since
    pip takes a package whose files it half wrote, or one no longer asked for, as good.
    """
    inputs = _packages_digest(environment)
    if not _needs_packages(environment):
        return
    if environment.path.exists():
        shutil.rmtree(environment.path)
    runner.run(environment.name, "creating the environment", [python, "-m", "venv", environment.path])
    install = [environment.python, "-m", "pip", "install", "--no-deps", "--progress-bar=off", "--no-compile"]
    for file in environment.requirements:
        runner.run(environment.name, f"installing requirements/{file}", [*install, "-r", ROOT / "requirements" / file])
    # In parallel, where pip does it one file at a time. Files that are not for this Python are skipped, as pip does.
    runner.run(environment.name, "compiling", [environment.python, "-c", COMPILE_ALL, environment.path / "lib"])
    runner.run(environment.name, "importing torch (a CPU build is needed)", [environment.python, "-c", "import torch"])
    Stamps(environment).add("packages", inputs)
    runner.say(f"{environment.name}: packages installed in {environment.folder}")


def _packages_digest(environment: Environment) -> str:
    # A virtual environment holds its own absolute path, so one in a folder that was moved is made again.
    files = [ROOT / "requirements" / file for file in environment.requirements]
    return digest(files, str(PYTHON_VERSION), str(environment.path))


def _needs_packages(environment: Environment) -> bool:
    complete = Stamps(environment).has("packages", _packages_digest(environment))
    return not (complete and environment.python.exists())


def install_support(environment: Environment) -> None:
    """Copy the environment's small support package, which fills gaps of the engine on a CPU, into its site-packages."""
    if environment.support is None:
        return
    source = ROOT / "tools" / "support" / environment.support
    inputs = digest([source])
    stamps = Stamps(environment)
    if stamps.has("support", inputs):
        return
    (site_packages,) = environment.path.glob("lib/python*/site-packages")
    shutil.copytree(source, site_packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    stamps.add("support", inputs)


def install_editable(runner: Runner) -> None:
    """Install this package into the trainer's environment so that edits take effect at once."""
    environment = ENVIRONMENTS["trainer"]
    inputs = digest(ROOT / file for file in METADATA_FILES)
    stamps = Stamps(environment)
    if not stamps.has("package", inputs):
        pip = [environment.python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--progress-bar=off"]
        runner.run(environment.name, "installing weightsync (editable)", [*pip, "-e", ROOT])
        stamps.add("package", inputs)


def install_wheel(environment: Environment, runner: Runner) -> None:
    """Install this package as a wheel into an engine's environment, unless the one there has the same sources."""
    inputs = digest(ROOT / name for name in (*METADATA_FILES, *SOURCE_FOLDERS))
    stamps = Stamps(environment)
    if not stamps.has("package", inputs):
        wheel = _build_wheel(inputs, runner)
        pip = [environment.python, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall"]
        runner.run(environment.name, "installing the weightsync wheel", [*pip, wheel])
        stamps.add("package", inputs)


def _build_wheel(inputs: str, runner: Runner) -> Path:
    """Return the wheel built from the sources with this digest, building it in the trainer's environment if needed."""
    folder = WORK / "wheel" / inputs[:16]
    if not folder.exists():
        shutil.rmtree(folder.parent, ignore_errors=True)
        partial = folder.with_suffix(".partial")
        build = [ENVIRONMENTS["trainer"].python, "-m", "build", "--wheel", "--no-isolation", "--outdir", partial, ROOT]
        runner.run("trainer", "building the weightsync wheel", build)
        partial.rename(folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


# ---- checks ----------------------------------------------------------------------------------------------------------


def find_python() -> str:
    """Return the path of a Python 3.11, outside any virtual environment; raises SetupError where there is none."""
    wanted = ".".join(map(str, PYTHON_VERSION))
    for candidate in (sys.executable, f"python{wanted}", "python3"):
        path = shutil.which(candidate)
        if path is None:
            continue
        probe = "import ensurepip, sys, venv; print(sys._base_executable, sys.version, sep='\\n')"
        answer = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False)
        executable, _, version = answer.stdout.strip().partition("\n")
        if answer.returncode == 0 and version.startswith(wanted + "."):
            return executable
    raise SetupError(f"Python {wanted} with venv is needed (the engines' wheels are pinned for it) and none is on PATH")


def check_machine(missing: list[Environment]) -> None:
    """Raise SetupError if the environments in `missing` cannot be built here."""
    if missing and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        here = f"{sys.platform} on {platform.machine()}"
        raise SetupError(f"Linux on x86-64 is needed (the pinned wheels are for it), and this is {here}")
    needed_gb = sum(environment.disk_gb for environment in missing)
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < needed_gb:
        names = ", ".join(environment.name for environment in missing)
        raise SetupError(f"{needed_gb:.0f} GB of free disk are needed for {names}, {free_gb:.1f} GB are left in {ROOT}")


# ---- putting it together ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_run() -> Iterator[int]:
    """Hold the lock that keeps two runs from writing the same environments; yields its file descriptor."""
    WORK.mkdir(exist_ok=True)
    with (WORK / "env.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("env: another set-up is running, waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def build(environments: list[Environment], runner: Runner) -> None:
    """Bring the environments up to date; raises SetupError with a message for the user."""
    python = find_python()
    missing = [environment for environment in environments if _needs_packages(environment)]
    check_machine(missing)
    # Two at a time: pip uses one core, and the largest first so that they end together.
    missing.sort(key=lambda environment: -environment.disk_gb)
    with ThreadPoolExecutor(2) as pool:
        _watch([pool.submit(install_packages, environment, python, runner) for environment in missing], runner)
        _watch([pool.submit(_install_ours, environments, runner)], runner)


def _install_ours(environments: list[Environment], runner: Runner) -> None:
    for environment in environments:
        install_support(environment)
    install_editable(runner)
    for environment in environments:
        if environment.name != "trainer":
            install_wheel(environment, runner)


def _watch(futures: list[Future[None]], runner: Runner) -> None:
    """Wait for the futures, with progress lines; the first failure, or an interrupt, stops them all."""
    try:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=PROGRESS_INTERVAL_S, return_when="FIRST_COMPLETED")
            for future in done:
                future.result()
            if not done:
                runner.progress()
    except BaseException:
        runner.cancelled.set()
        raise


def main(arguments: list[str] | None = None) -> int:
    """Build what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the virtual environments.")
    parser.add_argument("targets", nargs="*", metavar="trainer|vllm|sglang|all", help="default: all")
    targets = parser.parse_args(arguments).targets or ["all"]
    for target in targets:
        if target not in (*ENVIRONMENTS, "all"):
            parser.error(f"unknown target {target!r}")
    # The trainer's in any case: it builds the wheel.
    wanted = [environment for name, environment in ENVIRONMENTS.items() if {name, "all"} & {*targets, "trainer"}]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with only_run() as lock_fd:
            build(wanted, Runner(lock_fd))
    except SetupError as error:
        print(f"env: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("env: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
