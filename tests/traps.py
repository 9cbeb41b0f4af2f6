"""Strangers that talk to a sender, and addresses that must not be dialled."""

import os
import socket
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from weightsync.protocol import directories


@contextmanager
def stranger_at(context, address, server_key=""):
    """A socket of this user, or one that knows the server key, connected to a sender that did not request it."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if server_key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = server_key.encode()
        socket.connect(address)
        yield socket


class Traps:
    """Listens at addresses that must not be dialled; `sprung` lists those that were. For a ``with`` block."""

    def __init__(self):
        self._open, self._traps = ExitStack(), {}
        folder = Path(self._open.enter_context(TemporaryDirectory(prefix="wst-")))
        self._listen(("127.0.0.1", 0))
        self._listen(f"\0weightsync-{os.getpid()}/{directories.SOCKET_NAME}")
        for name, mode in (("open", 0o755), ("group", 0o750), ("others", 0o700), ("private", 0o700), ("dead", 0o700)):
            directory = folder / f"weightsync-{name}"
            directory.mkdir()
            directory.chmod(mode)
        self._listen(folder / "weightsync-open" / directories.SOCKET_NAME)
        self._listen(folder / "weightsync-group" / directories.SOCKET_NAME)
        if os.geteuid() == 0:
            self._listen(folder / "weightsync-others" / directories.SOCKET_NAME)
            os.chown(folder / "weightsync-others", 65534, 65534)
        self._listen(folder / "weightsync-private" / "other")
        (folder / "elsewhere").mkdir(mode=0o700)
        self._listen(folder / "elsewhere" / directories.SOCKET_NAME)
        (folder / "weightsync-link").symlink_to(folder / "elsewhere")
        (folder / "weightsync-private" / directories.SOCKET_NAME).symlink_to(
            folder / "elsewhere" / directories.SOCKET_NAME
        )
        inside = ("link", "private", "absent", "dead/../elsewhere", f"dead/../../{folder.name}/elsewhere")
        #: Their addresses in several spellings. Only "dead" may be dialled: a sender's address without a listener.
        self.texts = [
            *self._traps,
            *(f"ipc://{folder}/weightsync-{name}/{directories.SOCKET_NAME}" for name in (*inside, "dead")),
            f"ipc://{folder}/./weightsync-open/{directories.SOCKET_NAME}",
            f"ipc:{folder}/elsewhere/{directories.SOCKET_NAME}",
            f"{folder}/elsewhere/{directories.SOCKET_NAME}",
            f"ipc://{os.path.relpath(folder)}/weightsync-open/{directories.SOCKET_NAME}",
        ]

    def _listen(self, address):
        trap = self._open.enter_context(socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX))
        trap.bind(str(address) if isinstance(address, Path) else address)
        trap.listen(64)
        trap.setblocking(False)
        named = f"ipc://{address}".replace("\0", "@")
        self._traps[named if trap.family == socket.AF_UNIX else f"tcp://127.0.0.1:{trap.getsockname()[1]}"] = trap

    def sprung(self):
        """The addresses that were dialled."""
        return [address for address, trap in self._traps.items() if _was_dialled(trap)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._open.close()


def _was_dialled(trap):
    try:
        trap.accept()[0].close()
    except BlockingIOError:
        return False
    return True
