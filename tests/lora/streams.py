"""Requests in flight."""

import threading

from tests.engines.conftest import PROMPT
from tools import servers

#: Tokens of a request that is in flight during a push.
STREAMED = 600


class Stream:
    """A request in flight: a thread reads its tokens."""

    def __init__(self, server, n=STREAMED):
        self.tokens, self.failed, self._begun = [], None, threading.Semaphore(0)
        self._thread = threading.Thread(target=self._read, args=(server, n), daemon=True)
        self._thread.start()
        assert all(self._begun.acquire(timeout=60) for _ in range(8))

    def _read(self, server, n):
        try:
            for token, _ in servers.stream(server, PROMPT, n):
                self.tokens.append(token)
                self._begun.release()
        except Exception as error:
            self.failed = error

    def end(self):
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self.tokens
