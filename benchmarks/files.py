"""Count the source files of weightsync that one warm push executes, over ipc_zmq into SGLang: `make bench-files`.

SGLang runs on this machine's CPU with a tiny model. Trainer, server and rank record each line of weightsync that they
execute in any thread between the call of `push` and its return; imports do not count. After a few pushes to warm up,
several are recorded one by one. With ``--against`` the same is done with the packages of another commit. Exit code 0 if
no process executed a file of another tree, and SGLang loaded by its load plan.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.trainer import ROOT, model_folders
from tools import servers
from tools.progress import alive

AIM = 35
WARM, PUSHES = 4, 3
RECORDER = ROOT / "benchmarks" / "recorder"
#: SGLang's processes by their titles; all others belong to the server.
TITLES = {"sglang::scheduler": "rank", "sglang::detokenizer": "detokenizer"}
TRAINER = "trainer"
SIDES = (TRAINER, "server", "rank")

Record = dict[str, Any]


def measure(tree: Path) -> Record:
    """Push with the packages in ``tree``."""
    with tempfile.TemporaryDirectory(prefix="weightsync-files-") as temporary:
        folder = Path(temporary)
        (folder / "now").write_bytes(b"\0")
        paths = os.pathsep.join(map(str, (RECORDER, tree / "common", tree)))
        variables = {"PYTHONPATH": paths, "WEIGHTSYNC_RECORDING": temporary}
        model = model_folders("qwen3")[0]
        with alive(f"starting sglang with the packages of {tree}, every call traced (a minute or two)"):
            server = servers.start("sglang", model, env=variables)
        with server:
            command = [sys.executable, RECORDER / "pushes.py", server.url, model, folder, str(WARM), str(PUSHES)]
            ran = subprocess.run(
                command, env={**os.environ, **variables}, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
            )
            pushed = json.loads(ran.stdout.splitlines()[-1])
            sides = {process.pid: _side(process) for process in server.processes()}
        sides[pushed.pop("pid")] = TRAINER
        return {**pushed, **counted(tree, folder, sides)}


def _side(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    return next((side for name, side in TITLES.items() if title.startswith(name)), "server")


def counted(tree: Path, folder: Path, sides: dict[int, str]) -> Record:
    """What the processes recorded: by side, the files with their numbers of executed lines."""
    lines: dict[str, set[tuple[str, int]]] = {side: set() for side in SIDES}
    by_push: list[set[str]] = [set() for _ in range(PUSHES)]
    functions: dict[str, set[str]] = {}
    strangers = set()
    for noted in (path for path in folder.iterdir() if path.name.isdigit()):
        for entry in noted.read_text().splitlines():
            number, line, function, path = entry.split(" ", 3)
            if not Path(path).is_relative_to(tree):
                strangers.add(path)
                continue
            name = str(Path(path).relative_to(tree))
            lines.setdefault(sides[int(noted.name)], set()).add((name, int(line)))
            functions.setdefault(name, set()).add(function)
            by_push[int(number) - 1].add(name)
    every, some = set[str].intersection(*by_push), set[str].union(*by_push)
    return {
        "files": sorted(every),
        "files_of_some_pushes": sorted(some - every),
        "by_push": [len(found) for found in by_push],
        "lines": {side: dict(sorted(Counter(name for name, _ in found).items())) for side, found in lines.items()},
        "functions": {name: ", ".join(sorted(functions[name])) for name in sorted(some)},
        "length": {name: len((tree / name).read_text().splitlines()) for name in sorted(some)},
        "files_of_other_trees": sorted(strangers),
    }


def unpack(commit: str, folder: Path) -> str:
    """Write the files of a commit to a folder; returns the commit's short name."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    return _commit(commit)


def _commit(name: str) -> str:
    command = ["git", "rev-parse", "--short", name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def table(name: str, found: Record) -> str:
    """The table of one commit: its files, and how many lines of each were executed where."""
    files = [*found["files"], *found["files_of_some_pushes"]]
    width = max(map(len, files))
    lines = [
        f"{name}: {len(files)} files in a warm push, by push {found['by_push']}",
        f"{'lines executed, of':{width}}  {'length':>6}" + "".join(f"  {side:>11}" for side in found["lines"]),
    ]
    for file in files:
        row = "".join(f"  {by.get(file, ''):>11}" for by in found["lines"].values())
        note = "" if file in found["files"] else "  (not in every push)"
        lines.append(f"{file:{width}}  {found['length'][file]:>6}{row}{note}")
    totals = "".join(f"  {len(by):>11}" for by in found["lines"].values())
    return "\n".join([*lines, f"{'files':{width}}  {len(files):>6}{totals}"])


def is_right(found: Record) -> bool:
    """Whether the recording is of a warm push with the right tree."""
    return not found["files_of_other_trees"] and "load plan" in found["loading"]


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="count the files of this commit too")
    args = parser.parse_args()
    trees = {_commit("HEAD"): measure(ROOT)}
    if args.against:
        with tempfile.TemporaryDirectory(prefix="weightsync-tree-") as temporary:
            name = unpack(args.against, Path(temporary))
            trees[name] = measure(Path(temporary))
    record = {
        **report.here(),
        "engine": "sglang",
        "transport": "ipc_zmq",
        "aim": AIM,
        "commits": trees,
    }
    path = report.save(record, kept=bool(args.against), name="warm-push-files")
    for name, found in trees.items():
        print(f"{table(name, found)}\n{found['loading']}\n")
    count = len(next(iter(trees.values()))["length"])
    print(f"aim: at most {AIM} files: {count}: {'met' if count <= AIM else 'MISSED'}")
    print(f"every line: {path.relative_to(ROOT)}")
    return 0 if all(map(is_right, trees.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
