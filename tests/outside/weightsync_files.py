"""A third-party transport: bytes travel through files in a folder that both sides see.

It is installed by entry points, like a separate package, when this folder is on ``PYTHONPATH``. Bucket k is written by
source k modulo their number, in a file that appears complete or not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.codec import Text
from weightsync.protocol.control import Offer
from weightsync.transports.base import Bucket, TransportSpec
from weightsync.transports.control.engine import EngineControl
from weightsync.transports.control.trainer import PushSession, TrainerControl

NAME = "files"
LOOK_S = 0.002
#: Environment variable: a file that gets the process id of the writer of every bucket.
NOTES = "WEIGHTSYNC_FILES_NOTES"


class OpenFolder(http.Handshake, frozen=True):
    """Have every rank check that it sees the sender's ``folder``."""

    folder: Text
    timeout_s: http.Timeout
    address: Text = ""
    owner: Text = ""
    holder: Text = ""
    instance: Text = ""


class Write(http.Message, frozen=True):
    """rank 0 -> another source: write your buckets of the stream, of ``sources``."""

    folder: str
    push: str
    sources: int
    nbytes: int
    bucket_bytes: int


def path_of(folder, push, number):
    return Path(folder) / f"{push}-{number}"


def write(stream, start, end, path):
    if NOTES in os.environ:
        with Path(os.environ[NOTES]).open("a") as notes:
            notes.write(f"{os.getpid()}\n")
    unfinished = path.with_suffix(".unfinished")
    stream[start:end].numpy().tofile(unfinished)
    unfinished.rename(path)


class Trainer:
    def __init__(self, device, others, address):
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._folder = tempfile.mkdtemp(prefix="weightsync-files-")
        self._others, self._known = others, {}

    def connect(self, engines, timeout_s):
        return {
            url: OpenFolder(self._folder, timeout_s, self.address(url), instance=hello.instance)
            for url, hello in engines.items()
            if self._known.get(url) != hello.instance
        }

    def connected(self, replies, deadline):
        self._known.update({url: reply.instance for url, reply in replies.items()})

    def begin(self, plan, layout, arenas, peers, deadline):
        session = PushSession(self._control, plan.push, layout, peers, deadline)
        return Sending(session, plan, layout, arenas[0].bytes, self._folder, self._others)

    def disconnect(self, engine):
        self._known.pop(engine, None)

    def forget(self):
        pass

    def close(self):
        shutil.rmtree(self._folder, ignore_errors=True)
        self._control.close()


class Sending:
    def __init__(self, session, plan, layout, stream, folder, others):
        self._session, self._plan, self._layout, self._stream = session, plan, layout, stream
        self._folder, self._others = folder, others
        self._sources, self._gone = 1, -1

    def await_ranks(self):
        self._session.await_ranks(lambda _: Offer(push=self._plan.push, arena=self._folder))
        if self._plan.stream:
            self._session.all_prepared("the ranks to be ready")

    def needs(self):
        return self._session.needs.values()

    def acquire(self, bucket):
        self._taken(bucket - self._plan.slots)

    def _taken(self, bucket):
        self._session.all_taken(bucket)
        while self._gone < bucket:
            self._gone += 1
            path_of(self._folder, self._plan.push, self._gone).unlink()

    def announce(self, bucket, digests, begins=()):
        size, nbytes = self._plan.bucket_bytes, self._layout.nbytes
        others, path = self._others, path_of(self._folder, self._plan.push, bucket)
        if not bucket and others is not None and others.filled:
            self._sources = len(others.senders)
            asked = Write(self._folder, self._plan.push, self._sources, nbytes, size)
            others.ask(NAME, dict.fromkeys(others.senders[1:], http.to_json(asked)))
            self._session.watch = others.check
        source = bucket % self._sources
        if source:
            peers = self._session.peers
            what = f"source {source} to write bucket {bucket}"
            self._session.wait(lambda: set() if path.exists() else peers, what, LOOK_S)
        else:
            slot = bucket % self._plan.slots * size
            write(self._stream, slot, slot + min(size, nbytes - bucket * size), path)
        self._session.announce(bucket, digests, source, begins)

    def finish(self):
        self._taken(self._layout.buckets(self._plan.bucket_bytes) - 1)
        seconds = self._session.all_prepared("the ranks to hold and verify everything")
        if self._sources > 1:
            self._others.answered("to write its part", self._session.deadline)
        return seconds

    def cancel(self, error):
        self._session.cancel(error)
        for path in Path(self._folder).iterdir():
            path.unlink(missing_ok=True)


class Source:
    """Writes the buckets of a trainer rank other than 0."""

    def __init__(self, rank):
        self._rank = rank

    def help(self, body, stream, check):
        asked = msgspec.json.decode(body, type=Write)
        for number in range(self._rank, -(-asked.nbytes // asked.bucket_bytes), asked.sources):
            check()
            start = number * asked.bucket_bytes
            end = min(start + asked.bucket_bytes, asked.nbytes)
            write(stream, start, end, path_of(asked.folder, asked.push, number))

    def forget(self):
        pass

    def close(self):
        pass


class Engine:
    bytes_per_s = 0.0

    def __init__(self, device):
        self._device, self._folder = device, ""
        self._control = EngineControl(remote=True)
        self.check, self.confirm, self.fail = self._control.check, self._control.confirm, self._control.fail

    def join(self, asked, rank):
        if not isinstance(asked, OpenFolder):
            raise UnsupportedOption(f"files has no use for {type(asked).__name__}")
        if not os.path.isdir(asked.folder):
            raise TransferFailed(f"rank {rank} sees no folder {asked.folder}")
        self._folder = asked.folder
        return http.RankJoined(rank=rank, device=str(self._device))

    def open(self, request, parts, rank, cancelled):
        session, offer = self._control.open(request, parts, rank, (), cancelled)
        if not self._folder or offer.arena != self._folder:
            raise TransferFailed(
                f"rank {rank} was told of no folder: open_folder comes before update_weights_via_files"
            )
        return Incoming(session, request, parts.layout, self._folder, self._device)

    def release(self, address):
        if address != self._control.address:
            return False
        self.close()
        return True

    def close(self):
        self._folder = ""
        self._control.disconnect()


class Incoming:
    whole = None
    lingers = False

    def __init__(self, session, request, layout, folder, device):
        self._session, self._request, self._layout, self.arena, self._device = session, request, layout, folder, device

    def buckets(self, stage):
        size = self._request.bucket_bytes
        for number in range(self._layout.buckets(size)):
            announced = self._session.filled(number)
            with self._session.explained():  # a sender that gives up removes its files
                data = self._read(number)
            self._session.taken(number)
            if stage is not None:
                place = stage[number * size : number * size + data.numel()]
                data = place.copy_(data)
            yield Bucket(number, data.to(self._device), announced.digests, announced.begins)

    def _read(self, number):
        try:
            return torch.from_numpy(np.fromfile(path_of(self.arena, self._request.push, number), np.uint8))
        except OSError as error:
            raise TransferFailed(f"bucket {number} cannot be read: {error}") from error


SPEC = TransportSpec(
    name=NAME, label="a shared folder", trainer_end=Trainer, engine_end=Engine, rank_helper=Source, handshake=OpenFolder
)
