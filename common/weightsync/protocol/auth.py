"""The key that an engine asks for and a sender shows."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import tempfile
from pathlib import Path
from typing import Final

from weightsync.errors import AuthenticationFailed
from weightsync.protocol.directories import PREFIX, SHM_DIRECTORY, private, why_not_private

logger = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "WEIGHTSYNC_TOKEN"
_KEY_NAME: Final = "token"


def _homes() -> list[Path]:
    """The directories that may hold this user's key; the first that does counts.

    The first is where everybody looks. The others are those of earlier senders and engines, and one of them outlives
    what a login manager removes from shared memory when its user has logged out.
    """
    base, own = os.environ.get("XDG_RUNTIME_DIR"), f"{PREFIX}{os.geteuid()}"
    older = [Path(base) / "weightsync"] if base else []
    return [SHM_DIRECTORY / own, *older, Path(tempfile.gettempdir()) / own]


def _read_key(path: Path) -> str:
    """The key in a file, empty where there is none. Raises `AuthenticationFailed` for one that others can read."""
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
            raise AuthenticationFailed(f"the key file {path} is not this user's alone (0600); remove it")
        return usable(file.read())


def _write_key(path: Path, key: str) -> None:
    """Write a key file, unless there is one. Raises `AuthenticationFailed` if that cannot be done."""
    try:
        # Several engines may start at once: the link is atomic, the losers read the winner's key.
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
    """The key without white space around it. Raises `AuthenticationFailed`, not naming it, if HTTP cannot carry it."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise AuthenticationFailed("the key holds characters that HTTP cannot carry; use printable ASCII")
    return token


def engine_token() -> str:
    """The key an engine asks for: ``$WEIGHTSYNC_TOKEN``, else that of this user's key file, written if absent (0600).

    Where from is logged. Raises `AuthenticationFailed` if no directory can hold a key file, or others can read it.
    """
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        logger.warning("weightsync asks for the key of %s", TOKEN_VARIABLE)
        return token
    homes, faults = [], []
    for home in _homes():
        try:
            homes.append(private(home))
        except AuthenticationFailed as error:
            faults.append(str(error))
    if not homes:
        raise AuthenticationFailed(f"there is no place for the key; set {TOKEN_VARIABLE}: {'; '.join(faults)}")
    first = homes[0] / _KEY_NAME
    found = (key for home in homes if (key := _read_key(home / _KEY_NAME)))
    _write_key(first, next(found, "") or secrets.token_urlsafe(32))
    token = _read_key(first)
    for home in homes[1:]:
        with contextlib.suppress(AuthenticationFailed):  # it is for older senders, and for later
            _write_key(home / _KEY_NAME, token)
    # Engines show what libraries say from warnings on.
    logger.warning("weightsync asks for the key in %s%s", first, "".join(f"; {fault}" for fault in faults))
    return token


def sender_token() -> str:
    """The key a sender shows; empty where neither the variable nor a key file exists."""
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        return token
    return next((key for home in _homes() if (key := _read_key(home / _KEY_NAME))), "")


def origin(token: str) -> str:
    """Where a sender's key is from, for an error; the key itself is not told."""
    files = [home / _KEY_NAME for home in _homes()]
    if not token:
        return f"missing ({TOKEN_VARIABLE} is not set, and there is no key file {' or '.join(map(str, files))})"
    if same(token, os.environ.get(TOKEN_VARIABLE, "").strip()):
        return f"that of {TOKEN_VARIABLE}"
    with contextlib.suppress(AuthenticationFailed):
        for file in files:
            if same(token, _read_key(file)):
                return f"that in {file}"
    return "the one that the sender was given"


def shown_key(authorization: str) -> str:
    """The key in that header of a request; empty, which is nobody's, where there is none."""
    scheme, _, shown = authorization.partition(" ")
    return shown if scheme.lower() == "bearer" else ""


def same(shown: str, token: str) -> bool:
    """Compare keys in constant time; an empty key never matches."""
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())
