"""Every block and every command of the documents is checked; see `tests.document_checks`."""

import contextlib
import shlex
import subprocess
import sys

import pytest

from tests.document_checks import COMMANDS, Command, Parser, Ranks, Refused, World, run, run_command
from tests.documents import DOCUMENTS, TRAINERS, Block, blocks, coded, spans, table
from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="module", autouse=True)
def parsers():
    """Parsers by program; they start slowly, so all are started first."""
    with contextlib.ExitStack() as stack:
        yield {kind: stack.enter_context(contextlib.closing(Parser(kind))) for kind in ("trainer", "vllm", "sglang")}


@pytest.fixture(scope="module", autouse=True)
def ranks(model_folder):
    """The ranks of a trainer; they start slowly, too."""
    with contextlib.closing(Ranks(model_folder("llama", 1))) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def near(model_folder):
    """Two reference engines on this host."""
    folder = model_folder("llama", 0)
    with ReferenceEngine(folder) as one, ReferenceEngine(folder) as two:
        yield [one.url, two.url]


@pytest.fixture(scope="module")
def far(model_folder):
    """Two reference engines that share no memory with this host, as if on another."""
    apart = ("unshare", "-m", "sh", "-c")
    can = subprocess.run([*apart, "mount -t tmpfs none /dev/shm"], capture_output=True, check=False)
    if can.returncode:
        pytest.skip(f"needs a mount namespace of its own: {can.stderr.decode().strip()}; run the tests as root")
    launcher = (*apart, 'mount -t tmpfs none /dev/shm && exec "$0" -m weightsync.testing "$@"', sys.executable)
    folder = model_folder("llama", 0)
    with ReferenceEngine(folder, launcher=launcher) as one, ReferenceEngine(folder, launcher=launcher) as two:
        yield [one.url, two.url]


@pytest.fixture
def world(request, document, model_folder, parsers, ranks):
    """The world in which the test's document runs."""
    urls = request.getfixturevalue("far" if document == "docs/many-hosts.md" else "near")
    with contextlib.closing(World(urls, model_folder("llama", 1), parsers, ranks)) as world:
        yield world


def spoken(document):
    """The code spans that are commands."""
    return [span for span in spans(document) if " " in span and span.split()[0].rpartition("/")[2] in COMMANDS]


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if blocks(one) and one != TRAINERS])
def test_every_block_does_what_the_document_says(document, world):
    for block in blocks(document):
        run(block, world)


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if spoken(document)])
def test_every_command_in_the_text_exists(document, world):
    for span in dict.fromkeys(spoken(document)):
        line = span.replace("URL", "http://127.0.0.1:8000")
        run_command(Command(line, shlex.split(line)), world, f"{document}: `{span}`")


@pytest.mark.parametrize(("column", "engine"), [(0, "vllm"), (1, "sglang")])
def test_every_engine_option_in_the_documents_exists(parsers, engine, column):
    for row in table("docs/versions.md", "vLLM"):
        for word in coded(row[column]):
            if word.startswith("--"):
                parsers[engine].read([word], "docs/versions.md")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("", "weightsync status http://127.0.0.1:8000"),
        ("yaml", "a: 1"),
        ("mermaid", "graph TD"),
        ("diff", "--- a/vllm/version.py\n+++ b/vllm/version.py\n@@ -1 +1 @@\n-not there\n+new\n"),
        ("toml", '[project.entry-points."weightsync.transport"]\nfiles = "a:SPEC"'),
        ("bash", "rm -rf /nowhere"),
        ("bash", "weightsync state http://127.0.0.1:8000"),
        ("bash", "weightsync status http://127.0.0.1:9"),
        ("bash", "make nothing"),
        ("bash", "make demo ENGINES=vllm"),
        ("bash", "make demo ENGINE=other"),
        ("bash", "make test ARGS=tests/unit/test_nothing.py"),
        ("bash", "make test ARGS='tests/unit/test_states.py -k no_such_test'"),
        ("bash", "make bench ARGS=--nothing"),
        ("bash", "pip install 'weightsync[nothing]'"),
        ("bash", "python -m tools.nothing"),
        ("bash", "vllm serve MODEL --worker-extension-cls vllm_weightsync.WorkerExtension"),
        ("bash", "VLLM_PLUGINS=weightsync vllm serve MODEL --worker-extension-cls vllm_weightsync.Nothing"),
        (
            "bash",
            "VLLM_PLUGINS=weightsync vllm serve M --nothing --worker-extension-cls vllm_weightsync.WorkerExtension",
        ),
        ("bash", "SGLANG_PLUGINS=weightsync python -m sglang.launch_server --model-path M --nothing"),
        ("bash", "curl http://127.0.0.1:8000/nothing"),
        ("python", 'str(1)  # "2"'),
        ("python", 'Sender(["http://127.0.0.1:8000"]).close()  # on every rank, and nothing is pushed'),
        ("python", 'raise KeyError("http://127.0.0.1:8000")  # on every rank'),
        ("python", 'if not model:\n    str(1)  # "1"'),
    ],
)
@pytest.mark.parametrize("document", ["README.md"])
def test_false_statements_are_detected(world, document, kind, text):
    with pytest.raises(Refused):
        run(Block(document, 1, kind, text), world)
