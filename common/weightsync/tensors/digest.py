"""Digests of tensors, 64 bits each: a rank compares what its stage holds with what the trainer held.

They detect faults, not attacks: only holders of the key could forge one, and they may push anything.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Final, Protocol

import torch
import xxhash

from weightsync.tensors import gpu_copy
from weightsync.tensors.gpu_copy import WORD_BYTES

#: Bytes hashed at a time on a CPU: few enough that what was just copied is still in the cache.
CHUNK_BYTES: Final = 1 << 20
#: Words mixed at a time by torch, whose temporaries take eight times as much memory.
_DEVICE_CHUNK_WORDS: Final = 8 << 20
#: Bytes that are hashed at once; copies of what is not contiguous or not aligned are held until then.
_TOGETHER_BYTES: Final = 256 << 20
#: All pieces except the last have a multiple of this many bytes.
_PIECE_BYTES: Final = 512


class Hasher(Protocol):
    """Hashes the bytes of a tensor, given in pieces; all pieces except the last are multiples of 512 bytes long."""

    #: Whether what `update` is given is hashed by `value`, or by `settle`, and must stay as it is until then.
    deferred: ClassVar[bool]

    def update(self, raw: torch.Tensor) -> None:
        """Add the next bytes, a contiguous 1-D uint8 tensor."""

    def value(self) -> int:
        """The digest, an unsigned 64-bit number; waits for an accelerator to finish."""


class _Xxh3:
    """XXH3, on the CPU; takes about half the time of a memcpy."""

    deferred: ClassVar[bool] = False

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, raw: torch.Tensor) -> None:
        self._hash.update(raw.numpy().data)

    def value(self) -> int:
        return self._hash.intdigest()


class _Mix64:
    """A reduction on the tensor's device: mixes each 64-bit word with its position, and sums the results.

    Mixing uses the constants of SplitMix64. All arithmetic is modulo 2^64, so every device gets the same digest. The
    pieces of many tensors are summed at once, because each sum costs an accelerator's latency.
    """

    deferred: ClassVar[bool] = True

    def __init__(self) -> None:
        self._words = self._bytes = self.sum = 0
        #: Memory whose words were not summed yet, and the position of the first.
        self.pending: list[tuple[torch.Tensor, int]] = []

    def update(self, raw: torch.Tensor) -> None:
        # A kernel needs an aligned address, and torch's view as words a storage offset that is a multiple of one.
        aligned = not (raw.storage_offset() % WORD_BYTES or raw.data_ptr() % WORD_BYTES)
        for piece in (raw,) if aligned else torch.split(raw, _TOGETHER_BYTES):
            self.pending.append((piece if aligned else piece.clone(), self._words))
            self._bytes += piece.numel()
            self._words += -(-piece.numel() // WORD_BYTES)
            if not aligned and piece.numel() == _TOGETHER_BYTES:
                settle([self])  # so that no more copies are held

    def value(self) -> int:
        settle([self])
        return gpu_copy.finished(self.sum, self._bytes)


def settle(hashers: Iterable[Hasher]) -> None:
    """Hash all that these hashers were given; afterwards the memory may be used again."""
    waiting = [hasher for hasher in hashers if isinstance(hasher, _Mix64) and hasher.pending]
    by_device: dict[torch.device, list[tuple[torch.Tensor, int, int]]] = {}
    for number, hasher in enumerate(waiting):
        for raw, first in hasher.pending:
            by_device.setdefault(raw.device, []).append((raw, first, number))
        hasher.pending = []
    for device, pieces in by_device.items():
        for hasher, found in zip(waiting, _sums(pieces, len(waiting), device), strict=True):
            hasher.sum += found


def _sums(pieces: Sequence[tuple[torch.Tensor, int, int]], count: int, device: torch.device) -> list[int]:
    """The sums of pieces: memory, the position of its first word, and the number of its sum."""
    if gpu_copy.available(device):
        rows = [(raw.data_ptr(), raw.numel(), first, number) for raw, first, number in pieces]
        return gpu_copy.sums(rows, count, device).make()
    found = torch.zeros(count, dtype=torch.int64, device=device)
    for raw, first, number in pieces:
        padded = torch.nn.functional.pad(raw, (0, -raw.numel() % WORD_BYTES)) if raw.numel() % WORD_BYTES else raw
        for start, words in enumerate(torch.split(padded.view(torch.int64), _DEVICE_CHUNK_WORDS)):
            found[number] += _mixed(words, first + start * _DEVICE_CHUNK_WORDS).sum()
    listed: list[int] = found.tolist()
    return listed


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    at = torch.arange(first, first + words.numel(), dtype=torch.int64, device=words.device)
    mixed = words + (at + 1) * gpu_copy.signed(gpu_copy.STEP)
    for shift, factor in zip((30, 27), gpu_copy.FACTORS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * gpu_copy.signed(factor)
    return mixed ^ (mixed >> 31)


#: The algorithms, by their names in messages.
ALGORITHMS: Final[dict[str, Callable[[], Hasher]]] = {"xxh3_64": _Xxh3, "mix64": _Mix64}


def algorithm_for(*devices: torch.device) -> str:
    """Name of the algorithm to use if tensors are hashed on these devices."""
    return "xxh3_64" if all(device.type == "cpu" for device in devices) else "mix64"


def hashed(algorithm: str, tensor: torch.Tensor) -> Hasher:
    """A hasher that was given all elements of ``tensor`` in row-major order; copies them if they are not contiguous."""
    hasher = ALGORITHMS[algorithm]()
    if tensor.is_contiguous() or not tensor.ndim:
        hasher.update(tensor.reshape(-1).view(torch.uint8))
        return hasher
    # As many rows at a time as stay in the cache until they are hashed, and a multiple of 512 bytes.
    row_bytes = tensor[:1].nbytes
    least = _PIECE_BYTES // math.gcd(_PIECE_BYTES, row_bytes)
    rows = max(1, CHUNK_BYTES // (least * row_bytes)) * least
    held = 0
    for piece in torch.split(tensor, rows):
        hasher.update(piece.contiguous().view(-1).view(torch.uint8))
        held += piece.nbytes
        if held >= _TOGETHER_BYTES:
            settle([hasher])
            held = 0
    return hasher


def digests(algorithm: str, tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """The digest of each of several tensors."""
    held, nbytes = list[Hasher](), 0
    for tensor in tensors:
        hasher = hashed(algorithm, tensor)
        if not hasher.deferred:
            yield hasher.value()
            continue
        held.append(hasher)
        nbytes += tensor.nbytes
        if nbytes >= _TOGETHER_BYTES:
            settle(held)
            yield from (hasher.value() for hasher in held)
            held, nbytes = [], 0
    settle(held)
    yield from (hasher.value() for hasher in held)


def digest_runs(algorithm: str, memory: torch.Tensor, runs: Sequence[tuple[int, int]]) -> int:
    """Digest of several runs of ``memory`` (1-D uint8), pairs of offset and bytes."""
    return joined(list(digests(algorithm, (memory[at : at + nbytes] for at, nbytes in runs))))


def joined(digests: Sequence[int]) -> int:
    """Digest of several runs, given the digest of each."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_64_intdigest(array.array("Q", digests).tobytes())


def digest_bytes(algorithm: str, raw: torch.Tensor) -> int:
    """Digest of a contiguous 1-D uint8 tensor."""
    hasher = ALGORITHMS[algorithm]()
    hasher.update(raw)
    return hasher.value()
