"""The HTTP server of a `Sender` that listens: with the key, a program that starts an engine asks it to add the engine.

It answers in a thread, between two pushes, without any action of the trainer's program.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import msgspec

from weightsync.errors import UnsupportedOption, WeightSyncError
from weightsync.protocol import auth, http

logger = logging.getLogger(__name__)

ROUTE: Final = "add_engine"
#: More than a request with one URL takes.
_MAX_BODY_BYTES: Final = 64 << 10
#: Seconds after which a connection that sends nothing is closed.
_SILENCE_S: Final = 10.0


class JoinServer:
    """Listens at ``host`` and ``port`` (0: any free port). ``has_key`` checks the key that a caller shows.

    ``add_engine`` adds the engine at a URL and returns the version that it then serves, or raises `WeightSyncError`.
    Building a server raises `UnsupportedOption` if it cannot listen.
    """

    def __init__(self, host: str, port: int, has_key: Callable[[str], bool], add_engine: Callable[[str], str]):
        try:
            self._server = _Server((host, port), partial(_Handler, has_key, add_engine))
        except OSError as error:
            raise UnsupportedOption(f"cannot listen at {host} port {port}: {error}") from error
        self._server.daemon_threads = True
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="weightsync-join", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], handler: Callable[..., Any]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # The base class also resolves the name of this host, which may take as long as the resolver likes.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    timeout = _SILENCE_S

    def __init__(self, has_key: Callable[[str], bool], add_engine: Callable[[str], str], *connection: Any):
        self._has_key, self._add_engine = has_key, add_engine
        super().__init__(*connection)  # also handles the request

    def do_POST(self) -> None:
        status, reply = self._answer()
        body = http.to_json(reply)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> tuple[int, msgspec.Struct]:
        if not self._has_key(auth.shown_key(self.headers.get("Authorization", ""))):
            return 401, http.ErrorReply(error="AuthenticationFailed", message="unauthorized")
        if self.path != f"{http.PREFIX}/{ROUTE}":
            return 404, http.ErrorReply(error="UnsupportedOption", message="there is no such route")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
            return 413, http.ErrorReply(error="UnsupportedOption", message=f"at most {_MAX_BODY_BYTES} bytes")
        try:
            request = http.from_json(self.rfile.read(int(length)), http.AddEngine)
        except msgspec.MsgspecError as error:
            return 400, http.ErrorReply(error="UnsupportedOption", message=f"not an engine: {error}")
        try:
            return 200, http.EngineAdded(version=self._add_engine(request.url))
        except WeightSyncError as error:
            return 409, http.error_reply(error)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
