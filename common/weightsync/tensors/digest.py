"""Digests of tensors, 64 bits each: a rank compares what its stage holds with what the trainer held.

They detect faults, not attacks: only holders of the key could forge one, and they may push anything.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
import xxhash

#: Bytes hashed at a time on a CPU: few enough that what was just copied is still in the cache.
CHUNK_BYTES: Final = 1 << 20
#: Bytes hashed at a time on an accelerator, where the temporaries take eight times as much memory.
_DEVICE_CHUNK_BYTES: Final = 64 << 20
_WORD: Final = 8
#: All pieces except the last have a multiple of this many bytes.
_PIECE_BYTES: Final = 512


class Hasher(Protocol):
    """Hashes the bytes of a tensor, given in pieces; all pieces except the last are multiples of 512 bytes long."""

    def update(self, raw: torch.Tensor) -> None:
        """Add the next bytes, a contiguous 1-D uint8 tensor."""

    def value(self) -> int:
        """The digest, an unsigned 64-bit number; waits for an accelerator to finish."""


class _Xxh3:
    """XXH3, on the CPU; takes about half the time of a memcpy."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, raw: torch.Tensor) -> None:
        self._hash.update(raw.numpy().data)

    def value(self) -> int:
        return self._hash.intdigest()


class _Mix64:
    """A reduction on the tensor's device: mixes each 64-bit word with its position, and sums the results.

    Mixing uses the constants of SplitMix64. All arithmetic is modulo 2^64, so every device gets the same digest.
    """

    def __init__(self) -> None:
        self._words = 0
        self._bytes = 0
        self._sum: torch.Tensor | None = None

    def update(self, raw: torch.Tensor) -> None:
        for piece in torch.split(raw, _DEVICE_CHUNK_BYTES):
            self._bytes += piece.numel()
            if piece.numel() % _WORD:
                piece = torch.nn.functional.pad(piece, (0, -piece.numel() % _WORD))  # noqa: PLW2901
            elif piece.storage_offset() % _WORD:
                piece = piece.clone()  # noqa: PLW2901 - a view as words needs an offset that is a multiple of 8
            words = piece.view(torch.int64)
            at = torch.arange(self._words, self._words + words.numel(), dtype=torch.int64, device=words.device)
            mixed = words + (at + 1) * _signed(0x9E3779B97F4A7C15)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                mixed = (mixed ^ (mixed >> shift)) * _signed(factor)
            part = (mixed ^ (mixed >> 31)).sum()
            self._sum = part if self._sum is None else self._sum + part
            self._words += words.numel()

    def value(self) -> int:
        total = int(self._sum.item()) if self._sum is not None else 0
        return (total ^ self._bytes * 0x9E3779B97F4A7C15) % (1 << 64)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


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
    for piece in torch.split(tensor, rows):
        hasher.update(piece.contiguous().view(-1).view(torch.uint8))
    return hasher


def digest_runs(algorithm: str, memory: torch.Tensor, runs: Sequence[tuple[int, int]]) -> int:
    """Digest of several runs of ``memory`` (1-D uint8), pairs of offset and bytes."""
    return joined([digest_bytes(algorithm, memory[at : at + nbytes]) for at, nbytes in runs])


def joined(digests: Sequence[int]) -> int:
    """Digest of several runs, given the digest of each."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_64_intdigest(array.array("Q", digests).tobytes())


def digest_bytes(algorithm: str, raw: torch.Tensor) -> int:
    """Digest of a contiguous 1-D uint8 tensor."""
    hasher = ALGORITHMS[algorithm]()
    hasher.update(raw)
    return hasher.value()
