"""Chooses the RDMA device of a rank's NIXL agent: one near its GPU, among those that are up and allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

#: The port that NIXL appends to the name of a device.
PORT: Final = "1"
#: The names in UCX of transports over memory shared within a host, and of those over RDMA devices.
_SHARED: Final = {"all", "shm", "sm", "mm", "posix", "sysv", "cma", "xpmem"}
RDMA: Final = {
    "all",
    "ib",
    "rc",
    "rc_v",
    "rc_x",
    "rc_verbs",
    "rc_mlx5",
    "dc",
    "dc_x",
    "dc_mlx5",
    "ud",
    "ud_v",
    "ud_x",
    "ud_verbs",
    "ud_mlx5",
    "srd",
    "gga",
}


def nic_for(device: torch.device, rank: int, root: Path = Path("/")) -> str:
    """The RDMA device for a rank; an empty string leaves the choice to UCX.

    It is one on the NUMA node of the GPU, if there is one; ranks take such devices in turn, since UCX would give all
    ranks of a host the first. Left out are devices that ``UCX_NET_DEVICES`` or ``UCX_TLS`` exclude, which NIXL would
    otherwise override, devices whose port is down, and devices that this container cannot open.
    """
    devices = [name for name in _devices(root) if _asked_for(name)] if may_use(RDMA) else []
    if not devices:
        return ""
    node = _numa_node(device, root)
    near = [name for name in devices if node and _read(_class(root) / name / "device" / "numa_node") == node] or devices
    return near[rank % len(near)]


def shares_memory() -> bool:
    """Whether ``UCX_TLS`` allows UCX to reach other processes of this host through shared memory."""
    return may_use(_SHARED)


def may_use(kinds: set[str]) -> bool:
    """Whether ``UCX_TLS`` allows one of these transports."""
    asked = os.environ.get("UCX_TLS", "all")
    named = set(asked.removeprefix("^").split(","))
    return not named & kinds if asked.startswith("^") else bool(named & kinds)


def _class(root: Path) -> Path:
    return root / "sys/class/infiniband"


def ports(root: Path = Path("/")) -> dict[str, str]:
    """Every port of the RDMA devices, as ``UCX_NET_DEVICES`` names it, and its state."""
    found = sorted(_class(root).glob("*/ports/*"))
    return {f"{path.parent.parent.name}:{path.name}": _read(path / "state") for path in found}


def usable(root: Path = Path("/")) -> list[str]:
    """Those of the `ports` that NIXL could use: up, and of devices that can be opened here."""
    return [f"{name}:{PORT}" for name in _devices(root)]


def _devices(root: Path) -> list[str]:
    """The devices that can be opened here and whose port is up."""
    opened = {
        _read(verbs / "ibdev")
        for verbs in (root / "sys/class/infiniband_verbs").glob("uverbs*")
        if os.access(root / "dev/infiniband" / verbs.name, os.R_OK | os.W_OK)
    }
    up = (port.rpartition(":") for port, state in ports(root).items() if state.endswith("ACTIVE"))
    return [name for name, _, port in up if port == PORT and name in opened]


def _asked_for(name: str) -> bool:
    asked = os.environ.get("UCX_NET_DEVICES", "all")
    named = set(asked.removeprefix("^").split(","))
    if asked.startswith("^"):
        return not named & {name, f"{name}:{PORT}"}
    return bool(named & {"all", f"{name}:{PORT}"})


def _numa_node(device: torch.device, root: Path) -> str:
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return _read(root / "sys/bus/pci/devices" / bus / "numa_node")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
