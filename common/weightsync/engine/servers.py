"""Several servers of one engine: one of them has its front end, and answers what the others were asked.

They meet at a Unix socket in this user's private directory, so whoever can connect may ask. A connection carries one
message: the name of a route, the headers of its trace as JSON, each with a newline, and its body; then the HTTP status
in two bytes, and the body of the reply.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path
from typing import Final

import msgspec

from weightsync import observe
from weightsync.deadline import Deadline
from weightsync.engine import answers
from weightsync.engine.front_end import FrontEnd
from weightsync.errors import EngineUnreachable, PushTimeout
from weightsync.memory.processes import ENDED, process_state, started
from weightsync.protocol import codec, directories, http

#: A request of the servers themselves: why the engine must not generate.
_STOPPED: Final = "stopped"
#: Seconds between two attempts to reach the server that has the front end, which may start later.
_AGAIN_S: Final = 0.1
#: Seconds around a message's own timeout: before it a server that is stopped is named, after it one that is late.
_REPLY_S: Final = 0.3
#: More bytes than a label has.
_LABEL_BYTES: Final = 1 << 16
#: What the kernel says of the process at the other end: its number, user and group.
_CREDENTIALS: Final = struct.Struct("3i")
_OTHER: Final = "the process that has this engine's front end"


def meeting_point(parent: int) -> Path:
    """The socket of all servers of the engine that the process numbered ``parent`` has started."""
    name = f"{directories.PREFIX}{parent}-{started(parent):016x}"
    return directories.directory() / name / directories.SOCKET_NAME


class Label:
    """The label of the weights that an engine serves, for servers that cannot ask for it each time.

    It is in a file beside the socket at ``path``, so that it is the same everywhere at any moment, also in a server
    that was frozen or started again.
    """

    def __init__(self, path: Path):
        self._path = path.with_name(directories.LABEL_NAME)

    def read(self) -> str:
        """The label; empty if none was set since the engine was started."""
        # By calls of the system: a server may read it for every token.
        try:
            file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return ""
        try:
            return os.read(file, _LABEL_BYTES).decode()
        finally:
            os.close(file)

    def write(self, label: str) -> None:
        """Set the label, at once for all."""
        written = self._path.with_suffix(f".{os.getpid()}")
        written.write_text(label, encoding="utf-8")
        written.replace(self._path)


async def answer_others(front_end: FrontEnd, path: Path) -> asyncio.Server:
    """Answer the engine's other servers at ``path``, until the returned server is closed."""
    routes = answers.routes()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name = (await reader.readline()).decode().strip()
            if name not in (_STOPPED, *routes):  # it has ended, or only looked whether this server listens
                return
            headers = codec.from_json(await reader.readline(), dict[str, str])
            body = await reader.read()
            with observe.joined(headers):
                status, reply = await _answer(name, body)
            writer.write(status.to_bytes(2, "big") + reply)
            await writer.drain()
        except (OSError, msgspec.MsgspecError):
            pass  # the other server has ended, maybe in the middle of a message
        finally:
            writer.close()

    async def _answer(name: str, body: bytes) -> tuple[int, bytes]:
        async def read(kind: type[msgspec.Struct]) -> msgspec.Struct:
            return answers.decoded(body, kind)

        if name == _STOPPED:
            return 200, front_end.stopped.encode()
        return await answers.answer(name, routes[name], lambda: front_end, read)

    directories.private(path.parent)
    path.unlink(missing_ok=True)
    return await asyncio.start_unix_server(answer, path)


class Elsewhere:
    """The front end of an engine, in another of its servers, which listens at ``path``."""

    def __init__(self, path: Path):
        self._path = path

    async def pass_on(self, route: str, asked: msgspec.Struct) -> tuple[int, bytes]:
        """What the other server answers to a message. Raises `EngineUnreachable`, `PushTimeout`."""
        timeout_s = getattr(asked, "timeout_s", None) or http.LOOK_S
        return await self._ask(route, http.to_json(asked), timeout_s)

    async def stopped(self) -> str:
        """Why the engine must not generate; empty if it may."""
        try:
            return (await self._ask(_STOPPED, b"", http.LOOK_S))[1].decode()
        except (EngineUnreachable, PushTimeout) as error:
            return str(error)

    async def _ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        deadline = Deadline(timeout_s)
        reader, writer = await self._connect(deadline)
        pid = _pid(writer.get_extra_info("socket"))
        asked = asyncio.ensure_future(_exchange(reader, writer, route, body))
        try:
            await asyncio.wait({asked}, timeout=max(deadline.left() - _REPLY_S, 0.0))
            if not asked.done() and not process_state(pid):  # it will say itself what it waits for
                await asyncio.wait({asked}, timeout=deadline.left() + _REPLY_S)
            if not asked.done():
                state = process_state(pid) or f"did not answer {route} within {timeout_s:.1f} s"
                raise PushTimeout(f"{_OTHER} (process {pid}) {state}", weights="unknown")
            reply = asked.result()
        finally:
            asked.cancel()
            writer.close()
        if not reply:
            raise EngineUnreachable(f"{_OTHER} (process {pid}) {ENDED}", weights="unknown")
        return int.from_bytes(reply[:2], "big"), reply[2:]

    async def _connect(self, deadline: Deadline) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        starts = Deadline(min(deadline.left(), http.LOOK_S))
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except FileNotFoundError as error:
                if not starts.left():
                    raise EngineUnreachable(f"{_OTHER} has not started yet") from error
                await asyncio.sleep(min(_AGAIN_S, starts.left()))
            except OSError as error:
                raise EngineUnreachable(f"{_OTHER} {ENDED}", weights="unknown") from error


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: str, body: bytes) -> bytes:
    try:
        writer.write(b"\n".join([route.encode(), msgspec.json.encode(observe.trace_headers()), body]))
        writer.write_eof()
        return await reader.read()
    except OSError:
        return b""  # it has ended


def _pid(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])
