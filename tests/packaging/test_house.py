"""The house stays one that can be seen whole."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400


def tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_module_is_too_long_to_be_seen_at_once():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_nothing_unpickles_or_evaluates():
    words = ("import pickle", "recv_pyobj", "send_pyobj", "eval(", "exec(", "torch.load", "all_gather_object")
    sources = tracked("common/*.py", "vllm_weightsync/*.py", "sglang_weightsync/*.py")
    assert len(sources) > 20
    found = [(path.name, word) for path in sources for word in words if word in path.read_text().replace(".eval()", "")]
    assert found == []


def test_names_of_vllm_are_imported_in_compat_alone():
    for path in tracked("vllm_weightsync/*.py"):
        if not path.name.startswith("compat"):
            lines = path.read_text().splitlines()
            assert not [
                line for line in lines if line.strip().startswith(("import vllm\n", "from vllm.", "import vllm."))
            ]
