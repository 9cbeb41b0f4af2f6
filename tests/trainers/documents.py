"""``torchrun -m tests.trainers.documents MODEL URL HEADING...``: run blocks of docs/trainers.md as they stand there.

Rank 0 prints for each, as JSON by its heading, the digests of what is served and of what the framework itself says that
the model's state is, before and after.
"""

import functools
import json
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.documents import TRAINERS, shown
from tests.trainers.trainer import Adapted, DeepSpeed, Fsdp1, Trained, compared, load
from weightsync import Sender

URL = "http://127.0.0.1:8000"
#: What reads the state of the model that a block leaves.
KINDS = {"FSDP2": Trained, "FSDP1": Fsdp1, "DistributedDataParallel": Trained, "torch.compile": Trained}
NEED_PACKAGES = {"DeepSpeed ZeRO-2": DeepSpeed, "DeepSpeed ZeRO-3": DeepSpeed, "accelerate": Trained, "PEFT": Adapted}


def run(heading, url, **names):
    """Run the block below a heading; returns the names that it leaves."""
    exec(compile(shown(TRAINERS)[heading].replace(URL, url), heading, "exec"), names)
    return names


def batches():
    """A few batches of one row; each rank has others."""
    rows = [torch.arange(8) + 10 * number + dist.get_rank() for number in range(4)]
    return DataLoader([{"input_ids": row, "labels": row} for row in rows])


def main():
    folder, url, *headings = sys.argv[1:]
    dist.init_process_group("gloo")
    # The default back end takes a minute. No back end changes parameters, or their names.
    torch.compile = functools.partial(torch.compile, backend="eager")
    for heading in headings:
        model = load(folder)
        order = list(model.state_dict())
        with Sender([url]) as sender:
            sender.push(model)
            seen = [compared(sender, Trained(model, model), order)]
        names = run(heading, url, model=model, batches=batches())
        trained = (KINDS | NEED_PACKAGES)[heading](names.get("engine", names["model"]), model)
        with Sender([url]) as sender:
            seen.append(compared(sender, trained, order))
        if dist.get_rank() == 0:
            print(json.dumps({heading: seen}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
