"""The trainer's side of versions as files: `Folder`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from weightsync import errors
from weightsync.errors import SourceError, UnsupportedOption, WeightSyncError
from weightsync.files.places import Place, Unreachable, open_place, reported
from weightsync.files.shelf import Shelf
from weightsync.memory import arenas
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.names import check_label
from weightsync.protocol.version_files import (
    StoredTensor,
    Version,
    VersionManifest,
    Way,
    manifest_name,
    new_name,
    sign,
    signing_key,
)
from weightsync.sources import open_source
from weightsync.sources.iterator import read_pair
from weightsync.tensors import delta
from weightsync.tensors.digest import digest_bytes
from weightsync.tensors.layout import DTYPES

logger = logging.getLogger(__name__)

#: Versions may be on a GPU; their digests are always of host memory.
_DIGEST: Final = "xxh3_64"


Held = dict[str, tuple[TensorSpec, torch.Tensor]]
"""What a version holds, by name: its tensors as bytes."""


@dataclass(frozen=True)
class Written:
    """A version that was written: its label and number, whether it is complete without others, bytes and seconds."""

    version: str
    number: int
    full: bool
    nbytes: int
    seconds: float


class Folder:
    """A folder, or an object store, into which a trainer writes versions: ``Folder(path).write(model)``.

    Arguments:

    - ``where``: the path of a folder, which is made if it does not exist, or a URL that fsspec knows, such as
      ``s3://bucket/run``, with the extra ``weightsync[files]``.
    - ``token``: the key that signs versions, by default ``$WEIGHTSYNC_TOKEN`` or the content of this user's key file.
    - ``full_every``: every so many versions one is complete; the others have what changed since the one before. So is
      the first after a start or a failure, and one after deltas that together take as much as it does.

    Only one process at a time writes into a folder. It holds a copy of the last version in host memory. Files that
    neither of the newest two versions needs are removed. Raises `AuthenticationFailed` without a key.
    """

    def __init__(self, where: str | Path, *, token: str | None = None, full_every: int = 16):
        if full_every < 1:
            raise UnsupportedOption(f"full_every {full_every} is not a number of versions: give 1 or more")
        self._key = signing_key(token)
        self._where, self._full_every = str(where), full_every
        self._place: Place = open_place(where)
        #: What the last version holds, by name; empty if the next one has to be complete.
        self._held: Held = {}
        self._last: Version | None = None
        #: Of the last complete version, and of the deltas since.
        self._full_bytes = self._delta_bytes = self._deltas = 0
        with reported(f"{where} cannot be read"):
            self._shelf = Shelf(self._place, self._key)

    def write(self, model: object, *, version: str | None = None) -> Written:
        """Write the weights of ``model``, labelled ``version`` (default: its number), and remove what is outdated.

        ``model`` is what `Sender.push` takes, but whole: in a trainer of several processes one of them gathers it, as
        in an iterator of names and tensors. Once this returns, followers see the version. If it raises, the next
        version is complete. Raises `SourceError` if the model cannot be read, `UnsupportedOption` for a label that is
        not valid, and `TransferFailed` if files cannot be written.
        """
        start = time.perf_counter()
        number = self._shelf.take_number()
        label = str(number) if version is None else version
        check_label(label)
        # Any failure leaves what is held behind as neither this version nor the one before.
        held, self._held = self._held, {}
        full = not held or self._deltas + 1 >= self._full_every or self._delta_bytes >= self._full_bytes
        with errors.during("write"):
            manifest = self._write_data(model, number, label, held, full)
            content, self._last = sign(manifest, self._key)
            with reported(f"{self._where}: {manifest_name(number)} cannot be written"):
                self._place.publish(manifest_name(number), new_name(number, "part"), content)
        self._held = held
        if not manifest.parent:
            self._full_bytes, self._delta_bytes, self._deltas = manifest.data_nbytes, 0, 0
        else:
            self._delta_bytes, self._deltas = self._delta_bytes + manifest.data_nbytes, self._deltas + 1
        try:
            with reported(f"{self._where}: outdated files stay, because they cannot be removed"):
                self._shelf.add(self._last)
        except Unreachable as error:
            logger.warning("%s", error)  # the version is there all the same; the next one tries again
        return Written(label, number, not manifest.parent, manifest.data_nbytes, time.perf_counter() - start)

    def _write_data(self, model: object, number: int, label: str, held: Held, full: bool) -> VersionManifest:
        """Write the file of bytes, and update ``held``, which becomes this version."""
        name = new_name(number, "data")
        stored = list[StoredTensor]()
        with _Out(self._place, name, self._where) as out:
            for spec, tensor in _read(model):
                if not full and (spec.name not in held or held[spec.name][0] != spec):
                    raise SourceError(f"{spec.name}: the version before had no such tensor; write again, in full")
                stored.append(_store(out, spec, tensor, held, full))
            if not stored:
                raise SourceError("the model holds no tensors; there is nothing to write")
            lost = held.keys() - {one.spec.name for one in stored}
            if lost and not full:
                raise SourceError(f"{min(lost)}: the version before had this tensor; write again, in full")
        for gone in lost:
            del held[gone]
        order = {key: at for at, key in enumerate(held)}
        stored.sort(key=lambda one: order[one.spec.name])  # an iterator may have another with each version
        alone = all(one.way == "dense" for one in stored)
        parent = None if alone else self._last
        return VersionManifest(
            number,
            label,
            name,
            out.nbytes,
            out.sha256.hexdigest(),
            _DIGEST,
            tuple(stored),
            *((parent.manifest.number, parent.sha256) if parent is not None else ()),
        )


class _Out:
    """The file ``name`` of a place, written once from its start, and hashed; removed again if the block raises."""

    def __init__(self, place: Place, name: str, where: str):
        self._place, self._name, self._what = place, name, f"{where}: {name} cannot be written"
        self.nbytes, self.sha256 = 0, hashlib.sha256()

    def __enter__(self) -> _Out:
        with reported(self._what):
            self._file = self._place.create(self._name)
        return self

    def write(self, content: Any) -> None:
        """Append what is in a buffer."""
        rest = memoryview(content)
        self.sha256.update(rest)
        self.nbytes += len(rest)
        with reported(self._what):
            while rest:
                rest = rest[self._file.write(rest) :]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with reported(self._what):
                self._file.close()
        except WeightSyncError:
            if error is None:
                raise
        finally:
            if error is not None:
                with contextlib.suppress(WeightSyncError), reported(self._name):
                    self._place.remove(self._name)


def _store(out: _Out, spec: TensorSpec, tensor: torch.Tensor, held: Held, full: bool) -> StoredTensor:
    """Write what a follower needs of a tensor, and hold it."""
    raw, offset, made = _host_bytes(tensor), out.nbytes, None
    if spec.name in held and held[spec.name][0] == spec:
        old = held[spec.name][1]
        made = None if full else delta.encode(old, raw, DTYPES[spec.dtype].itemsize)
        if made != b"":
            arenas.copy(old, raw)
    else:
        held[spec.name] = spec, raw.clone()
    if made is None:
        out.write(raw.numpy())
    elif made:
        out.write(made)
    way: Way = "dense" if made is None else "delta" if made else "same"
    return StoredTensor(spec, digest_bytes(_DIGEST, raw), way, offset, out.nbytes - offset)


def _host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").resolve_neg().contiguous().view(-1).view(torch.uint8)


def _read(model: object) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """The tensors of a model. Raises `SourceError`."""
    if isinstance(model, Iterator):
        names: set[str] = set()
        for pair in model:
            spec, tensor = read_pair(pair)
            if spec.name in names:
                raise SourceError(f"the iterator yielded {spec.name} twice; every tensor needs a unique name")
            names.add(spec.name)
            yield spec, tensor
        return
    source = open_source(model)
    yield from zip(source.specs, source.tensors(), strict=True)
