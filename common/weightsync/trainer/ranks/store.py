"""The one key that a trainer's ranks have in the store of torch's default group: where rank 0 listens.

The store is asked in a thread, since a request to a store whose process is frozen does not time out.
"""

from __future__ import annotations

import ipaddress
import socket as sockets
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist

from weightsync.daemon_thread import DaemonThread
from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.http import Message
from weightsync.transports.control.sockets import LOOK_UP_S, local_address

_PREFIX: Final = "weightsync"
_KEY: Final = "rank0"
_STORE: Final = "the store of the process group"
#: Shortest wait in seconds for the store, also after the deadline: rank 0's answer may only be late.
_LEAST_S: Final = 0.05

_T = TypeVar("_T")


class Listening(Message, frozen=True):
    """Where rank 0 listens; ranks prove with ``secret`` that they read this.

    ``host`` is empty if that is the store's, by whatever address a rank reaches it.
    """

    host: str
    port: int
    server_key: str
    secret: str


class AddressStore:
    """Where rank 0 of ``group`` listens, in the store; ``group`` is empty for the default group."""

    def __init__(self, group: str) -> None:
        self._prefix = f"{_PREFIX}/{group}" if group else _PREFIX
        self._group_store: Any = dist.distributed_c10d._get_default_store()
        self._own_store: Any = None
        self._thread = DaemonThread("weightsync-store")

    def close(self) -> None:
        """Release the connection; idempotent."""
        self._own_store = None
        self._thread.close()

    @property
    def host(self) -> str:
        """The host that has the store, by the name that torch was given; empty if no host has it."""
        store = self._group_store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return getattr(store, "host", "")

    @property
    def is_local(self) -> bool:
        """Whether every rank must be on this host, because the store is reached by no other."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host in ("", "localhost")

    def address(self) -> str:
        """The address of this host on the way to the store; empty if that is unknown, or not on the network."""
        try:
            return local_address(self.host) if self.host else ""
        except TransferFailed:
            return ""

    def address_of_host(self) -> str:
        """The address at which this host reaches the store's. Raises `TransferFailed`."""
        try:
            return str(sockets.getaddrinfo(self.host, None, type=sockets.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise TransferFailed(f"{_STORE} is on {self.host}, which cannot be resolved: {error}") from error

    def write(self, listening: Listening, deadline: Deadline) -> None:
        """Replace what the store has. Raises `TransferFailed` or `PushTimeout`."""
        text = http.to_json(listening).decode()
        self._call(lambda: self._store.set(_KEY, text), deadline, "to take rank 0's address")

    def read(self, deadline: Deadline) -> Listening | None:
        """What the store has, which an earlier `Sender` may have written; None if nothing. Raises as `write`, or
        `UnsupportedOption` for what another version has written."""

        def read() -> bytes | None:
            return self._store.get(_KEY) if self._store.check([_KEY]) else None

        found = self._call(read, deadline, "for rank 0's address")
        try:
            return None if found is None else http.from_json(found, Listening)
        except msgspec.MsgspecError as error:
            raise UnsupportedOption(
                f"what rank 0 has written into {_STORE} cannot be read ({error}); every rank must have the same "
                f"version of weightsync, which here is {http.package_version()}"
            ) from error

    @property
    def _store(self) -> Any:
        if self._own_store is None:
            # Separate connections: while one waits for a reply, no other request can use it.
            group_store = self._group_store.clone() if hasattr(self._group_store, "clone") else self._group_store
            self._own_store = dist.PrefixStore(self._prefix, group_store)
        return self._own_store

    def _call(self, call: Callable[[], _T], deadline: Deadline, to: str) -> _T:
        answer = self._thread.submit(call)
        while True:
            try:
                return answer.result(min(max(deadline.left(), _LEAST_S), LOOK_UP_S))
            except FutureTimeout:
                deadline.check(f"{_STORE} {to}")
            except RuntimeError as error:  # torch raises it if the process that has the store is gone
                raise TransferFailed(f"{_STORE} does not answer, waiting for it {to}: {error}") from error
