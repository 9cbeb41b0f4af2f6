"""A transport is known only in its own folder: adding one takes an entry point and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from weightsync.transports import registry

ROOT = Path(__file__).resolve().parents[2]
OURS = ["common", "vllm_weightsync", "sglang_weightsync"]
#: The transports of an engine from before ranks reported theirs: a default of the protocol that never changes.
KNOWN = {("common/weightsync/protocol/http.py", 'transports: tuple[Text, ...] = ("ipc_zmq",)')}
#: The transports that are made of another one's library.
MADE_OF = {"nixl": ["rdt"]}


def own_folder(name):
    """The files of a transport: a module of its name, or a package."""
    home = ROOT / "common" / "weightsync" / "transports"
    return [
        home / f"{name}.py",
        *(path for one in (name, *MADE_OF.get(name, [])) for path in (home / one).glob("*.py")),
    ]


@pytest.mark.parametrize("name", registry.names())
def test_a_transport_is_named_only_in_its_own_folder(name):
    own, found = own_folder(name), set()
    assert any(path.exists() for path in own)
    for path in (path for room in OURS for path in (ROOT / room).rglob("*.py") if path not in own):
        for line in path.read_text().splitlines():
            if re.search(name, line, re.IGNORECASE) and "weightsync.transports.registry" not in line:
                found.add((str(path.relative_to(ROOT)), line.partition("  #")[0].strip()))
    assert found <= KNOWN


METHODS = """
import sys
import {module}
from weightsync.engine.rank_methods import handle
from weightsync.engine.answers import routes
from weightsync.transports import registry
wanted = {{"update_weights_via_files", "open_folder"}}
assert wanted <= set(routes()), routes()
assert wanted <= {{*registry.update_methods(), *registry.setup_methods()}}
extension = getattr({module}, "WorkerExtension", None)
assert extension is None or all(callable(getattr(extension, name)) for name in wanted)
assert "weightsync_files" not in sys.modules
print("ok")
"""


@pytest.mark.parametrize("module", ["weightsync.testing", "vllm_weightsync.rank"])
def test_an_engine_offers_a_third_party_transport_without_importing_it(module, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "outside"), prepend=":")
    run = subprocess.run(
        [sys.executable, "-c", METHODS.format(module=module)], check=False, capture_output=True, text=True
    )
    assert run.stdout == "ok\n", run.stderr
