"""The key that engines require and senders present."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from weightsync.errors import AuthenticationFailed
from weightsync.protocol.diagnosis import Finding
from weightsync.protocol.directories import PREFIX, SHM_DIRECTORY, private, why_not_private

logger = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "WEIGHTSYNC_TOKEN"
_KEY_NAME: Final = "token"


def _homes() -> list[Path]:
    """The directories that may hold this user's key file, in order of preference.

    The first is the current place. The others were used by earlier versions of this package, and one of them survives
    when a login manager clears the user's shared memory at logout.
    """
    base, own = os.environ.get("XDG_RUNTIME_DIR"), f"{PREFIX}{os.geteuid()}"
    older = [Path(base) / "weightsync"] if base else []
    return [SHM_DIRECTORY / own, *older, Path(tempfile.gettempdir()) / own]


def _read_key(path: Path) -> str:
    """The key in a file, empty if there is no file. Raises `AuthenticationFailed` if other users can read the file."""
    if why_not_private(path.parent):
        return ""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise AuthenticationFailed(f"the key file {path} cannot be read: {error.strerror}; remove it") from error
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        info = os.fstat(descriptor)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise AuthenticationFailed(f"the key file {path} is not private to this user (mode 0600); remove it")
        return usable(file.read())


def _write_key(path: Path, key: str) -> None:
    """Write a key file unless it exists. Raises `AuthenticationFailed` if it cannot be written."""
    try:
        # Several engines may start at once: the link is atomic, so all of them end up with the key of the first.
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(key)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    except OSError as error:
        raise AuthenticationFailed(f"the key file {path} cannot be written: {error.strerror}") from error


def usable(token: str) -> str:
    """Strip white space from a key. Raises `AuthenticationFailed`, without showing the key, if HTTP cannot carry it."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise AuthenticationFailed("the key contains characters that HTTP cannot carry; use printable ASCII")
    return token


def engine_token() -> str:
    """The key an engine requires: ``$WEIGHTSYNC_TOKEN``, else the one in this user's key file.

    Creates the key file with mode 0600 if absent, and logs where the key comes from. Raises `AuthenticationFailed` if
    no directory can hold a key file, or if other users can read the file.
    """
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        logger.warning("weightsync requires the key in %s", TOKEN_VARIABLE)
        return token
    homes, faults = [], []
    for home in _homes():
        try:
            homes.append(private(home))
        except AuthenticationFailed as error:
            faults.append(str(error))
    if not homes:
        raise AuthenticationFailed(f"no directory can hold the key file; set {TOKEN_VARIABLE}: {'; '.join(faults)}")
    first = homes[0] / _KEY_NAME
    found = (key for home in homes if (key := _read_key(home / _KEY_NAME)))
    _write_key(first, next(found, "") or secrets.token_urlsafe(32))
    token = _read_key(first)
    for home in homes[1:]:
        with contextlib.suppress(AuthenticationFailed):  # copies, for older senders and for after a logout
            _write_key(home / _KEY_NAME, token)
    # A warning, because engines hide what libraries log below that level.
    logger.warning("weightsync requires the key in %s%s", first, "".join(f"; {fault}" for fault in faults))
    return token


def sender_token() -> str:
    """The key a sender presents: ``$WEIGHTSYNC_TOKEN``, else the one in this user's key file; empty without either.

    Raises `AuthenticationFailed` if HTTP cannot carry the key, or if other users can read the key file.
    """
    return next((key for _, key in own_keys()), "")


def own_keys() -> Iterator[tuple[str, str]]:
    """Every key of this side, after its place, in the order in which a sender looks. Raises as `sender_token`."""
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        yield TOKEN_VARIABLE, token
    for home in _homes():
        if token := _read_key(home / _KEY_NAME):
            yield str(home / _KEY_NAME), token


def check() -> Finding:
    """Whether a sender in this process's environment has a key that it can use."""
    try:
        token = sender_token()
    except AuthenticationFailed as error:
        return Finding("key", "wrong", str(error), f"set {TOKEN_VARIABLE} to one random value on both sides")
    if not token:
        start = f"start an engine as this user on this host, which writes one, or set {TOKEN_VARIABLE} on both sides"
        return Finding("key", "note", f"the key is {origin(token)}", start)
    return Finding("key", "ok", f"the key is {origin(token)}")


def origin(token: str) -> str:
    """Where a sender's key comes from, as error messages say it; never the key itself."""
    files = [home / _KEY_NAME for home in _homes()]
    if not token:
        return f"missing ({TOKEN_VARIABLE} is not set, and there is no key file {' or '.join(map(str, files))})"
    with contextlib.suppress(AuthenticationFailed):
        for place, key in own_keys():
            if same(token, key):
                return f"the one in {place}"
    return "the one that the sender was given"


def shown_key(authorization: str) -> str:
    """The key in a request's ``Authorization`` header; empty, which never matches, if there is none."""
    scheme, _, key = authorization.partition(" ")
    return key if scheme.lower() == "bearer" else ""


def same(shown: str, token: str) -> bool:
    """Compare the key that was presented with the expected one, in constant time; an empty key never matches."""
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())
