"""`weightsync doctor` on the trainer's host alone."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.unit.examined import examined
from tests.unit.test_cgroups import MIB, UNIFIED, Tree
from tests.unit.test_nics import DOWN, UP, host  # noqa: F401 - a fixture
from weightsync.doctor import host as doctor_host
from weightsync.memory import arenas, cgroups
from weightsync.transports.nccl import findings as nccl_findings
from weightsync.transports.nixl import agents
from weightsync.transports.nixl import findings as nixl_findings

CPU = torch.device("cpu")
OUTSIDE = "{0}\nName: {0}\nVersion: 1\n"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("UCX_", "NCCL_"))]:
        monkeypatch.delenv(name)


def elsewhere(path, **environment):
    """What the command says of this host in a process whose modules come first from the folder ``path``."""
    code = "import sys; from weightsync.cli import main; sys.exit(main(['doctor', '--json']))"
    env = {**os.environ, "PYTHONPATH": str(path), **environment}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in ran.stderr, ran.stderr
    (line,) = ran.stdout.splitlines()
    wrong = [f for f in json.loads(line)["findings"] if f["level"] == "wrong"]
    assert ran.returncode == int(bool(wrong))
    return wrong


def test_a_healthy_host(capsys):
    (here,) = examined(capsys)
    assert here.wrong == []
    assert {check for check, _, _ in here.notes} <= set() if agents.available() else {"nixl"}


# --- packages


def test_a_package_that_cannot_be_imported(tmp_path):
    (tmp_path / "xxhash.py").write_text("raise ImportError('undefined symbol: XXH3')")
    ((found),) = elsewhere(tmp_path)
    assert (found["check"], found["text"]) == ("packages", "xxhash cannot be imported: undefined symbol: XXH3")
    assert found["mend"].startswith("pip install")


def test_a_broken_torch_is_a_line_too(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert any(found["text"].startswith("torch cannot be imported: libcudart") for found in elsewhere(tmp_path))


def test_a_transport_of_another_package_that_cannot_be_imported(tmp_path):
    info = tmp_path / "weightsync_pigeons-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weightsync-pigeons\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weightsync.transports]\npigeons = weightsync_pigeons:SPEC\n")
    (found,) = elsewhere(tmp_path)
    assert found["check"] == "pigeons"
    assert "cannot be imported from weightsync_pigeons:SPEC" in found["text"]


@pytest.mark.skipif(not agents.available(), reason="needs nixl: pip install 'weightsync[nixl]'")
def test_a_library_that_is_installed_and_does_not_work(tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").touch()
    (tmp_path / "nixl" / "_api.py").write_text("raise ImportError('libucp.so.0: cannot open shared object file')")
    (found,) = elsewhere(tmp_path)
    assert found["check"] == "nixl"
    assert "libucp.so.0" in found["text"]


def test_a_transport_that_is_not_installed_is_no_alarm(capsys, monkeypatch):
    monkeypatch.setattr(agents, "available", lambda: False)
    (here,) = examined(capsys)
    assert here.of("nixl")[::2] == ("note", "pip install 'weightsync[nixl]'")


# --- key and private directory


@pytest.mark.usefixtures("own_homes")
def test_without_any_key(capsys):
    (here,) = examined(capsys)
    level, text, mend = here.of("key")
    assert level == "note"
    assert "missing (WEIGHTSYNC_TOKEN is not set" in text
    assert "set WEIGHTSYNC_TOKEN on both sides" in mend


def test_a_key_file_that_others_can_read(own_homes, capsys):
    own_homes[0].mkdir(mode=0o700)
    (own_homes[0] / "token").write_text("key")
    (own_homes[0] / "token").chmod(0o640)
    (here,) = examined(capsys)
    level, text, _ = here.of("key")
    assert level == "wrong"
    assert f"{own_homes[0] / 'token'} is not private to this user" in text


def test_a_key_that_http_cannot_carry(capsys, monkeypatch):
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "schlüssel")
    (here,) = examined(capsys)
    level, text, _ = here.of("key")
    assert level == "wrong"
    assert "schlüssel" not in text


def test_a_directory_that_is_not_private(own_homes, capsys):
    own_homes[0].mkdir(mode=0o755)
    (here,) = examined(capsys)
    level, text, mend = here.of("ipc_zmq")
    assert level == "wrong"
    assert f"{own_homes[0]} cannot be trusted: its mode is 0755" in text
    assert mend.startswith("ls -ld")


# --- memory


def test_the_limit_of_a_container(tmp_path, monkeypatch):
    tree = Tree(tmp_path, ["0::/"], UNIFIED)
    tree.group("sys/fs/cgroup", 100 * MIB, 90 * MIB)
    monkeypatch.setattr(cgroups, "free_bytes", partial(cgroups.free_bytes, tree.root))
    monkeypatch.setattr(arenas, "SHM_DIRECTORY", tmp_path)  # where nobody's arenas are
    found = doctor_host.shared_memory()
    assert (found.level, found.text[:6]) == ("wrong", "10 MiB")
    assert "docker run --memory" in found.mend


def test_a_mount_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_host, "SHM_DIRECTORY", tmp_path / "absent")
    found = doctor_host.shared_memory()
    assert found.level == "wrong"
    assert "No such file or directory" in found.text


def test_arenas_of_running_senders_count_as_free(monkeypatch, tmp_path):
    monkeypatch.setattr(arenas, "SHM_DIRECTORY", tmp_path)
    arena = arenas.ShmArena(8 * MIB)
    try:
        assert arenas.held_bytes() == 8 * MIB
    finally:
        arena.close()


# --- what NIXL and NCCL would use


def only(found):
    (one,) = found
    return one


def test_the_rdma_device_that_would_be_used(host):  # noqa: F811
    assert only(nixl_findings.findings(CPU, 1, host(mlx5_0=UP, mlx5_1=UP))).text == "uses the RDMA device mlx5_1"


@pytest.mark.parametrize(
    ("device", "why"), [(DOWN, "is not up (1: DOWN)"), (("4: ACTIVE", False), "cannot be opened here")]
)
def test_an_rdma_device_that_cannot_be_used_is_noted(host, device, why):  # noqa: F811
    first, used = nixl_findings.findings(CPU, 0, host(mlx5_0=device, mlx5_1=UP))
    assert (first.level, used.text) == ("note", "uses the RDMA device mlx5_1")
    assert f"mlx5_0:1 {why}" in first.text
    assert first.mend


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("UCX_TLS", "sm,self", "leaves no network"),
        ("UCX_TLS", "^tcp,all", "leaves no network"),
        ("UCX_NET_DEVICES", "mlx5_9:1", "names no device of this host, which has lo"),
    ],
)
def test_settings_of_ucx_that_reach_nothing(monkeypatch, tmp_path, variable, value, why):
    monkeypatch.setenv(variable, value)
    found = only(nixl_findings.findings(CPU, 0, tmp_path))
    assert found.level == "wrong"
    assert f"{variable}={value} " in found.text
    assert why.split(",")[0] in found.text
    assert f"unset {variable}" in found.mend


@pytest.mark.parametrize("value", ["lo", "^lo", "all", "mlx5_0:1", "mlx5_0:2,nothing"])
def test_devices_that_are_there_are_no_alarm(monkeypatch, host, value):  # noqa: F811
    monkeypatch.setenv("UCX_NET_DEVICES", value)
    root = host(mlx5_0=UP)
    second = root / "sys/class/infiniband/mlx5_0/ports/2"
    second.mkdir()
    (second / "state").write_text("1: DOWN\n")
    assert [found.level for found in nixl_findings.findings(CPU, 0, root)] == ["ok"]


@pytest.mark.parametrize(
    ("value", "level"), [("lo", "ok"), ("l", "ok"), ("^lo", "ok"), ("=l", "wrong"), ("ib", "wrong")]
)
def test_interfaces_for_nccl(monkeypatch, value, level):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    assert only(nccl_findings.findings(torch.device("cuda"), 0)).level == level
    assert only(nccl_findings.findings(CPU, 0)).level == "ok"  # gloo is told the address


def test_what_hinders_a_transport_that_no_engine_needs_is_no_alarm(engine, capsys, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "sm,self")
    alone = examined(capsys)[0]
    here, _ = examined(capsys, engine.url)
    if agents.available():
        assert (alone.of("nixl")[0], here.of("nixl")[0]) == ("wrong", "note")
        assert here.of("nixl")[1].endswith("it is not used")
