"""Actors that hold an engine, as a user of Ray writes them: nothing in them is weightsync's."""

import asyncio
import os
import threading
import time

from tests.in_process import doors
from weightsync.testing import ReferenceInProcess

PROMPT = [1, 2, 3, 4]


class Held:
    """With the reference engine."""

    def __init__(self, folder):
        self.number = 7
        self.engine = ReferenceInProcess(folder)

    def generate(self):
        return self.engine.generate(PROMPT, 8)

    def sleep(self, seconds):
        time.sleep(seconds)

    def pid(self):
        return os.getpid()


class HeldByCoroutines(Held):
    """The same in an actor with coroutines."""

    async def generate(self):
        return await asyncio.to_thread(super().generate)


class CommitsWhenLet(HeldByCoroutines):
    """The same, with commits that wait until they are let go."""

    def __init__(self, folder):
        super().__init__(folder)
        self._asked, self._let = threading.Event(), threading.Event()
        commit = self.engine.front.commit

        async def waits(*arguments):
            self._asked.set()
            await asyncio.to_thread(self._let.wait)
            return await commit(*arguments)

        self.engine.front.commit = waits

    async def asked(self):
        await asyncio.to_thread(self._asked.wait)

    def let(self):
        self._let.set()


class Doors:
    """With an engine of vLLM or SGLang."""

    def __init__(self, door, folder):
        self._door = getattr(doors, door)(folder)
        self.engine = self._door.engine

    def generate(self):
        return self._door.generate(doors.PROMPT, doors.NEW_TOKENS)

    def pid(self):
        return os.getpid()


class DoorsByCoroutines(Doors):
    """The same in an actor with coroutines; its engine lives in the event loop of the door."""

    async def generate(self):
        return await asyncio.to_thread(super().generate)


class Empty:
    """With things of weightsync's that are no engine."""

    def __init__(self):
        from weightsync.deadline import Deadline

        self.deadline = Deadline(1.0)


class Two(Held):
    """With two engines."""

    def __init__(self, folder):
        super().__init__(folder)
        self.other = ReferenceInProcess(folder)
