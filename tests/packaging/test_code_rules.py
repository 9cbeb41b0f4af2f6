"""Rules for the code: the length of modules, and no unpickling or evaluation."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
#: Modules that unpickle, or run what they read.
UNSAFE_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
#: Names that do so, bare or under any object in `UNSAFE`; torch.distributed pickles the objects that it sends.
UNSAFE_NAMES = {"eval", "exec", "builtins.eval", "builtins.exec", "torch.load"}
UNSAFE = {
    *("recv_pyobj", "send_pyobj", "allow_pickle"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert len(found) > 20
    return found


def unsafe(source):
    """The names in the source that unpickle or evaluate."""
    for node in ast.walk(ast.parse(source)):
        used = []
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Name):
            used = [node.id]
        elif isinstance(node, ast.Attribute):
            used = [f"{node.value.id if isinstance(node.value, ast.Name) else ''}.{node.attr}"]
        elif isinstance(node, ast.keyword) and node.arg is not None:
            used = [node.arg]
        for name in used:
            if name in UNSAFE_NAMES or UNSAFE_MODULES & set(name.split(".")) or name.split(".")[-1] in UNSAFE:
                yield name


def test_no_module_is_longer_than_the_limit():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_messages_are_decoded_by_decoders_of_one_place():
    """Elsewhere they could be made in two threads at once, which crashes, see `codec.json_decoder`."""
    sources = tracked("common/*.py", "vllm_weightsync/*.py", "sglang_weightsync/*.py")
    made = ("msgpack.Decoder(", "json.Decoder(", "msgspec.json.decode(", "msgspec.msgpack.decode(", "msgspec.convert(")
    assert [path.name for path in sources if any(text in path.read_text() for text in made)] == ["codec.py"]


def test_no_code_unpickles_or_evaluates():
    sources = tracked("common/*.py", "vllm_weightsync/*.py", "sglang_weightsync/*.py")
    assert [(str(path.relative_to(ROOT)), name) for path in sources for name in unsafe(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as jar",
        "from pickle import loads",
        "from multiprocessing import reduction, pickle",
        "socket.recv_pyobj()",
        "connect().send_pyobj(1)",
        "eval(text)",
        "builtins.exec(text)",
        "run = eval",
        "torch.load(path)",
        "from torch import load",
        "dist.all_gather_object(into, what)",
        "from torch.distributed import broadcast_object_list",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_unpickling_and_evaluation_are_detected(source):
    assert list(unsafe(source)) != []


@pytest.mark.parametrize("source", ["model.eval()", "AutoModel.from_config(x).eval()", "json.load(file)"])
def test_harmless_calls_of_the_same_name_are_not_flagged(source):
    assert list(unsafe(source)) == []
