"""The connection of a client to an engine in this process: as `http_client.Server`, without HTTP."""

from __future__ import annotations

from weightsync.deadline import Deadline
from weightsync.protocol.http import PREFIX
from weightsync.protocol.in_process import AskedByCalls, NotRunning
from weightsync.trainer.http_client import Late, NoAnswer, Reply


class Local:
    """The admin routes of ``engine``."""

    def __init__(self, engine: AskedByCalls):
        self._engine = engine

    def ask(self, method: str, path: str, body: bytes, deadline: Deadline, *, limit: int) -> Reply:
        """See `http_client.Server.ask`; nothing here is larger than the caller's memory, so ``limit`` is not used."""
        if not (left_s := deadline.left()):
            raise Late(connected=False)
        try:
            return Reply(*self._engine.ask(path.removeprefix(f"{PREFIX}/"), body, left_s))
        except TimeoutError as error:
            raise Late(connected=True, why=str(error)) from error
        except NotRunning as error:
            raise NoAnswer(str(error)) from error

    def close(self) -> None:
        """Do nothing: requests of other threads end by their own deadlines."""
