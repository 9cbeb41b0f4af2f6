"""One engine: what a sender would find out about it, and what it says about itself and the way back."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from weightsync.deadline import Deadline
from weightsync.doctor import answers, memory
from weightsync.doctor.host import of_transport
from weightsync.errors import (
    AuthenticationFailed,
    EngineUnreachable,
    PluginNotLoaded,
    ProtocolMismatch,
    TransferFailed,
    UnsupportedOption,
    WeightSyncError,
)
from weightsync.memory import arenas
from weightsync.protocol import auth, expected, http
from weightsync.protocol.diagnosis import SINCE_MINOR, Finding, RankReport
from weightsync.trainer import buckets
from weightsync.trainer.client import EngineClient, check_distinct
from weightsync.transports import registry
from weightsync.transports.control.sockets import own_address

#: Seconds in which a rank must accept a connection.
_REACH_S: Final = 2.0
#: Errors after which there is nothing more to ask.
_NO_ENGINE: Final = (EngineUnreachable, PluginNotLoaded, AuthenticationFailed, ProtocolMismatch, TransferFailed)
_BACK: Final = 'Sender(..., address="an address of this host that the engine reaches"); doctor --address tries one'


class Visit:
    """The examination of one engine; ``address`` is that of the `Sender`. ``transport`` is what it would choose."""

    def __init__(self, address: str):
        self._address, self.transport = address, ""

    def findings(self, url: str, timeout_s: float, known: dict[str, str]) -> Iterator[Finding]:
        """Everything about the engine at ``url``. ``known``: URLs by engine instance, to which it is added."""
        deadline = Deadline(timeout_s)
        try:
            token = auth.sender_token()
        except AuthenticationFailed:
            token = ""  # a finding of this host
        try:
            client = EngineClient(url, token)
        except UnsupportedOption as error:
            yield Finding("engine", "wrong", str(error), "give http://HOST:PORT")
            return
        try:
            hello = client.open(Deadline(deadline.left() / 2))
        except _NO_ENGINE as error:
            yield answers.explain(error, client, token)
            return
        except WeightSyncError as error:
            yield from _without_open(error, client, token, deadline)
            return
        try:
            client.check_alone(hello, deadline)
            check_distinct(client.url, hello, known)
        except WeightSyncError as error:
            yield answers.explain(error, client, token)
            return
        known[hello.instance] = client.url
        yield from _versions(hello)
        yield from self._between(client, hello, deadline)
        if hello.protocol >= (http.PROTOCOL[0], expected.SINCE_MINOR):
            yield memory.finding(client, hello, deadline)

    def _between(self, client: EngineClient, hello: http.OpenReply, deadline: Deadline) -> Iterator[Finding]:
        """The transport that a sender would choose, and the way back from the ranks."""
        request = http.UpdateRequest("doctor", "", "", 512, http.LOOK_S, ())  # is only asked for its address
        try:
            self.transport, reason = registry.pick("auto", client.url, hello)
        except UnsupportedOption as error:
            yield Finding("transport", "wrong", str(error), "pip install weightsync in both environments")
            yield from self._reported(client, hello, request, deadline)
            return
        yield Finding("transport", "ok", f"{self.transport}: {reason}")
        yield from _apart(hello)
        spec = registry.spec(self.transport)
        end = None
        try:
            given = own_address(self._address) if self._address else ""
            end = spec.trainer_end(buckets.arena_device(hello.ranks, None, remote=not spec.local), None, given)
            end.connect({client.url: hello}, http.LOOK_S)  # makes the handshake, and sends none
            request = end.request(request, client.url)
        except WeightSyncError as error:
            yield Finding("address", "wrong", str(error), _BACK)
        try:
            yield from self._reported(client, hello, request, deadline)
        finally:
            if end is not None:
                end.close()

    def _reported(
        self, client: EngineClient, hello: http.OpenReply, request: http.UpdateRequest, deadline: Deadline
    ) -> Iterator[Finding]:
        """What the engine and its ranks have found."""
        if hello.protocol < (http.PROTOCOL[0], SINCE_MINOR):
            text = f"weightsync {hello.package_version} of this engine cannot say more"
            yield Finding(
                "engine", "note", text, f"pip install weightsync=={http.package_version()} in its environment"
            )
            return
        try:
            reply = client.diagnose(deadline, request.address, request.server_key)
        except WeightSyncError as error:
            yield Finding("engine", "wrong", str(error), "weightsync status URL")
            return
        if reply.instance != hello.instance:
            text = f"{client.url} answers for several engines, or was restarted just now"
            yield Finding("engine", "wrong", text, "give the URLs of the engines themselves")
        yield from reply.findings
        yield from _of_ranks(reply.ranks, self.transport)


def _without_open(error: WeightSyncError, client: EngineClient, token: str, deadline: Deadline) -> Iterator[Finding]:
    """The engine has refused to be opened; it may still say more about that."""
    found: list[Finding] = []
    with contextlib.suppress(WeightSyncError):
        found = list(client.diagnose(deadline).findings)
    if not any(finding.check == "ranks" for finding in found):  # which has the same reason
        yield answers.explain(error, client, token)
    yield from found


def _versions(hello: http.OpenReply) -> Iterator[Finding]:
    versions = f"{hello.engine} {hello.engine_version} with weightsync {hello.package_version}"
    yield Finding("engine", "ok", f"{versions} and {len(hello.ranks)} rank(s) serves version {hello.version!r}")
    if hello.package_version != (ours := http.package_version()):
        text = f"weightsync is {hello.package_version} there and {ours} here; both speak the older protocol"
        yield Finding("versions", "note", text, f"pip install weightsync=={ours} in the engine's environment")


def _apart(hello: http.OpenReply) -> Iterator[Finding]:
    """Why shared memory is not used although the engine runs on this machine."""
    if hello.host.partition(":")[0] != arenas.host_id().partition(":")[0]:
        return
    for name in registry.names():
        with contextlib.suppress(UnsupportedOption):
            spec = registry.spec(name)
            place, advice = spec.apart(hello) if spec.local else ("", "")
            if place:
                yield Finding(name, "note", f"the engine is on this machine, but as if on {place}", advice.strip(": "))


def _of_ranks(ranks: Sequence[RankReport], transport: str) -> Iterator[Finding]:
    """Equal findings of several ranks as one."""
    together: dict[Finding, list[int]] = {}
    for rank in ranks:
        for finding in rank.findings:
            together.setdefault(of_transport(finding, [transport]), []).append(rank.rank)
        if rank.listens:
            together.setdefault(_dialled(rank.listens), []).append(rank.rank)
    for finding, numbers in together.items():
        who = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        named = finding.text if finding.text.startswith("rank ") else f"{who}: {finding.text}"
        yield Finding(finding.check, finding.level, named, finding.mend)


def _dialled(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        text = f"this host cannot connect to {host}, from which it dials the trainer: {error}"
        return Finding("address", "wrong", text, "let TCP between the two hosts pass, both ways")
    return Finding("address", "ok", f"this host reaches it at {host}")
