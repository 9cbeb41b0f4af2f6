"""What NIXL would use on this host, and which settings of UCX hinder it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import torch

from weightsync.protocol.diagnosis import Finding
from weightsync.transports.nixl import nics

NAME: Final = "nixl"
#: The transports of UCX that reach other hosts, beside those over RDMA devices.
_TCP: Final = {"all", "tcp"}
#: Bytes: a stage of any real model takes more, and RDMA devices need all of it locked.
_LOCKED: Final = 1 << 30


def findings(device: torch.device, rank: int, root: Path = Path("/")) -> list[Finding]:
    """See `base.TransportSpec`; ``root`` is for tests."""
    hindrances = list(_hindrances(device, rank, root))
    broken = any(finding.level == "wrong" for finding in hindrances)
    return hindrances if broken else [*hindrances, _used(device, rank, root)]


def _used(device: torch.device, rank: int, root: Path) -> Finding:
    if nic := nics.nic_for(device, rank, root):
        return Finding(NAME, "ok", f"uses the RDMA device {nic}")
    asked = [f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ]
    return Finding(NAME, "ok", f"UCX chooses among the networks of this host ({', '.join(asked) or 'no UCX_* is set'})")


def _hindrances(device: torch.device, rank: int, root: Path) -> Iterator[Finding]:
    if not nics.may_use(nics.RDMA | _TCP):
        tls = os.environ["UCX_TLS"]
        yield Finding(NAME, "wrong", f"UCX_TLS={tls} leaves no network: no other host is reached", "unset UCX_TLS")
    named = os.environ.get("UCX_NET_DEVICES", "all")
    ports, usable = nics.ports(root), nics.usable(root)
    known = {"all", *psutil.net_if_addrs(), *ports}
    if not named.startswith("^") and not known & set(named.split(",")):
        yield Finding(
            NAME,
            "wrong",
            f"UCX_NET_DEVICES={named} names no device of this host, which has {', '.join(sorted(known - {'all'}))}",
            "unset UCX_NET_DEVICES, or name one of these",
        )
    for port, state in ports.items():
        if not port.endswith(f":{nics.PORT}") or port in usable or not nics.may_use(nics.RDMA):
            continue
        if state.endswith("ACTIVE"):
            why, mend = "cannot be opened here", "docker run --device=/dev/infiniband --cap-add=IPC_LOCK"
        else:
            why, mend = f"is not up ({state or 'its state is unknown'})", "ibstat"
        yield Finding(NAME, "note", f"the RDMA device {port} {why}, and is not used", mend)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if nics.nic_for(device, rank, root) and os.geteuid() and resource.RLIM_INFINITY != limit < _LOCKED:
        text = f"only {limit} bytes can be locked in memory, and RDMA devices lock what they transfer"
        yield Finding(NAME, "wrong", text, "ulimit -l unlimited, or docker run --ulimit memlock=-1")
