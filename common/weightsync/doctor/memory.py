"""Whether the memory of both sides suffices for an engine's model."""

from __future__ import annotations

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.memory import arenas
from weightsync.protocol import http
from weightsync.protocol.diagnosis import Finding
from weightsync.tensors.layout import Layout
from weightsync.trainer import buckets
from weightsync.trainer.client import EngineClient


def finding(client: EngineClient, hello: http.OpenReply, deadline: Deadline) -> Finding:
    """How a sender on this host would stage a push of this engine's model, with an arena in shared memory."""
    try:
        reply = client.expected(deadline)
        nbytes = Layout(reply.tensors).nbytes
    except WeightSyncError as error:
        return Finding("memory", "note", f"the size of a push is not known: {error}", "weightsync status URL")
    if not nbytes:
        return Finding("memory", "ok", f"the size of a push is known when one is made: {reply.why}")
    beside = [rank.free_bytes for rank in hello.ranks if rank.device == "cpu" and rank.host == arenas.host_id()]
    free = min([arenas.free_shared_bytes(), *beside]) + arenas.held_bytes()
    stage = buckets.stage_bytes(hello.ranks)
    choice = buckets.choose(nbytes, free, stage, None, "auto", keep=False)
    arena, size = choice.slots * choice.bucket_bytes, f"a push has {nbytes} bytes"
    if arena > free:
        text = f"{size}, and the smallest arena for it {arena}, but {free} are free in shared memory"
        return Finding("memory", "wrong", text, "df -h /dev/shm; docker run --shm-size=8g, or a smaller bucket_bytes")
    if choice.staging == "none":
        return Finding("memory", "note", f"{size}: {choice.reason}", 'Sender(staging="auto"), or free memory')
    return Finding("memory", "ok", f"{size}: {choice.reason}")
