"""One HTTP request and its reply, within one deadline.

The timeout of an HTTP client applies to each socket operation, so a server that sends one byte now and then never
exceeds it. Here every socket operation gets what is left of the caller's deadline, in the caller's own thread. Name
resolution takes no timeout: it runs in a thread, one for each `Server` at a time, which ends by the resolver's own
limits if the caller has given up.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from weightsync import observe
from weightsync.deadline import Deadline
from weightsync.errors import UnsupportedOption

#: Seconds for connecting to a server, all of its addresses together.
_CONNECT_S: Final = 5.0
_CHUNK_BYTES: Final = 1 << 20
_PORTS: Final = {"http": 80, "https": 443}
#: Environment variables that name a private authority's certificates: OpenSSL's, and that of Python's HTTP clients.
CA_FILE: Final = "SSL_CERT_FILE"
_CA_BUNDLE: Final = "REQUESTS_CA_BUNDLE"


class NoAnswer(Exception):
    """No reply arrived; the text says why."""


class Late(NoAnswer):
    """The deadline passed; ``connected`` is whether the server had accepted the connection.

    ``why`` is what it was busy with, if that is known.
    """

    def __init__(self, connected: bool, why: str = ""):
        super().__init__("it did not answer in time" if connected else "it did not accept a connection in time")
        self.connected, self.why = connected, why


class Untrusted(NoAnswer):
    """This host does not trust the server's certificate."""


class Reply(NamedTuple):
    """``status`` is the HTTP status code, ``body`` the whole body."""

    status: int
    body: bytes


class Server:
    """The HTTP server at a base URL in the form of `names.plain_url`. ``headers`` go with every request. Thread-safe.

    Proxies from the environment are ignored, as they are meant for outside servers. Redirects are not followed, as one
    would show the key to another server. Each request has its own connection: servers close idle connections, and a
    commit must not be sent on one that is being closed. Raises `UnsupportedOption` if a certificate file cannot be
    read.
    """

    def __init__(self, url: str, headers: Mapping[str, str]):
        split = urlsplit(url)
        self._host, self._path = split.hostname or "", split.path
        self._port = split.port or _PORTS[split.scheme]
        self._headers = {**headers, "Host": split.netloc, "Connection": "close"}
        self._tls = _trust() if split.scheme == "https" else None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._looked_up: Future[list[Any]] | None = None

    def ask(self, method: str, path: str, body: bytes, deadline: Deadline, *, limit: int) -> Reply:
        """Send a request and return its reply. Raises `NoAnswer`, also for a body of more than ``limit`` bytes."""
        connection: socket.socket | None = None
        try:
            connection = self._connect(deadline)
            with self._lock:
                self._open.add(connection)
            return self._asked(connection, method, path, body, deadline, limit)
        except (TimeoutError, FutureTimeout) as error:  # one class from Python 3.11 on
            raise Late(connection is not None) from error
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(error.verify_message) from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(_reason(error)) from error
        finally:
            if connection is not None:
                with self._lock:
                    self._open.discard(connection)
                connection.close()

    def _asked(
        self, connection: socket.socket, method: str, path: str, body: bytes, deadline: Deadline, limit: int
    ) -> Reply:
        if self._tls is not None:
            connection.settimeout(_left(deadline))
            # A duplicate, since wrap_socket detaches the socket that it is given, and `close` must still reach it.
            connection = self._tls.wrap_socket(connection.dup(), server_hostname=self._host)
        with connection:
            client = http.client.HTTPConnection(self._host, self._port)
            client.sock = _Wire(connection, deadline)  # has the methods that http.client uses
            client.request(method, self._path + path, body, {**self._headers, **observe.trace_headers()})
            with client.getresponse() as response:
                read = response.read(limit + 1)
                if len(read) > limit:
                    raise http.client.HTTPException(f"its reply is larger than {limit} bytes")
                if response.length:
                    raise http.client.HTTPException("its reply broke off")
                return Reply(response.status, read)

    def _connect(self, deadline: Deadline) -> socket.socket:
        until = Deadline(min(_CONNECT_S, deadline.left()))
        addresses = self._addresses(until)
        for number, (family, kind, protocol, _, address) in enumerate(addresses):
            connection = socket.socket(family, kind, protocol)
            remaining = len(addresses) - number
            try:
                connection.settimeout(_left(until) / remaining)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.connect(address)
                return connection
            except OSError:
                connection.close()
                if remaining == 1:
                    raise
        raise OSError("its host name has no address")

    def _addresses(self, deadline: Deadline) -> list[Any]:
        where = self._host, self._port, socket.AF_UNSPEC, socket.SOCK_STREAM
        with suppress(socket.gaierror):
            return socket.getaddrinfo(*where, flags=socket.AI_NUMERICHOST)
        with self._lock:
            if self._looked_up is None or self._looked_up.done():
                self._looked_up = Future()
                threading.Thread(
                    target=_look_up, args=(self._looked_up, *where), name="weightsync-name", daemon=True
                ).start()
            found = self._looked_up
        return found.result(_left(deadline))

    def close(self) -> None:
        """Shut down the connections of requests in other threads, which then raise `NoAnswer`."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Wire(io.RawIOBase):
    """A socket as `http.client` uses one; every operation gets what is left of one deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline):
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self._deadline))
        return self._connection.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._connection.settimeout(_left(self._deadline))
            rest = rest[self._connection.send(rest[:_CHUNK_BYTES]) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None:
        """Do nothing: `http.client` closes before the body is read, and `Server` closes the connection."""


def _left(deadline: Deadline) -> float:
    if not (left_s := deadline.left()):
        raise TimeoutError
    return left_s


def _look_up(found: Future[list[Any]], *where: Any) -> None:
    try:
        found.set_result(socket.getaddrinfo(*where))
    except Exception as error:
        found.set_exception(error)


def _trust() -> ssl.SSLContext:
    """The authorities to trust: the system's, or those in `CA_FILE`, and in addition those in `_CA_BUNDLE`."""
    context = ssl.create_default_context()
    if named := os.environ.get(_CA_BUNDLE, ""):
        try:
            if os.path.isdir(named):
                context.load_verify_locations(capath=named)
            else:
                context.load_verify_locations(cafile=named)
        except OSError as error:  # includes ssl.SSLError
            raise UnsupportedOption(f"{_CA_BUNDLE} is {named!r}, which holds no certificates: {error}") from error
    return context


def _reason(error: BaseException) -> str:
    """The cause, for an error message."""
    if isinstance(error, ssl.SSLError):
        return f"it does not speak TLS, which https:// requires ({error.reason})"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return "it does not speak HTTP"
    if isinstance(error, http.client.IncompleteRead):
        return "its reply broke off"
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
