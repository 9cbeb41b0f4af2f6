"""The RDMA device of a rank, on hosts simulated by files, and that NIXL uses the device it is given."""

import os
import subprocess
import sys

import pytest
import torch

from weightsync.transports.nixl import agents, nics

CPU = torch.device("cpu")
#: Creates an agent as a rank does, on a given device.
MAKE = """
import sys, torch
from weightsync.transports.nixl import agents
agents.nic_for = lambda *_: sys.argv[1]
try:
    print("made on", agents.Agent(torch.device("cpu"), 0).nic)
except agents.TransferFailed as error:
    print("refused:", error)
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.fixture
def host(tmp_path):
    """Create devices by name, each with the state of its port and whether its file exists."""

    def make(**devices):
        for number, (name, (state, there)) in enumerate(devices.items()):
            port = tmp_path / "sys/class/infiniband" / name / "ports/1"
            verbs = tmp_path / f"sys/class/infiniband_verbs/uverbs{number}"
            files = tmp_path / "dev/infiniband"
            for folder in (port, verbs, files):
                folder.mkdir(parents=True, exist_ok=True)
            (port / "state").write_text(f"{state}\n")
            (verbs / "ibdev").write_text(f"{name}\n")
            if there:
                (files / verbs.name).touch()
        return tmp_path

    return make


UP, DOWN, INIT = ("4: ACTIVE", True), ("1: DOWN", True), ("2: INIT", True)


def chosen(root, ranks=4):
    return [nics.nic_for(CPU, rank, root) for rank in range(ranks)]


def test_a_host_without_rdma_devices_leaves_the_choice_to_ucx(tmp_path):
    assert nics.nic_for(CPU, 0, tmp_path) == ""


def test_devices_are_assigned_to_ranks_in_turn(host):
    assert chosen(host(mlx5_0=UP, mlx5_1=UP)) == ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"]


def test_a_device_with_its_port_down_is_skipped(host):
    assert chosen(host(mlx5_0=DOWN, mlx5_1=UP, mlx5_2=INIT, mlx5_3=UP)) == ["mlx5_1", "mlx5_3"] * 2


def test_if_all_ports_are_down_the_choice_is_left_to_ucx(host):
    assert chosen(host(mlx5_0=DOWN), 1) == [""]


def test_a_device_that_the_container_cannot_open_is_skipped(host):
    assert chosen(host(mlx5_0=("4: ACTIVE", False), mlx5_1=UP), 2) == ["mlx5_1", "mlx5_1"]


@pytest.mark.parametrize(
    ("variable", "value", "found"),
    [
        ("UCX_NET_DEVICES", "mlx5_1:1", "mlx5_1"),
        ("UCX_NET_DEVICES", "mlx5_2:1,mlx5_1:1", "mlx5_1"),
        ("UCX_NET_DEVICES", "^mlx5_0:1", "mlx5_1"),
        ("UCX_NET_DEVICES", "all", "mlx5_0"),
        ("UCX_NET_DEVICES", "eth0", ""),
        ("UCX_TLS", "tcp,self", ""),
        ("UCX_TLS", "^ib", ""),
        ("UCX_TLS", "rc,cuda_copy", "mlx5_0"),
        ("UCX_TLS", "^tcp", "mlx5_0"),
    ],
)
def test_devices_that_the_user_excluded_are_not_chosen(host, monkeypatch, variable, value, found):
    monkeypatch.setenv(variable, value)
    assert nics.nic_for(CPU, 0, host(mlx5_0=UP, mlx5_1=UP)) == found


@pytest.mark.skipif(not agents.available(), reason="needs nixl: pip install 'weightsync[nixl]'")
@pytest.mark.parametrize("inherited", [{}, {"UCX_NET_DEVICES": "lo"}, {"UCX_NET_DEVICES": "all"}], ids=str)
def test_nixl_uses_only_the_device_that_it_is_given(inherited):
    def made_on(nic):
        command = [sys.executable, "-c", MAKE, nic]
        said = subprocess.run(
            command, env={**os.environ, **inherited}, check=True, capture_output=True, text=True, timeout=300
        )
        return said.stdout.splitlines()[-1]

    assert made_on("").startswith("made on")
    assert made_on("mlx5_nowhere").startswith("refused: a NIXL agent could not be made on mlx5_nowhere")
