"""What users call things: engines by URLs, versions by labels; and how they start an engine."""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import SplitResult, urlsplit

from weightsync.errors import UnsupportedOption
from weightsync.protocol.codec import MAX_TEXT_CHARS

#: How each engine is started with the plugin; errors and documents say it in the same words.
START_LINES: Final = {
    "vllm": "VLLM_PLUGINS=weightsync vllm serve {model}",
    "sglang": "SGLANG_PLUGINS=weightsync python -m sglang.launch_server --model-path {model}",
}

_PORTS: Final = {"http": 80, "https": 443}
#: How much errors show of what is too long.
_SHOWN_CHARS: Final = 60


def plain_url(url: str) -> str:
    """The base URL of an engine as this package writes it: without what says nothing, so that equal ones are equal.

    That is case in scheme and host, the scheme's own port, spellings of an IPv6 address, and slashes at the end. A path
    stays: some servers are reached below one. Raises `UnsupportedOption` for what is no such URL.
    """
    if not isinstance(url, str):
        raise UnsupportedOption(f"{url!r} is no URL: give a string like 'http://HOST:PORT'")
    text = url.strip()
    if len(text) > MAX_TEXT_CHARS:
        raise _unusable(f"{text[:_SHOWN_CHARS]}...", f"it is longer than {MAX_TEXT_CHARS} characters")
    if not text.isprintable() or " " in text:
        raise _unusable(text, "it holds white space or control characters")
    try:
        split = urlsplit(text)
        port = split.port
    except ValueError as error:
        raise _unusable(text, str(error)) from error
    if split.scheme not in _PORTS:
        said = f"it begins with {split.scheme}://" if "://" in text else "it does not say http:// or https://"
        raise _unusable(text, said)
    if split.username is not None:  # and a password, perhaps, which is not to be told
        raise _unusable(f"{split.scheme}://...@{split.hostname}", "it holds a user; the key is the option token")
    if split.query or split.fragment or not split.path.isascii():
        raise _unusable(text, "it holds a query, a fragment, or a path that is not ASCII")
    if port == 0:
        raise _unusable(text, "no server has port 0")
    shown_port = "" if port in (None, _PORTS[split.scheme]) else f":{port}"
    return f"{split.scheme}://{_host(text, split)}{shown_port}{split.path.rstrip('/')}"


def check_label(version: object) -> None:
    """Raise `UnsupportedOption` unless a version can be told by this from others, by engines and by people.

    An empty label stands for no version in every message.
    """
    if not (isinstance(version, str) and 0 < len(version) <= MAX_TEXT_CHARS and version.isprintable()):
        shown = repr(version)
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
        raise UnsupportedOption(
            f"version {shown} is no label: give a string of 1 to {MAX_TEXT_CHARS} printable characters, like "
            "version='5'; without one, versions are counted"
        )


def _host(text: str, split: SplitResult) -> str:
    host = split.hostname or ""
    try:
        if ":" in host:
            address, zone, name = host.partition("%")
            return f"[{ipaddress.IPv6Address(address)}{zone}{name}]"
        if host.encode("idna"):
            return host
    except ValueError as error:  # UnicodeError, too
        raise _unusable(text, f"its host is none: {error}") from error
    raise _unusable(text, "it names no host")


def _unusable(url: str, why: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"{url!r} is no address of an engine ({why}); give http://HOST:PORT, or http://[IPV6]:PORT"
    )
