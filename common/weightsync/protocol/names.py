"""Names that users give: URLs of engines, labels of versions; and the commands that start an engine."""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import SplitResult, urlsplit

from weightsync.errors import UnsupportedOption
from weightsync.protocol.codec import MAX_TEXT_CHARS

#: The command that starts each engine with the plugin, as error messages and documents give it.
START_LINES: Final = {
    "vllm": "VLLM_PLUGINS=weightsync vllm serve {model}",
    "sglang": "SGLANG_PLUGINS=weightsync python -m sglang.launch_server --model-path {model}",
}

_PORTS: Final = {"http": 80, "https": 443}
#: Errors show at most this many characters of an overlong value.
_SHOWN_CHARS: Final = 60


def plain_url(url: str) -> str:
    """Normalise the base URL of an engine, so that equivalent URLs compare equal.

    Drops upper case in scheme and host, the scheme's default port, alternative spellings of an IPv6 address, and
    trailing slashes. A path is kept, since some servers are mounted below one. Raises `UnsupportedOption` if ``url`` is
    not a valid base URL.
    """
    if not isinstance(url, str):
        raise UnsupportedOption(f"{url!r} is not a URL: give a string like 'http://HOST:PORT'")
    text = url.strip()
    if len(text) > MAX_TEXT_CHARS:
        raise _unusable(f"{text[:_SHOWN_CHARS]}...", f"it is longer than {MAX_TEXT_CHARS} characters")
    if not text.isprintable() or " " in text:
        raise _unusable(text, "it contains white space or control characters")
    try:
        split = urlsplit(text)
        port = split.port
    except ValueError as error:
        raise _unusable(text, str(error)) from error
    if split.scheme not in _PORTS:
        begins = f"it begins with {split.scheme}://" if "://" in text else "it does not begin with http:// or https://"
        raise _unusable(text, begins)
    if split.username is not None:  # there may also be a password, which must not be shown
        raise _unusable(
            f"{split.scheme}://...@{split.hostname}", "it contains a user name; pass the key as the option token"
        )
    if split.query or split.fragment or not split.path.isascii():
        raise _unusable(text, "it contains a query, a fragment, or a path that is not ASCII")
    if port == 0:
        raise _unusable(text, "no server has port 0")
    shown_port = "" if port in (None, _PORTS[split.scheme]) else f":{port}"
    return f"{split.scheme}://{_host(text, split)}{shown_port}{split.path.rstrip('/')}"


def check_label(version: object) -> None:
    """Raise `UnsupportedOption` unless ``version`` can label a version: 1 to 1024 printable characters.

    It cannot be empty, because an empty label means "no version" in every message.
    """
    if not (isinstance(version, str) and 0 < len(version) <= MAX_TEXT_CHARS and version.isprintable()):
        shown = repr(version)
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
        raise UnsupportedOption(
            f"version {shown} is not a valid label: give a string of 1 to {MAX_TEXT_CHARS} printable characters, like "
            "version='5'; without a label, versions are numbered"
        )


def _host(text: str, split: SplitResult) -> str:
    host = split.hostname or ""
    try:
        if ":" in host:
            address, zone, name = host.partition("%")
            return f"[{ipaddress.IPv6Address(address)}{zone}{name}]"
        if host.encode("idna"):
            return host
    except ValueError as error:  # includes UnicodeError
        raise _unusable(text, f"its host is not valid: {error}") from error
    raise _unusable(text, "it names no host")


def _unusable(url: str, why: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"{url!r} is not the base URL of an engine ({why}); give http://HOST:PORT, or http://[IPV6]:PORT"
    )
