"""The RDMA device that a rank of NIXL's is given: one near its GPU, of those that are up and that it may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

#: NIXL adds it to the name of a device that it is given.
_PORT: Final = "1"
#: What UCX calls transports through which processes of one host share memory, and those of RDMA devices.
_SHARED: Final = {"all", "shm", "sm", "mm", "posix", "sysv", "cma", "xpmem"}
_RDMA: Final = {
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
    """The RDMA device that a rank is given, where the host has any; empty leaves the choice to UCX.

    The one nearest to a GPU by its place on the PCI bus, else one after another by rank: left to themselves all ranks
    of a host take the first. Those that ``UCX_NET_DEVICES`` or ``UCX_TLS`` leave out are left out here: what NIXL is
    given goes before what UCX reads. So are those whose port is down, and those of which a container has no file.
    """
    devices = [name for name in _devices(root) if _asked_for(name)] if may_use(_RDMA) else []
    if not devices:
        return ""
    node = _numa_node(device, root)
    near = [name for name in devices if node and _read(_class(root) / name / "device" / "numa_node") == node] or devices
    return near[rank % len(near)]


def shares_memory() -> bool:
    """Whether UCX may reach other processes of this host through memory, or was told by ``UCX_TLS`` not to."""
    return may_use(_SHARED)


def may_use(kinds: set[str]) -> bool:
    """Whether ``UCX_TLS`` allows one of these transports."""
    asked = os.environ.get("UCX_TLS", "all")
    named = set(asked.removeprefix("^").split(","))
    return not named & kinds if asked.startswith("^") else bool(named & kinds)


def _class(root: Path) -> Path:
    return root / "sys/class/infiniband"


def _devices(root: Path) -> list[str]:
    """Those that can be opened here and whose port is up."""
    usable = {
        _read(verbs / "ibdev")
        for verbs in (root / "sys/class/infiniband_verbs").glob("uverbs*")
        if os.access(root / "dev/infiniband" / verbs.name, os.R_OK | os.W_OK)
    }
    found = sorted(path.name for path in _class(root).iterdir()) if _class(root).is_dir() else []
    return [
        name
        for name in found
        if name in usable and _read(_class(root) / name / "ports" / _PORT / "state").endswith("ACTIVE")
    ]


def _asked_for(name: str) -> bool:
    asked = os.environ.get("UCX_NET_DEVICES", "all")
    named = set(asked.removeprefix("^").split(","))
    if asked.startswith("^"):
        return not named & {name, f"{name}:{_PORT}"}
    return bool(named & {"all", f"{name}:{_PORT}"})


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
