"""Which settings of NCCL and gloo hinder a process group on this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import psutil
import torch

from weightsync.protocol.diagnosis import Finding

NAME: Final = "nccl"
_VARIABLE: Final = "NCCL_SOCKET_IFNAME"


def findings(device: torch.device, rank: int) -> list[Finding]:
    """See `base.TransportSpec`."""
    backend = "NCCL" if device.type == "cuda" else "gloo"
    return (list(_hindrances()) if device.type == "cuda" else []) or [
        Finding(NAME, "ok", f"groups are made with {backend} for memory on {device}")
    ]


def _hindrances() -> Iterator[Finding]:
    named, interfaces = os.environ.get(_VARIABLE, ""), list(psutil.net_if_addrs())
    if named and not named.startswith("^"):
        # "=eth0" is that interface, "eth" every one that begins so.
        exact, wanted = named.startswith("="), named.removeprefix("=").split(",")
        if not any(name == one or (not exact and name.startswith(one)) for name in interfaces for one in wanted):
            yield Finding(
                NAME,
                "wrong",
                f"{_VARIABLE}={named} names no interface of this host, which has {', '.join(interfaces)}",
                f"unset {_VARIABLE}, or name one of these",
            )
