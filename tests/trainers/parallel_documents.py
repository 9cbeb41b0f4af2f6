"""``torchrun -m tests.trainers.parallel_documents MODEL URL HEADING...``: as `documents` does, for Megatron-Core."""

import functools
import json
import sys
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.trainers import parallel
from tests.trainers.documents import batches, run


def main():
    folder, url, *headings = sys.argv[1:]
    dist.init_process_group("gloo")
    alone = dist.new_group([0])
    theirs, checkpoint = AutoConfig.from_pretrained(folder), load_file(Path(folder) / "model.safetensors")
    for heading in headings:
        seen = []
        if dist.get_rank() == 0:
            _, was = parallel.compared(url, checkpoint, alone)
            seen.append((was, was))
        dist.barrier()
        names = run(
            heading,
            url,
            model_provider=functools.partial(parallel.loaded, theirs, checkpoint),
            vocab_size=theirs.vocab_size,
            train_step=lambda model, _: parallel.step(model),
            batches=batches(),
        )
        state = parallel.Split(names["model"], theirs).gathered(checkpoint)
        if dist.get_rank() == 0:
            seen.append(parallel.compared(url, state, alone))
            print(json.dumps({heading: seen}), flush=True)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
