"""What one GPU can show: run the tests of `tests/gpu` and the cases of `benchmarks/gpu.py`; `make gpu`.

Usage: python3 tools/gpu.py [--wheels FOLDER]

Runs on a Python that has torch for CUDA, whose packages an environment of its own sees; what is missing is installed
there, from the wheels in FOLDER alone if it is given. Writes benchmarks/results/gpu.json. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-gpu"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
REPORT = ROOT / ".work" / "gpu-tests.xml"
#: What tests and benchmark import, beside torch and NIXL.
PACKAGES = (
    *("editables", "hatchling", "hypothesis", "msgspec", "numpy", "psutil", "pytest", "pyzmq", "requests"),
    *("safetensors", "starlette", "tokenizers", "tqdm", "transformers", "uvicorn", "xxhash"),
)


def run(*command: object, check: bool = True) -> int:
    """Run a command of the environment's Python in the repository; its exit code. Raises CalledProcessError."""
    # The variable keeps libraries from the network.
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([ENVIRONMENT / "bin" / "python", *command], cwd=ROOT, check=check, env=env).returncode


def missing() -> list[str]:
    """The packages that the Python that runs this does not have."""
    found = {name.lower() for one in importlib.metadata.distributions() if (name := one.metadata["Name"])}
    return [name for name in PACKAGES if name not in found]


def cuda_release() -> str:
    """The major release of CUDA that torch was built for in this Python. Ends the process if it reaches no GPU."""
    probe = "import torch; print(torch.version.cuda.partition('.')[0] if torch.cuda.is_available() else '')"
    answer = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if not answer.stdout.strip():
        sys.exit(f"{sys.executable} has no torch that reaches a GPU; run make gpu PYTHON=... with one that has")
    return answer.stdout.strip()


def make_environment(wheels: Path | None) -> None:
    """Make the environment, which sees the packages of this Python, and install what is missing there."""
    cuda = cuda_release()
    without = ["--without-pip"] if importlib.util.find_spec("pip") else []  # the pip of this Python is seen, too
    subprocess.run([sys.executable, "-m", "venv", "--clear", *without, ENVIRONMENT], check=True)
    # Not venv's --system-site-packages: if this Python is in an environment itself, that leaves its packages out.
    own = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    seen = dict.fromkeys(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    (own / "seen.pth").write_text("\n".join(seen) + "\n")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if wheels is not None:
        pip += ["--no-index", "--find-links", wheels.resolve()]
    if absent := missing():
        run(*pip, *absent)
    pinned = [line for line in (ROOT / "requirements" / "trainer.txt").read_text().split() if line.startswith("nixl==")]
    run(*pip, "--no-deps", *pinned, pinned[0].replace("nixl", f"nixl-cu{cuda}"))
    run(*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT)


def outcomes() -> dict[str, str]:
    """What became of each test."""
    found = {}
    for case in ElementTree.parse(REPORT).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return found


def main() -> int:
    """Run everything; the exit code is that of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels of what is missing")
    args = parser.parse_args()
    make_environment(args.wheels)
    tests = run("-m", "pytest", "tests/gpu", "-q", f"--junitxml={REPORT}", check=False)
    cases = run("-m", "benchmarks.gpu", check=False)
    if RESULTS.exists():
        RESULTS.write_text(json.dumps({**json.loads(RESULTS.read_text()), "tests": outcomes()}, indent=1) + "\n")
    return tests or cases


if __name__ == "__main__":
    sys.exit(main())
