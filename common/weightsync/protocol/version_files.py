"""Versions as files: the manifest of one, and the HMAC by which a reader knows that a holder of the key wrote it.

A version is a file of bytes and a manifest. The manifest has the bytes' SHA-256 and that of its parent's manifest, so
its HMAC vouches for everything that the version is made of.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from weightsync.errors import AuthenticationFailed, TransferFailed
from weightsync.protocol import auth
from weightsync.protocol.codec import Text, from_json, to_json
from weightsync.protocol.http import Message, TensorSpec

#: Of manifests; readers refuse any other.
FORMAT: Final = 1
#: Largest manifest that is read, in bytes; one of 100,000 tensors takes about 20 MB.
MAX_MANIFEST_BYTES: Final = 64 << 20
#: A key signs other things, too: what is signed begins with what it is.
_SIGNED: Final = b"weightsync version\n"

#: The files of a version: its manifest, its bytes, and what is to become its manifest.
FILE_NAME: Final = re.compile(r"(?P<number>[0-9]{12})(?:(?P<manifest>\.json)|-[0-9a-f]{8}\.(?:data|part))")

Way = Literal["dense", "delta", "same"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]


class StoredTensor(Message, frozen=True):
    """One tensor of a version, which takes ``nbytes`` bytes of the file from ``offset`` on, and the digest of it all.

    ``way``: its bytes (``"dense"``), a delta to the parent's (``"delta"``, see `tensors.delta`), or nothing, because
    it is the parent's (``"same"``).
    """

    spec: TensorSpec
    digest: Annotated[int, msgspec.Meta(ge=0)]
    way: Way
    offset: _Count
    nbytes: _Count


class VersionManifest(Message, frozen=True):
    """Version ``number`` of a folder, labelled ``label``; its bytes are in the file ``data``.

    ``parent`` is the number of the version that deltas refer to, and ``parent_sha256`` the hash of its manifest; 0 and
    empty if there is none. ``digest`` names the algorithm of the tensors' digests.
    """

    number: Annotated[int, msgspec.Meta(ge=1)]
    label: Annotated[Text, msgspec.Meta(min_length=1)]
    data: Text
    data_nbytes: _Count
    data_sha256: _Sha256
    digest: Literal["xxh3_64", "mix64"]
    tensors: tuple[StoredTensor, ...]
    parent: _Count = 0
    parent_sha256: _Sha256 = ""
    format: int = FORMAT


class Signed(Message, frozen=True):
    """The content of a manifest's file: the manifest as it was signed, byte by byte, and its HMAC-SHA256 in hex."""

    hmac: Text
    manifest: msgspec.Raw


class Version(NamedTuple):
    """A manifest, and the SHA-256 of its bytes, by which the next version names it."""

    manifest: VersionManifest
    sha256: str


def manifest_name(number: int) -> str:
    """The name of the manifest's file."""
    return f"{number:012d}.json"


def new_name(number: int, ending: Literal["data", "part"]) -> str:
    """A name that no file has, and that nobody can guess, for what is written beside the manifest."""
    return f"{number:012d}-{secrets.token_hex(4)}.{ending}"


def is_data_of(name: str, number: int) -> bool:
    """Whether ``name`` is that of a file of bytes of version ``number``; it names nothing outside the folder then."""
    found = FILE_NAME.fullmatch(name)
    return found is not None and name.endswith(".data") and int(found["number"]) == number


def signing_key(token: str | None = None) -> str:
    """The key that signs versions: ``token``, or that of a sender. Raises `AuthenticationFailed` if there is none."""
    if key := auth.usable(auth.sender_token() if token is None else token):
        return key
    raise AuthenticationFailed(f"versions are signed, and the key is {auth.origin('')}")


def sign(manifest: VersionManifest, key: str) -> tuple[bytes, Version]:
    """The content of a manifest's file."""
    body = to_json(manifest)
    return to_json(Signed(_hmac(body, key), msgspec.Raw(body))), Version(manifest, hashlib.sha256(body).hexdigest())


def verified(name: str, content: bytes, key: str) -> Version:
    """The manifest in the file ``name``.

    Raises `AuthenticationFailed` if no holder of ``key`` wrote it, and `TransferFailed` if it is damaged, of another
    format, or of another version than its name says.
    """
    try:
        signed = from_json(content, Signed)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"{name} is damaged: it is not a signed manifest ({error})") from error
    body = bytes(signed.manifest)
    if not auth.same(signed.hmac, _hmac(body, key)):
        raise AuthenticationFailed(f"{name} was not signed with this key, or was changed since")
    try:
        manifest = from_json(body, VersionManifest)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"{name} is of another release, whose manifests differ ({error})") from error
    if manifest.format != FORMAT:
        raise TransferFailed(f"{name} is of another release: format {manifest.format}; this one reads {FORMAT}")
    if name != manifest_name(manifest.number):
        raise TransferFailed(f"{name} is the manifest of version {manifest.number} under another name")
    return Version(manifest, hashlib.sha256(body).hexdigest())


def _hmac(body: bytes, key: str) -> str:
    return hmac.new(key.encode(), _SIGNED + body, hashlib.sha256).hexdigest()
