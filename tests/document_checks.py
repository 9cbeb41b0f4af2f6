"""Runs the code blocks and commands of the documents, as far as that needs no GPU and no download.

Python runs against reference engines. Commands run as written, except that URLs and folders are the test's. ``make``
runs with ``-n``, and the command lines of long-running programs are only parsed, by their own parsers. Any other block
is refused.
"""

import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import tomllib
import torch
from packaging.requirements import Requirement

from tests.documents import ROOT
from tools import models, servers
from weightsync import Sender
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceInProcess
from weightsync.transports import registry

BIN = ROOT / ".venv" / "bin"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Diagrams and trees, which test_documents and test_diagrams check.
DRAWN = {("ARCHITECTURE.md", "mermaid"), ("ARCHITECTURE.md", "text"), ("docs/states.md", "mermaid")}
#: Marks a block that every rank of a trainer runs.
SHARDED = "on every rank"


class Refused(AssertionError):
    """A statement of a document is false."""


def check(holds, where, why):
    if not holds:
        raise Refused(f"{where}: {why}")


class Answering:
    """A process that answers each line of JSON with a line of JSON."""

    def __init__(self, command, environment, cwd=ROOT):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=cwd,
            env=environment,
        )

    def tell(self, what):
        self._process.stdin.write(f"{json.dumps(what)}\n")

    def hear(self, where):
        """Read the answer. Raises `Refused` if it reports an error or if there is none."""
        answer = self._process.stdout.readline()
        check(answer, where, "the process that was to look at it has ended")
        check(not json.loads(answer), where, json.loads(answer))

    def close(self):
        self._process.kill()
        self._process.communicate()


class Parser(Answering):
    """Reads command lines of one program; see `tests.document_parsers`."""

    def __init__(self, kind):
        here = kind == "trainer"
        python = ROOT / (".venv" if here else f".venv-{kind}") / "bin" / "python"
        # An engine's Python sees only the packages of its own environment.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        paths = {"PYTHONPATH": f"{ROOT / 'common'}{os.pathsep}{ROOT}"} if here else {}
        command = [str(python), "-P", str(ROOT / "tests" / "document_parsers.py"), kind]
        super().__init__(command, {**environment, **paths}, ROOT if here else ROOT.parent)

    def read(self, words, where):
        """Parse the command line. Raises `Refused` if the program would not accept it."""
        self.tell(words)
        self.hear(where)


class Ranks:
    """The processes of a trainer; see `tests.sharded.documents`."""

    def __init__(self, folder, size=2):
        command = [sys.executable, "-m", "tests.sharded.documents", str(folder)]
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(servers.free_port()), "WORLD_SIZE": str(size)}
        self._ranks = [Answering(command, {**os.environ, **group, "RANK": str(rank)}) for rank in range(size)]

    def run(self, text, kind, where):
        """Run the block on every rank. Raises `Refused`."""
        for rank in self._ranks:
            rank.tell([text, kind])
        for rank in self._ranks:
            rank.hear(where)

    def close(self):
        for rank in self._ranks:
            rank.close()


class World:
    """Runs the blocks of a document one after the other, with the test's URLs, names and folders."""

    def __init__(self, urls, folder, parsers, ranks):
        self.folder, self.parsers, self.ranks = folder, parsers, ranks
        port = servers.free_port()
        self._written = tempfile.TemporaryDirectory()
        self._places = {
            "http://127.0.0.1:8000": urls[0],
            "http://127.0.0.1:30000": urls[1],
            "http://10.0.0.2:8000": urls[0],
            "http://10.0.0.3:30000": urls[1],
            "http://10.0.0.4:8000": urls[1],
            "http://10.0.0.1:7000": f"http://127.0.0.1:{port}",
            '"10.0.0.1", 7000': f'"127.0.0.1", {port}',
            "10.0.0.1": "127.0.0.1",
            "Qwen/Qwen3-0.6B": str(folder),
            "path/to/model": str(folder),
            "MODEL_FOLDER": str(folder),
            "/shared/run": str(Path(self._written.name) / "run"),
        }
        self.llm = ReferenceInProcess(folder)
        self.names = {
            "Sender": Sender,
            "asyncio": asyncio,
            "llm": self.llm,
            "model": models.load_reference(folder),
            "batches": range(2),
            "train_step": train_step,
            "TheirExtension": type("TheirExtension", (), {}),
        }

    def here(self, text):
        """The text with the document's URLs and folders replaced by the test's."""
        for place, ours in self._places.items():
            text = text.replace(place, ours)
        return text

    def close(self):
        for value in self.names.values():
            if isinstance(value, Sender):
                value.close()
        self.llm.close()
        self._written.cleanup()


def train_step(model, _):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def run(block, world):
    """Run one block. Raises `Refused` if its statement is false, and whatever the block itself raises."""
    if block.kind == "python" and SHARDED in block.text:
        run_sharded(block, world)
    elif block.kind == "python":
        run_python(block, world)
    elif block.kind == "bash":
        for command in commands(block.text):
            run_command(command, world, block)
    elif block.kind == "toml":
        register(block)
    elif block.kind == "diff":
        apply(block)
    else:
        check((block.document, block.kind) in DRAWN, block, "nobody knows how to check such a block")


def apply(block):
    """Apply a change of vLLM to its installed files, of which nothing is written."""
    site = next((servers.ROOT / ".venv-vllm" / "lib").glob("python3*/site-packages"))
    command = ["patch", "--dry-run", "--force", "--strip", "1"]
    done = subprocess.run(command, cwd=site, input=block.text, capture_output=True, text=True, check=False)
    check(done.returncode == 0, block, done.stdout)


def register(block):
    """Install the entry points as a package would; each must give engines a method of the documented name."""
    points = tomllib.loads(block.text)["project"]["entry-points"]
    with tempfile.TemporaryDirectory() as site:
        folder = Path(site) / "documented-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: documented\nVersion: 1.0\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            before = {*registry.update_methods(), *registry.setup_methods()}
            patch.syspath_prepend(site)
            more = {*registry.update_methods(), *registry.setup_methods()} - before
    check(len(more) == sum(map(len, points.values())), block, f"engines get {sorted(more)} of these entry points")


# --- python


class Said(ast.NodeTransformer):
    """Checks ``expression  # "text"``: the value must match the text, in which ``...`` matches anything."""

    def __init__(self, text):
        self._lines = text.splitlines()
        self.count = 0

    def visit_Expr(self, node):
        match = re.search(r'\s#\s("[^"]*")', self._lines[node.end_lineno - 1])
        if match is None:
            return node
        self.count += 1
        call = ast.Call(ast.Name("_said", ast.Load()), [node.value, ast.Constant(ast.literal_eval(match[1]))], [])
        return ast.copy_location(ast.Expr(call), node)


def run_python(block, world):
    text = world.here(block.text)
    said, heard = Said(text), []
    tree = ast.fix_missing_locations(said.visit(ast.parse(text)))

    def compare(value, text):
        expected = ".*".join(map(re.escape, text.split("...")))
        check(re.fullmatch(expected, str(value)), block, f"said is {text!r}, and it is {value!r}")
        heard.append(value)

    world.names["_said"] = compare
    exec(compile(tree, str(block), "exec"), world.names)
    check(len(heard) == said.count, block, "not all that is said was come to")


def run_sharded(block, world):
    """Run the block on every rank; the engines must then serve the whole model."""
    text = world.here(block.text)
    urls = re.findall(r"http://[\w.:]+", text)
    state = models.load_reference(world.folder).state_dict()
    with Sender(urls) as sender:
        sender.push({name: tensor.neg() for name, tensor in state.items()})
    world.ranks.run(text, "fused" if "Fused" in text else "module", block)
    for url in urls:
        with Sender([url]) as sender:
            found = sender.status(digest=True)[url].ranks[0].digest
        check(found == digest_of(state.items()), block, "the engine serves something else")


# --- commands


class Command(NamedTuple):
    """A shell command: its line and its words."""

    line: str
    words: list[str]


def commands(text):
    """The commands of a block; comments are left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [Command(line, words) for line in lines if (words := shlex.split(line, comments=True))]


def run_command(command, world, where):
    engine, arguments = engine_line(command.words)
    if engine:
        check_plugin(engine, command.words[0], arguments, where)
        world.parsers[engine].read(arguments, where)
        return
    program = command.words[0].rpartition("/")[2]
    check(program in COMMANDS, where, f"nobody knows how to check {command.line}")
    COMMANDS[program](command, world, where)


def engine_line(words):
    """The engine that a command starts and its arguments; empty if it starts none."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:2] == ["vllm", "serve"]:
        return "vllm", words[2:]
    if words[:3] == ["python", "-m", "sglang.launch_server"]:
        return "sglang", words[3:]
    return "", []


def check_plugin(engine, first, arguments, where):
    """Check that the plugin is this package's and that a worker extension, if named, exists."""
    variable, _, plugin = first.partition("=")
    groups = [group for group in PROJECT["entry-points"] if group.startswith(engine)]
    check(variable == f"{engine.upper()}_PLUGINS", where, f"{first} loads no plugin")
    check(all(plugin in PROJECT["entry-points"][group] for group in groups), where, f"no plugin is called {plugin}")
    if "--worker-extension-cls" in arguments:
        module, _, name = arguments[arguments.index("--worker-extension-cls") + 1].rpartition(".")
        check(hasattr(__import__(module), name), where, f"{module} has no {name}")


#: What `make` tells the programs that it runs, which these tests may be.
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")


def real(command, world, where):
    """Run the command as written; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    environment["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    line = world.here(command.line)
    ran = subprocess.run(["bash", "-euc", line], env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    check(ran.returncode == 0, where, f"{line}: {ran.stdout[-500:]}{ran.stderr[-500:]}")
    return ran.stdout


def weightsync(command, world, where):
    """Run the command; one without arguments only has to exist."""
    if len(command.words) == 2:
        command = Command(f"{command.line} --help", [*command.words, "--help"])
    follows = command.words[1] == "follow" and command.words[2] != "--help"
    if follows and "--once" not in command.words:
        command = Command(f"{command.line} --once", [*command.words, "--once"])
    said = real(command, world, where)
    check(not follows or "pushed in" in said, where, said)
    if command.words[1] in ("status", "abort") and command.words[2] != "--help":
        check("reference serving, version" in said, where, said)
    if command.words[1] == "doctor" and command.words[2] != "--help":
        check("the engine is serving" in said, where, said)


def curl(command, world, where):
    said = real(Command(command.line.replace("curl ", "curl --silent --show-error --fail ", 1), []), world, where)
    if "/weightsync/status" in command.line:
        check(json.loads(said)["ranks"][0]["digest"], where, said)


def export(command, world, where):
    """The variable must not be empty afterwards."""
    name = command.words[1].partition("=")[0]
    real(Command(f'{command.line}; test -n "${name}"', []), world, where)


def make(command, world, where):
    """Check that targets and variables exist in the Makefile and that the programs accept their arguments."""
    targets = {word for word in command.words[1:] if "=" not in word}
    variables = {word.partition("=")[0] for word in command.words[1:]} - targets
    makefile = (ROOT / "Makefile").read_text()
    check(targets <= set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()), where, targets)
    check(variables <= set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)), where, variables)
    planned = real(Command(command.line.replace("make ", "make -n ", 1), []), world, where).splitlines()
    # Collecting every test here would take too long.
    for words in map(shlex.split, planned):
        if words[0] == ".venv/bin/python" and words[1:] != ["-m", "pytest"]:
            world.parsers["trainer"].read(words[1:], where)


def python(command, world, where):
    """Collect the named tests, or check that the named module exists; nothing runs."""
    words = command.words
    check(words[1] == "-m", where, f"nobody knows how to check {command.line}")
    if words[2] == "pytest":
        world.parsers["trainer"].read(words[1:], where)
    else:
        check(len(words) == 3 and find_spec(words[2]) is not None, where, f"no module is called {words[2]}")


def pip(command, _, where):
    """Only this package, with existing extras, or this folder may be installed."""
    words = command.words
    check(words[:2] == ["pip", "install"] and len(words) == 3, where, command.line)
    if words[2] == ".":  # test_wheel covers the wheel of this folder
        return
    wanted = Requirement(words[2])
    check(wanted.name == PROJECT["name"], where, command.line)
    check(wanted.extras <= PROJECT["optional-dependencies"].keys(), where, command.line)


def torchrun(command, world, where):
    said = real(
        Command(f"OMP_NUM_THREADS=1 python -m torch.distributed.run {shlex.join(command.words[1:])}", []), world, where
    )
    check("version" in said, where, said)


COMMANDS = {
    "curl": curl,
    "df": real,
    "export": export,
    "make": make,
    "pip": pip,
    "python": python,
    "torchrun": torchrun,
    "weightsync": weightsync,
}
