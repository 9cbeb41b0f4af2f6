"""Process groups of the trainer and every engine rank: what is looked at before one is made, and how one is made.

A group is the process-group object itself, made from a store of our own: neither side's default group is used, or
touched.
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

#: Between two looks at the store.
_STORE_S: Final = 0.002
#: Between two looks at what is pending in a group that was dropped.
_PENDING_S: Final = 0.1
#: A broadcast ends by itself so long after the deadline of who waits for it, which knows better what to say.
_BACKSTOP_S: Final = 5.0
#: Who lets a group go has it; an interpreter that ends takes it and keeps it.
_LETTING_GO: Final = threading.Lock()
atexit.register(_LETTING_GO.acquire, timeout=2.0)
JOINED, MADE, FAILED = "joined", "made", "failed"
#: What NCCL reads that may differ between ranks.
_OWN_SETTINGS: Final = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID", "NCCL_TOPO", "NCCL_CONF")


def settings() -> dict[str, str]:
    """What of this process's environment its group depends on."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    if allocator := os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")):
        ours["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    if torch.cuda.is_available():
        release: Any = torch.cuda.nccl.version  # type: ignore[attr-defined,unused-ignore]
        ours["NCCL"] = ".".join(map(str, release()))
    return {name[:200]: value[:1000] for name, value in ours.items()}


def preflight(ours: Mapping[str, str], uuid: str, ranks: Sequence[tuple[str, http.RankInfo]]) -> None:
    """Raise `UnsupportedOption` for what NCCL would hang or crash on; ``ranks`` are named, ``uuid`` our own GPU's."""
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
                    f"{side} runs with expandable_segments and NCCL_CUMEM_ENABLE=0, which do not go together; unset one"
                )
        both = {setting for setting in {*ours, *rank.settings} if setting.startswith("NCCL")}
        for setting in sorted(both):
            if setting.startswith(_OWN_SETTINGS) or ours.get(setting) == rank.settings.get(setting):
                continue
            raise UnsupportedOption(
                f"{setting} is {rank.settings.get(setting, 'not set')} at {name} and {ours.get(setting, 'not set')} "
                "at the trainer; NCCL needs the same on both sides"
            )


class Group:
    """One process group. Making one blocks until all others make theirs, or raises what torch raises."""

    def __init__(self, store: Any, asked: InitNcclGroup, rank: int, here: str, timeout_s: float):
        self._store, timeout = store, timedelta(seconds=timeout_s)
        store = dist.PrefixStore(asked.group_name, store)
        self.name, self._cuda = asked.group_name, asked.backend == "nccl"
        #: The process-group object; `None` once it is broken.
        self._group: Any = None
        if self._cuda:
            options = dist.ProcessGroupNCCL.Options()
            # We wait with a deadline of our own; torch's watchdog would take the process down.
            options._timeout = timedelta(days=30)
            with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
                self._group = dist.ProcessGroupNCCL(store, rank, asked.world_size, options)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
            gloo._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, rank, asked.world_size, gloo)

    def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> Any:
        """Begin to send ``tensor`` from rank 0, or to receive it; what torch calls a work."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if not self._cuda:
            options.timeout = timedelta(seconds=timeout_s + _BACKSTOP_S)
        return self._group.broadcast([tensor], options)

    def drop(self, works: Sequence[Any] = ()) -> None:
        """End it. What is pending ends by its own deadline, which nobody here has to wait for."""
        if self._group is not None:
            # In nobody's hands but the thread's: with gloo, who lets go last waits for what is pending.
            held, self._group = [self._group, *filter(None, works)], None
            threading.Thread(target=_end, args=(held, not self._cuda), name="weightsync-group", daemon=True).start()


def _end(group_and_works: list[Any], waits: bool) -> None:
    with contextlib.suppress(RuntimeError):
        group_and_works[0].abort()
    # Here and not inside of gloo: a thread that comes back from there while the interpreter ends takes it down.
    while waits and not all(work.is_completed() for work in group_and_works[1:]):
        time.sleep(_PENDING_S)
    with _LETTING_GO:
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


def all_there(store: Any, kind: str, ranks: Sequence[int], check: Callable[[Sequence[int]], None]) -> None:
    """Wait until all ``ranks`` have set their key; ``check(who is missing)`` raises when that is in vain."""
    missing = list(ranks)
    while missing:
        missing = [rank for rank in missing if not store.check([f"{kind}/{rank}"])]
        if missing:
            check(missing)
            time.sleep(_STORE_S)


class Joining:
    """A rank that joins a group, in a thread: it waits for the others."""

    def __init__(self, asked: InitNcclGroup, rank: int, here: str):
        self._asked, self._rank, self._here = asked, rank, here
        self.name = asked.group_name
        self.cancelled, self.done = Event(), Event()
        self.group: Group | None = None
        self.error: WeightSyncError | None = None
        threading.Thread(target=self._run, name="weightsync-join", daemon=True).start()

    def _run(self) -> None:
        asked, deadline, store = self._asked, Deadline(self._asked.timeout_s), None
        try:
            store = dist.TCPStore(
                asked.master_address,
                asked.master_port,
                None,
                False,
                timedelta(seconds=deadline.left()),
                wait_for_workers=False,
            )
            ours = dist.PrefixStore(asked.group_name, store)
            ours.set(f"{JOINED}/{self._rank}", "1")

            def check(missing: Sequence[int]) -> None:
                if self.cancelled.is_set():
                    raise TransferFailed("joining the group was called off")
                deadline.check(f"ranks {', '.join(map(str, missing))} of the group {asked.group_name}")

            # A group can only be made where all are there: until then it could not be given up.
            all_there(ours, JOINED, range(asked.world_size), check)
            self.group = Group(store, asked, self._rank, self._here, max(deadline.left(), 0.1))
            ours.set(f"{MADE}/{self._rank}", "1")
        except Exception as error:
            told = error if isinstance(error, WeightSyncError) else TransferFailed(f"the group was not made: {error}")
            self.error = told
            if store is not None:
                with contextlib.suppress(RuntimeError):
                    dist.PrefixStore(asked.group_name, store).set(f"{FAILED}/{self._rank}", str(told)[:500])
        finally:
            self.done.set()
            if self.cancelled.is_set() and self.group is not None:
                self.group.drop()

    def wait(self, deadline: Deadline, cancelled: Event) -> Group:
        """The group, once it is made."""
        while not self.done.wait(0.01):
            if cancelled.is_set():
                raise TransferFailed("the push was aborted")
            deadline.check(f"the group {self.name} to be made")
        if self.error is not None:
            raise self.error
        assert self.group is not None
        return self.group

    def leave(self, works: Sequence[Any] = ()) -> None:
        self.cancelled.set()
        if self.group is not None:
            self.group.drop(works)


def check_world(asked: InitNcclGroup, ranks: int) -> None:
    """Raise `UnsupportedOption` where an engine of so many ranks does not fit the group, before anybody has met."""
    end = asked.rank_offset + ranks
    if end > asked.world_size:
        raise UnsupportedOption(
            f"world_size {asked.world_size} is too small: this engine's {ranks} ranks are {asked.rank_offset} to "
            f"{end - 1}, behind {asked.rank_offset} of others"
        )
    if asked.members:
        total, at = sum(count for _, count in asked.members), asked.world_size
        at -= total
        if at < 1:
            raise UnsupportedOption(
                f"world_size {asked.world_size} is wrong: {total} ranks of engines are named, and the trainer's come "
                f"before them, so it is at least {total + 1}"
            )
        slots = {}
        for _, count in asked.members:
            slots[at] = count
            at += count
        if slots.get(asked.rank_offset) != ranks:
            raise UnsupportedOption(
                f"rank_offset {asked.rank_offset} is wrong: this engine has {ranks} ranks, and the group of "
                f"{asked.world_size} has room for {slots.get(asked.rank_offset, 0)} there"
            )


def reach(asked: InitNcclGroup, rank: int) -> str:
    """This host's address towards the store. Raises `UnsupportedOption` or `TransferFailed` where there is no way."""
    if asked.master_address in ("", "0.0.0.0", "::", "*"):
        raise UnsupportedOption(f"master_address {asked.master_address!r} is nobody's: give the trainer's own address")
    return check_reachable(rank, asked.master_address, asked.master_port)
