"""Frameworks for the tests of `weightsync.integrations`, in folders that go before the packages of .venv-vllm.

Usage: python3 tools/frameworks.py        install them (`make env` comes first)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import versions

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".work" / "frameworks"
REQUIREMENTS = ROOT / "requirements" / "trl.txt"
#: Oldest and newest that allow a supported version of vLLM, and the version of vLLM whose packages the trainer gets.
#: requirements/trl.txt pins the newest.
TRL = {"1.11.0": versions.VERSIONS["vllm"][0], "1.16.0": versions.VERSIONS["vllm"][-1]}


def place(version: str) -> Path:
    """The packages of a version of TRL. (`datasets` pickles by value what is not below a folder of this name.)"""
    return FOLDER / f"trl-{version}" / "site-packages"


def install(version: str) -> None:
    """Install a version of TRL and what it needs beside the packages of .venv-vllm, unless it is there."""
    target = place(version)
    if target.exists():
        return
    partial = target.with_name("partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"frameworks: installing TRL {version}", flush=True)
    lines = REQUIREMENTS.read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith(("#", "trl=="))]
    pip = [ROOT / ".venv-vllm" / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", partial, *packages, f"trl=={version}"], check=True)
    partial.rename(target)


if __name__ == "__main__":
    for version in TRL:
        install(version)
