"""``python -m tests.frameworks.relayed MODEL NEW_MODEL``: the trainer's half before reference engines, by calls alone.

The client here stands for one of a user's: it calls all engines, one after the other.
"""

import asyncio
import json
import sys
import threading

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync.engine.relayed import Relay
from weightsync.errors import WeightSyncError
from weightsync.integrations.vllm import TrainerInitInfo
from weightsync.testing import ReferenceInProcess, attach

KEY = "0123456789abcdef" * 2
PROMPT = list(range(7))


class Engines:
    """A client of several engines."""

    def __init__(self, folders, several_servers=False):
        self._several_servers = several_servers
        self.engines = [ReferenceInProcess(folder) for folder in folders]
        self.relays = [self._relay(engine) for engine in self.engines]
        self.finished = [[] for _ in folders]
        self._barrier = threading.Barrier(len(folders))

    def _relay(self, engine):
        return Relay(attach(engine).front_end, KEY, several_servers=self._several_servers)

    def _each(self, call):
        for number, engine in enumerate(self.engines):
            asyncio.run_coroutine_threadsafe(call(number), engine.loop).result()

    def restart(self, number, folder):
        self.engines[number].close()
        self.engines[number] = ReferenceInProcess(folder)
        self.relays[number] = self._relay(self.engines[number])

    def init_weight_transfer_engine(self, init_info):
        self._each(lambda number: self.relays[number].take(init_info))

    def start_weight_update(self):
        pass

    def update_weights(self, update_info):
        self._each(lambda number: self.relays[number].take(update_info))

    def finish_weight_update(self):
        self._barrier.wait(60)  # any of these calls may make an engine commit

        async def finish(number):
            self.finished[number].append(await self.relays[number].finish())

        self._each(finish)

    def answers(self):
        return [engine.generate(PROMPT, 8) for engine in self.engines]

    def versions(self):
        return [asyncio.run(engine.front.version()) for engine in self.engines]


class Sequence:
    """What is asked here, for one trainer; ``seen`` is what it saw."""

    def __init__(self, folder, trained, engines, several_servers=False, **options):
        self.folder, self.client = folder, Engines([folder] * engines, several_servers)
        self.model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
        self.half = WeightTransferTrainerFactory.trainer_init(
            TrainerInitInfo(rank=0, options={"token": KEY, "timeout_s": 30, **options}),
            client=self.client,
            source=dict(self.model.state_dict()),
        )

    def push(self):
        self.half.send_weights()
        alike = self.client.versions() == [self.half.pushed.version] * len(self.client.engines)
        answers = self.client.answers()
        return {"alike": alike and answers == answers[:1] * len(answers), "answer": answers[0]}


def pushed(folder, trained, engines, staging):
    """Push twice; every engine has to commit for itself alone."""
    seen = Sequence(folder, trained, int(engines), staging=staging, address="localhost")
    before = seen.client.answers()[0]
    pushes = [seen.push() for _ in range(2)]
    committed = [sum(found) for found in seen.client.finished]
    return {"before": before, "pushes": pushes, "committed": committed, "names": sorted(seen.half.pushed.engines)}


def restarted(folder, trained, engines):
    """Push, restart the last engine, and push again."""
    seen = Sequence(folder, trained, int(engines))
    pushes = [seen.push()]
    seen.client.restart(-1, folder)
    pushes.append(seen.push())
    return {"pushes": pushes}


def refused(folder, trained, several_servers, key):
    """Build the trainer's half; what that raises."""
    try:
        Sequence(folder, trained, 1, several_servers == "True", token=key)
    except WeightSyncError as error:
        return [type(error).__name__, str(error)]


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    print(json.dumps({"seen": globals()[program](*arguments)}))
