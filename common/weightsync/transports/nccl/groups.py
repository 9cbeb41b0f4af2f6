"""Process groups of the trainer and every engine rank: preflight checks, creation and destruction.

A group is a bare process-group object made from a store of its own: the default groups of trainer and engine are
neither used nor touched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from threading import Event
from typing import Any, Final

import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.protocol import http
from weightsync.transports.control.sockets import check_reachable
from weightsync.transports.nccl.messages import InitNcclGroup

#: Seconds between two polls of the store.
_STORE_S: Final = 0.002
#: Seconds between two polls of the broadcasts that are pending in a dropped group.
_PENDING_S: Final = 0.1
#: Seconds by which torch's timeout of a broadcast exceeds the push's deadline, whose error says more.
_BACKSTOP_S: Final = 5.0
#: Held while a group is destroyed; taken at exit so that no destruction starts later.
_DESTROYING: Final = threading.Lock()
atexit.register(_DESTROYING.acquire, timeout=2.0)
JOINED, MADE, FAILED = "joined", "made", "failed"
#: Prefixes of the NCCL settings that may differ between ranks.
_LOCAL_SETTINGS: Final = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_TOPO", "NCCL_CONF")


def settings() -> dict[str, str]:
    """The NCCL settings of this process, its NCCL release and its CUDA allocator settings."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    if allocator := os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")):
        ours["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    if torch.cuda.is_available():
        release: Any = torch.cuda.nccl.version  # type: ignore[attr-defined,unused-ignore]
        ours["NCCL"] = ".".join(map(str, release()))
    return {name[:200]: value[:1000] for name, value in ours.items()}


def preflight(ours: Mapping[str, str], uuid: str, ranks: Sequence[tuple[str, http.RankInfo]]) -> None:
    """Raise `UnsupportedOption` for anything on which NCCL would hang or crash.

    ``ours`` are the trainer's `settings` and ``uuid`` its GPU's; ``ranks`` are pairs of a name for errors and a rank.
    """
    gpus = {uuid: "the trainer"} if uuid else {}
    for name, rank in ranks:
        if rank.device_uuid in gpus and "NCCL_MULTI_RANK_GPU_ENABLE" not in ours:
            raise UnsupportedOption(
                f"{name} and {gpus[rank.device_uuid]} share the GPU {rank.device_uuid}, which NCCL refuses; pass "
                'transport="auto", which takes shared memory, or run NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1 on '
                "both sides"
            )
        gpus[rank.device_uuid] = name
        for side, found in ((name, rank.settings), ("the trainer", ours)):
            if (
                "expandable_segments:True" in found.get("PYTORCH_CUDA_ALLOC_CONF", "")
                and found.get("NCCL_CUMEM_ENABLE") == "0"
            ):
                raise UnsupportedOption(
                    f"{side} runs with expandable_segments and NCCL_CUMEM_ENABLE=0, which are incompatible; unset one"
                )
        both = {setting for setting in {*ours, *rank.settings} if setting.startswith("NCCL")}
        for setting in sorted(both):
            if setting.startswith(_LOCAL_SETTINGS) or ours.get(setting) == rank.settings.get(setting):
                continue
            raise UnsupportedOption(
                f"{setting} is {rank.settings.get(setting, 'not set')} at {name} and {ours.get(setting, 'not set')} "
                "at the trainer; NCCL needs the same on both sides"
            )


class Group:
    """One process group. Construction blocks until every rank constructs its own, and raises torch's errors.

    ``here`` is the address of this host that gloo listens at.
    """

    def __init__(self, store: Any, init: InitNcclGroup, rank: int, here: str, timeout_s: float):
        self._store, timeout = store, timedelta(seconds=timeout_s)
        store = dist.PrefixStore(init.group_name, store)
        self.name, self._cuda = init.group_name, init.backend == "nccl"
        #: The process-group object; `None` once it is dropped.
        self._group: Any = None
        if self._cuda:
            options = dist.ProcessGroupNCCL.Options()
            # The push has its own deadline; torch's watchdog would kill the process.
            options._timeout = timedelta(days=30)
            with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
                self._group = dist.ProcessGroupNCCL(store, rank, init.world_size, options)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
            gloo._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, rank, init.world_size, gloo)

    def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> Any:
        """Start to broadcast ``tensor`` from rank 0, or to receive it; returns torch's ``Work``."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if not self._cuda:
            options.timeout = timedelta(seconds=timeout_s + _BACKSTOP_S)
        return self._group.broadcast([tensor], options)

    def drop(self, works: Sequence[Any] = ()) -> None:
        """Destroy the group in a background thread; pending ``works`` end by their own timeouts."""
        if self._group is not None:
            # The thread must hold the last references: dropping gloo's last one blocks until pending works end.
            held, self._group = [self._group, *filter(None, works)], None
            threading.Thread(target=_destroy, args=(held, not self._cuda), name="weightsync-group", daemon=True).start()


def _destroy(group_and_works: list[Any], waits: bool) -> None:
    with contextlib.suppress(RuntimeError):
        group_and_works[0].abort()
    # Wait here, not inside gloo: a thread that returns from gloo during interpreter shutdown crashes the process.
    while waits and not all(work.is_completed() for work in group_and_works[1:]):
        time.sleep(_PENDING_S)
    with _DESTROYING:
        group_and_works.clear()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def await_keys(store: Any, kind: str, ranks: Sequence[int], check: Callable[[Sequence[int]], None]) -> None:
    """Wait until all ``ranks`` have set their key of this kind; ``check(missing ranks)`` raises to end the wait."""
    missing = list(ranks)
    while missing:
        missing = [rank for rank in missing if not store.check([f"{kind}/{rank}"])]
        if missing:
            check(missing)
            time.sleep(_STORE_S)


class Joining:
    """A rank that is joining a group. A thread does it, because joining blocks until all ranks have joined."""

    def __init__(self, init: InitNcclGroup, rank: int, here: str):
        self._init, self._rank, self._here = init, rank, here
        self.name = init.group_name
        self.cancelled, self.done = Event(), Event()
        self.group: Group | None = None
        self.error: WeightSyncError | None = None
        threading.Thread(target=self._run, name="weightsync-join", daemon=True).start()

    def _run(self) -> None:
        init, deadline, store = self._init, Deadline(self._init.timeout_s), None
        try:
            store = dist.TCPStore(
                init.master_address,
                init.master_port,
                None,
                False,
                timedelta(seconds=deadline.left()),
                wait_for_workers=False,
            )
            ours = dist.PrefixStore(init.group_name, store)
            ours.set(f"{JOINED}/{self._rank}", "1")

            def check(missing: Sequence[int]) -> None:
                if self.cancelled.is_set():
                    raise TransferFailed(f"joining the group {init.group_name} was cancelled")
                deadline.check(f"ranks {', '.join(map(str, missing))} of the group {init.group_name}")

            # Construct the group only when all ranks are there: the constructor cannot be interrupted.
            await_keys(ours, JOINED, range(init.world_size), check)
            self.group = Group(store, init, self._rank, self._here, max(deadline.left(), 0.1))
            ours.set(f"{MADE}/{self._rank}", "1")
        except Exception as error:
            self.error = (
                error if isinstance(error, WeightSyncError) else TransferFailed(f"the group was not made: {error}")
            )
            if store is not None:
                with contextlib.suppress(RuntimeError):
                    dist.PrefixStore(init.group_name, store).set(f"{FAILED}/{self._rank}", str(self.error)[:500])
        finally:
            self.done.set()
            if self.cancelled.is_set() and self.group is not None:
                self.group.drop()

    def wait(self, deadline: Deadline, cancelled: Event) -> Group:
        """Wait for the group to be made. Raises `TransferFailed`, or `PushTimeout` after the deadline."""
        while not self.done.wait(0.01):
            if cancelled.is_set():
                raise TransferFailed("the push was aborted")
            deadline.check(f"the group {self.name} to be made")
        if self.error is not None:
            raise self.error
        assert self.group is not None
        return self.group

    def leave(self, works: Sequence[Any] = ()) -> None:
        """Stop joining, and drop the group if it was made; ``works`` are its pending broadcasts."""
        self.cancelled.set()
        if self.group is not None:
            self.group.drop(works)


def check_world(init: InitNcclGroup, ranks: int) -> None:
    """Raise `UnsupportedOption` if an engine with this many ranks does not fit into the group; dials nothing."""
    end = init.rank_offset + ranks
    if end > init.world_size:
        raise UnsupportedOption(
            f"world_size {init.world_size} is too small: this engine's {ranks} ranks are {init.rank_offset} to "
            f"{end - 1}, after {init.rank_offset} others"
        )
    if init.members:
        total = sum(count for _, count in init.members)
        offset = init.world_size - total
        if offset < 1:
            raise UnsupportedOption(
                f"world_size {init.world_size} is wrong: members lists {total} engine ranks, and the trainer's ranks "
                f"come before them, so it must be at least {total + 1}"
            )
        expected = {}
        for _, count in init.members:
            expected[offset] = count
            offset += count
        if expected.get(init.rank_offset) != ranks:
            raise UnsupportedOption(
                f"rank_offset {init.rank_offset} is wrong: this engine has {ranks} ranks, and members of the group of "
                f"{init.world_size} lists {expected.get(init.rank_offset, 0)} ranks at that offset"
            )


def reach(init: InitNcclGroup, rank: int) -> str:
    """Dial the group's store; returns the address from which this host reaches it.

    Raises `UnsupportedOption` for a wildcard address, `TransferFailed` if the store does not answer.
    """
    if init.master_address in ("", "0.0.0.0", "::", "*"):
        raise UnsupportedOption(
            f"master_address {init.master_address!r} cannot be dialled: give the trainer's own address"
        )
    return check_reachable(rank, init.master_address, init.master_port)
