"""Servers that cannot be asked: nothing answers at a URL, or not an engine with weightsync and this key."""

from __future__ import annotations

import socket
import ssl
from typing import Final
from urllib.parse import urlsplit

from weightsync.deadline import Deadline
from weightsync.doctor import local_process
from weightsync.errors import (
    AuthenticationFailed,
    EngineUnreachable,
    PluginNotLoaded,
    ProtocolMismatch,
    PushTimeout,
    UnsupportedOption,
    WeightSyncError,
)
from weightsync.protocol import auth
from weightsync.protocol.diagnosis import Finding
from weightsync.protocol.names import START_LINES
from weightsync.trainer import http_client
from weightsync.trainer.client import EngineClient

#: Seconds for each question to a server that has answered something else.
_LOOK_S: Final = 2.0


def explain(error: WeightSyncError, client: EngineClient, token: str) -> Finding:
    """The cause of an ``error`` of the first request to an engine."""
    if isinstance(error, AuthenticationFailed):
        return _key(error, client, token)
    if isinstance(error, PushTimeout):
        mend = "is it frozen or overloaded? kill -CONT its process, look at its log, or pass --timeout"
        return Finding("engine", "wrong", f"it accepts connections, but {error}", mend)
    if isinstance(error, EngineUnreachable):
        return _unreachable(error, client.url)
    if isinstance(error, UnsupportedOption):
        return Finding("engine", "wrong", str(error), "give each engine once, by its own http://HOST:PORT")
    if isinstance(error, ProtocolMismatch) and error.__cause__ is None:  # else its reply could not be read
        return Finding("versions", "wrong", str(error), "pip install weightsync of one version in both environments")
    return _other_service(error, client)


def _unreachable(error: EngineUnreachable, url: str) -> Finding:
    no_answer = error.__cause__
    cause = no_answer.__cause__ if no_answer is not None else None
    split = urlsplit(url)
    health = f"curl -m 5 {url}/health"
    if isinstance(no_answer, http_client.Untrusted):
        text, mend = str(error), f"export {http_client.CA_FILE}=FILE"
    elif isinstance(cause, socket.gaierror):
        text = f"the name {split.hostname} has no address: {cause.strerror}"
        mend = f"getent hosts {split.hostname}; is it spelt so, and known to this host?"
    elif isinstance(cause, ConnectionRefusedError):
        text = f"nothing listens at {split.netloc}"
        mend = f"start the engine, or give its --host and --port; on its host: {health}"
    elif isinstance(no_answer, http_client.Late):
        text = f"{split.netloc} does not accept a connection: a firewall drops it, or the host is down"
        mend = f"let TCP to this port pass; {health}"
    elif isinstance(cause, ssl.SSLError):
        text, mend = f"{split.netloc} does not speak TLS", f"http://{split.netloc}{split.path}"
    else:
        text = f"{split.netloc} hangs up without an answer of HTTP ({no_answer})"
        mend = f"is that the engine's port? If it speaks TLS: https://{split.netloc}{split.path}"
    return Finding("engine", "wrong", text, mend)


def _key(error: AuthenticationFailed, client: EngineClient, token: str) -> Finding:
    place = _accepted(client.url, token)
    if not place:
        mend = f"set {auth.TOKEN_VARIABLE} to the same value on both sides; if the server has --api-key, to that"
        return Finding("key", "wrong", str(error), mend)
    text = f"the engine requires the key in {place}, but this side's is {auth.origin(token)}"
    mend = f'export {auth.TOKEN_VARIABLE}="$(cat {place})"'
    return Finding("key", "wrong", text, mend)


def _accepted(url: str, refused: str) -> str:
    """The key file of this user that the engine accepts, if it is a process of this user; empty if none."""
    if local_process.listening(url) is None:
        return ""  # a key of this host must not be shown to another
    try:
        for place, key in auth.own_keys():
            if key != refused and _accepts(url, key):
                return place
    except WeightSyncError:
        pass  # a key file that cannot be used is a finding of this host
    return ""


def _accepts(url: str, key: str) -> bool:
    try:
        EngineClient(url, key).status(Deadline(_LOOK_S))
    except AuthenticationFailed:
        return False
    return True


def _other_service(error: WeightSyncError, client: EngineClient) -> Finding:
    kind = client.kind(Deadline(_LOOK_S))
    if not kind:
        if isinstance(error, PluginNotLoaded):
            error = WeightSyncError("it has no routes of weightsync, and none by which vLLM or SGLang is known")
        return Finding(
            "engine", "wrong", f"a server answers that is no engine: {error}", "give http://HOST:PORT of an engine"
        )
    process = local_process.listening(client.url)
    if process is not None:
        return process.why_not_loaded(kind)
    text = f"a {kind} server answers without weightsync: it is not installed or not named there, or its log says why"
    mend = f"pip install weightsync in its environment, and start it as {START_LINES[kind].format(model='MODEL')}"
    return Finding("plugin", "wrong", text, mend)
