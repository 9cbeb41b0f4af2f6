"""Answers to messages that an engine's own calls carry; see `weightsync.protocol.relayed`."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import zmq

from weightsync.engine import answers
from weightsync.engine.front_end import FrontEnd
from weightsync.errors import AuthenticationFailed, TransferFailed, UnsupportedOption, WrongState
from weightsync.protocol import addresses, auth
from weightsync.protocol.relayed import Relayed, unwrapped
from weightsync.transports.control import sockets

#: Seconds for the trainer to take a reply: it waits for nothing else.
_DELIVER_S: Final = 5.0
_SEVERAL_SERVERS: Final = (
    "this engine has several API servers, and its calls may reach a different one each time: start it with "
    "--api-server-count 1, or give a Sender its URL"
)


class Relay:
    """Takes the messages for one front end, in its event loop. ``token`` is the engine's key.

    A commit is carried out when the engine is told to finish. Other messages, all to be answered at once, may come at
    any time.
    """

    def __init__(self, front_end: FrontEnd, token: str):
        self._front_end, self._token = front_end, token
        self._routes = answers.routes()
        self._commit: Relayed | None = None
        #: Whether the call to finish is meant for another engine that gets the same calls.
        self._others = False

    async def take(self, carried: object) -> None:
        """Answer a message, or keep a commit. Raises `WeightSyncError` if nothing can be sent to the trainer."""
        try:
            asked = unwrapped(carried)
        except msgspec.MsgspecError as error:
            raise UnsupportedOption(
                f"the trainer's half of this weight transfer is not weightsync's ({error}): use TrainerInitInfo of "
                "weightsync.integrations.vllm"
            ) from error
        if not auth.same(asked.token, self._token):
            raise AuthenticationFailed("the trainer showed another key than this engine's: set WEIGHTSYNC_TOKEN alike")
        addresses.check_tcp_address(asked.reply_to, asked.server_key)
        mine = asked.engine in ("", self._front_end.instance)
        if asked.route == "commit":
            self._commit, self._others = (asked, False) if mine else (None, True)
        elif mine:
            await self._answer(asked)

    async def finish(self) -> None:
        """Carry out the commit that was kept. Raises `WrongState` if there is none."""
        if (asked := self._commit) is None and not self._others:
            raise WrongState("no push was prepared, so there is nothing to finish")
        self._commit, self._others = None, False
        if asked is not None:
            await self._answer(asked)

    async def _answer(self, asked: Relayed) -> None:
        async def read(kind: type[msgspec.Struct]) -> msgspec.Struct:
            return answers.decoded(asked.body.encode(), kind)

        if (route := self._routes.get(asked.route)) is None:
            raise UnsupportedOption(f"there is no route {asked.route!r}")
        status, body = await answers.answer(asked.route, route, lambda: self._front_end, read)
        await asyncio.to_thread(_deliver, asked, status, body)


def relay(front_end: FrontEnd | answers.Elsewhere | None, several_servers: bool) -> Relay:
    """The relay for an engine's front end. Raises `UnsupportedOption` if calls may reach another server."""
    if several_servers or not isinstance(front_end, FrontEnd):
        raise UnsupportedOption(_SEVERAL_SERVERS)
    return Relay(front_end, auth.engine_token())


def _deliver(asked: Relayed, status: int, body: bytes) -> None:
    context: zmq.Context[sockets.Socket] = zmq.Context()
    socket: sockets.Socket = context.socket(zmq.REQ)
    try:
        sockets.set_limits(socket)
        sockets.dial(socket, asked.reply_to, asked.server_key)
        socket.send_multipart([str(status).encode(), body])
        if not socket.poll(int(1000 * _DELIVER_S)):
            raise TransferFailed(
                f"the trainer took no reply at {asked.reply_to}: give TrainerInitInfo(address=...) an address of its "
                "host that the engine reaches"
            )
    finally:
        sockets.close(context, [socket])
