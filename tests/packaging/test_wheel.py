"""The wheel as users get it: installed in a clean environment, alone and beside a user's own files."""

import subprocess
import sys
import venv
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
#: Modules that need another package, which is installed where they are used.
NEEDS = {
    **{
        f"sglang_weightsync.{name}": "sglang" for name in ("messages", "rank", "front_end", "compat_workers", "workers")
    },
    **dict.fromkeys(("vllm_weightsync.compat_transfer_worker", "weightsync.integrations.vllm"), "vllm"),
    "weightsync.tensors.gpu_kernels": "triton",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """An environment with the wheel and, through a path file, the trainer's dependencies, but not this checkout."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    site = next(home.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    dependencies = tmp_path_factory.mktemp("dependencies")
    for entry in Path(next(p for p in sys.path if p.endswith("site-packages"))).iterdir():
        if not entry.name.startswith(("weightsync", "_weightsync", "__editable__")) and entry.suffix != ".pth":
            (dependencies / entry.name).symlink_to(entry)
    (site / "dependencies.pth").write_text(str(dependencies))
    return home / "bin" / "python"


def run(python, code, cwd):
    return subprocess.run([str(python), "-c", code], cwd=cwd, check=False, capture_output=True, text=True)


def modules(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return sorted(name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names)


def test_the_wheel_holds_three_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"weightsync", "vllm_weightsync", "sglang_weightsync"}
    assert "weightsync/py.typed" in names
    on_disk = {
        str(path.relative_to(root))
        for root, package in ((ROOT / "common", "weightsync"), (ROOT, "vllm_weightsync"), (ROOT, "sglang_weightsync"))
        for path in (root / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == on_disk


IMPORT_ALL = """
import importlib, importlib.util, sys
assert not importlib.util.find_spec("vllm") and not importlib.util.find_spec("sglang")
for name in sys.stdin.read().split():
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error.name)
"""


def test_every_module_imports_without_any_engine(wheel, clean, tmp_path):
    command = [str(clean), "-c", IMPORT_ALL]
    found = subprocess.run(
        command, cwd=tmp_path, input=" ".join(modules(wheel)), check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    failed = dict(line.split() for line in found.stdout.splitlines())
    assert failed == NEEDS


def test_the_version_matches_the_wheel(wheel, clean, tmp_path):
    result = run(clean, "import weightsync; print(weightsync.__version__, weightsync.__file__)", tmp_path)
    version, file = result.stdout.split()
    assert f"-{version}-" in wheel.name
    assert str(ROOT) not in file


def test_a_users_own_common_module_does_no_harm(clean, tmp_path):
    (tmp_path / "common.py").write_text("raise RuntimeError('imported by mistake')\n")
    result = run(clean, "import weightsync, vllm_weightsync, sglang_weightsync; weightsync.Sender", tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_entry_points_load_in_each_engines_environment(engine):
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    groups = {group: points for group, points in wanted.items() if group.startswith(engine)}
    assert groups
    for group, points in groups.items():
        for name, value in points.items():
            found = EntryPoint(name, value, group)
            code = (
                "from importlib.metadata import entry_points; "
                f"point, = (p for p in entry_points(group={group!r}) if p.dist.name == 'weightsync'); "
                f"assert (point.name, point.value) == ({name!r}, {found.value!r}), point; "
                "assert callable(point.load()); "
                "import weightsync; assert 'site-packages' in weightsync.__file__, weightsync.__file__"
            )
            result = run(python, code, ROOT.parent)
            assert result.returncode == 0, result.stderr


NEEDED = {
    "vllm": (
        "compat.SERVER",
        "compat.WORKER",
        "compat_lora.NAMES",
        "compat_models.DEEP",
        "compat_plans.NAMES",
        "compat_standby.NAMES",
        "compat_transfer.NAMES",
    ),
    "sglang": (
        "compat.NEEDED",
        "compat.DEEP",
        "compat_groups.STAGES",
        "compat_lora.NAMES",
        "compat_lora.SERVER",
        "compat_workers.WORKERS",
    ),
}


@pytest.mark.parametrize("engine", NEEDED)
def test_every_name_that_compat_needs_exists(engine):
    python = ROOT / f".venv-{engine}" / "bin" / "python"
    modules = {table.partition(".")[0] for table in NEEDED[engine]}
    code = (
        f"from {engine}_weightsync import {', '.join(modules)}; from weightsync.engine.private_names import missing; "
        f"print('missing:', [gone for names in ({', '.join(NEEDED[engine])}) for gone in missing(names)])"
    )
    result = run(python, code, ROOT.parent)
    assert result.stdout.splitlines()[-1] == "missing: []", result.stdout + result.stderr


def test_a_missing_name_is_reported_with_the_supported_version():
    code = "from vllm_weightsync import compat; print(compat.VLLM.check({'vllm.config': ('VllmConfig', 'gone_name')}))"
    result = run(ROOT / ".venv-vllm" / "bin" / "python", code, ROOT.parent)
    assert "weightsync needs vLLM 0.27.1 to 0.33; vLLM 0.32.0" in result.stdout
    assert result.stdout.strip().endswith("lacks vllm.config.gone_name")
