"""The nixl transport in the lowest trainer rank of each memory domain but rank 0's: it sends what that holds."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
from weightsync.memory import cuda_ipc
from weightsync.protocol import codec, control
from weightsync.protocol.control import BucketDone
from weightsync.protocol.http import to_json
from weightsync.tensors import digest
from weightsync.tensors.domains import Run
from weightsync.transports.base import check_cancelled
from weightsync.transports.control.sockets import LOOK_UP_S
from weightsync.transports.nixl.agents import SPIN_S
from weightsync.transports.nixl.messages import Digest, Digested, Expose, Exposed, Meet, Serve, ToHelper
from weightsync.transports.nixl.sending import SendingHost, unpacked_runs
from weightsync.transports.nixl.writing import Writing


class NixlHelper:
    """See `base.RankHelper`."""

    def __init__(self, rank: int):
        self._rank = rank
        #: None before the first push, and after the arenas were freed.
        self._host: SendingHost | None = None
        #: What engine ranks need of this host, by name, see `Serve`.
        self._runs: dict[str, list[list[Run]]] = {}
        #: What is under way, after rank 0 has interrupted it: WRITEs, and READs that are still to come, by agent.
        self._serving: tuple[Writing, dict[str, int]] | None = None

    def help(self, body: bytes, stream: torch.Tensor | None, interrupted: Callable[[], bool]) -> bytes | None:
        """See `base.RankHelper`."""
        message: ToHelper = codec.json_decoder(ToHelper).decode(body)
        if isinstance(message, Expose):
            return to_json(self._expose(message, stream))
        if self._host is None:
            raise TransferFailed(f"trainer rank {self._rank} has no NIXL agent any more; push again")
        if isinstance(message, Meet):
            self._host.meet(message.agents, Deadline(message.timeout_s), lambda: check_cancelled(interrupted))
            return None
        if stream is None:
            raise TransferFailed(f"trainer rank {self._rank} was asked to send without an arena")
        for name, packed in message.runs.items():
            self._runs[name] = unpacked_runs(packed, message.bucket_bytes, message.buckets)
        if isinstance(message, Digest):
            return to_json(Digested({name: self._hashed(message.algorithm, name, stream) for name in message.names}))
        self._serve(self._host, message, stream, interrupted)
        return None

    def _expose(self, message: Expose, stream: torch.Tensor | None) -> Exposed:
        if self._host is None:
            device = cuda_ipc.gpu_here() if message.on_gpu else None
            self._host = SendingHost(device or torch.device("cpu"), self._rank)
        if stream is None or not stream.numel():
            return Exposed(self._host.described)
        self._host.register(stream)
        return Exposed(self._host.described, self._host.handle(stream))

    def _hashed(self, algorithm: str, name: str, stream: torch.Tensor) -> list[list[int]]:
        """The digest of each run of each bucket."""
        return [
            list(digest.digests(algorithm, (stream[run.there :][: run.nbytes] for run in runs)))
            for runs in self._runs[name]
        ]

    def _serve(self, host: SendingHost, message: Serve, stream: torch.Tensor, interrupted: Callable[[], bool]) -> None:
        """Write to the ranks that have asked for it, and let the others read, until all have what they need.

        Returns before that if rank 0 has more to say.
        """
        if message.first is None or self._serving is None:
            self._serving = Writing(message.push, message.buckets), dict(message.reads)
            self._runs = {name: self._runs[name] for name in {name for *_, name in message.writes} & self._runs.keys()}
        writing, left = self._serving
        for agent, handle, name in message.writes:
            runs, peer = self._runs[name], host.peers[agent]
            depends_on = name, message.bucket_bytes
            made = host.writer.transfers(handle, stream, lambda: runs, depends_on, peer)  # noqa: B023 - called here
            writing.add(peer, made, message.buckets, message.first or 0)
        deadline, checked = Deadline(message.timeout_s), time.monotonic()
        while True:
            busy = writing.drive()
            writing.check()
            self._count_reads(host, message.push, left)
            late = [peer for peer, last in writing.arrived().items() if last + 1 < message.buckets]
            late += [host.peers[agent] for agent, count in left.items() if count > 0]
            if not late:
                return
            deadline.check(f"{', '.join(sorted(map(str, late)))} to get what trainer rank {self._rank} sends")
            if time.monotonic() - checked > LOOK_UP_S:
                checked = time.monotonic()
                if interrupted():
                    return
            time.sleep(0 if busy else SPIN_S)

    def _count_reads(self, host: SendingHost, push: str, left: dict[str, int]) -> None:
        """Take the notifications of READs that have ended; asking for them also drives them."""
        for agent, notifications in host.agent.notifications().items():
            for notification in notifications:
                try:
                    message = control.unpack_from_rank(notification)
                except msgspec.MsgspecError:
                    continue
                if isinstance(message, BucketDone) and message.push == push and agent in left:
                    left[agent] -= 1

    def forget(self) -> None:
        """See `base.RankHelper`."""
        self.close()

    def close(self) -> None:
        """End the agent; idempotent."""
        if self._host is not None:
            self._host.end()
            self._host = self._serving = None
