"""Answers to messages that an engine's own calls carry; see `weightsync.protocol.relayed`."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec
import zmq

from weightsync.deadline import Deadline
from weightsync.engine import answers
from weightsync.engine.front_end import FrontEnd
from weightsync.errors import AuthenticationFailed, TransferFailed, UnsupportedOption, WrongState
from weightsync.protocol import addresses, auth, http
from weightsync.protocol.relayed import Relayed, unwrapped
from weightsync.transports.control import sockets

logger = logging.getLogger(__name__)

#: Seconds for the trainer to take a reply: it waits for nothing else.
_DELIVER_S: Final = 5.0
_SEVERAL_SERVERS: Final = (
    "this engine has several API servers, and its calls may reach a different one each time: start it with "
    "--api-server-count 1, or give a Sender its URL"
)


class Relay:
    """Takes the messages for one front end, in its event loop. ``token`` is the engine's key.

    A commit is carried out when the engine is told to finish, as are those of other trainers that have come by then.
    Other messages, all to be answered at once, may come at any time. With ``several_servers`` of one engine every
    message is refused.
    """

    def __init__(self, front_end: FrontEnd | answers.Elsewhere, token: str, *, several_servers: bool = False):
        self._front_end, self._token, self._several_servers = front_end, token, several_servers
        self._routes = answers.routes()
        self._commits: list[tuple[Relayed, Deadline]] = []
        #: One for each call to finish that is expected, also those that are meant for another engine of the client.
        self._announced: list[Deadline] = []

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
        if self._several_servers or not isinstance(self._front_end, FrontEnd):
            return await _deliver(asked, *_refused("UnsupportedOption", _SEVERAL_SERVERS))
        mine = asked.engine in ("", self._front_end.instance)
        if asked.route == "commit":
            self._announced.append(Deadline(asked.timeout_s))
            if mine:
                self._commits.append((asked, Deadline(asked.timeout_s)))
        elif mine:
            await self._answer(asked)
        return None

    async def finish(self) -> bool:
        """Carry out the commits that were kept; returns whether one was. Raises `WrongState` if none was announced."""
        self._announced = [deadline for deadline in self._announced if deadline.left()]
        if not self._announced:
            raise WrongState("no push was prepared, so there is nothing to finish")
        self._announced.pop(0)
        commits, self._commits = self._commits, []
        # A streamed push commits in all engines at once, or in none.
        ended = await asyncio.gather(
            *[self._answer(asked) for asked, deadline in commits if deadline.left()], return_exceptions=True
        )
        for error in ended:
            if isinstance(error, BaseException):  # a trainer that is gone is no matter of the others
                logger.warning("a commit was not answered: %s", error)
        return 200 in ended

    async def _answer(self, asked: Relayed) -> int:
        async def read(kind: type[msgspec.Struct]) -> msgspec.Struct:
            return answers.decoded(asked.body.encode(), kind)

        if (route := self._routes.get(asked.route)) is None:
            status, body = _refused("UnsupportedOption", f"there is no route {asked.route!r}")
        else:
            status, body = await answers.answer(asked.route, route, lambda: self._front_end, read)
        await _deliver(asked, status, body)
        return status


def _refused(error: str, message: str) -> tuple[int, bytes]:
    return 422, http.to_json(http.ErrorReply(error=error, message=message))


async def _deliver(asked: Relayed, status: int, body: bytes) -> None:
    await asyncio.to_thread(_send, asked, status, body)


def _send(asked: Relayed, status: int, body: bytes) -> None:
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
