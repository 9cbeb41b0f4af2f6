"""Train a tiny model for a few steps and push each step into a running engine: `make demo`.

Starts a real vLLM or SGLang server on this machine's CPU with a tiny random model, takes real optimiser steps on the
same model in this process, pushes after each, and checks that the engine's greedy log-probabilities are the trainer's.
Exit code 0 only if they are, after every push.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from transformers import PreTrainedModel

from tools import models, servers
from tools.progress import alive
from weightsync import PushResult, Sender

PROMPT = list(b"The weights of a policy change every few seconds, and ")
NEW_TOKENS = 16
#: Largest mean difference between log-probabilities (natural log) that counts as equal. Engine and trainer round
#: bfloat16 in different orders, which makes about 0.03; the weights of the previous step differ by much more.
TOLERANCE = 0.1


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weightsync-demo-") as folder:
        path = models.make_model(folder, "qwen3")
        with alive(f"starting {args.engine} on the CPU with a tiny Qwen3 (half a minute)"):
            server = servers.start(args.engine, path)
        with server:
            return train(server, models.load_reference(path), args.steps)


def train(server: servers.Server, model: PreTrainedModel, steps: int) -> int:
    """Take optimiser steps and push after each; return 0 if every check held."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    held = []
    print(f"{server.engine} serves at {server.url}; before the first push: {gap(server, model):.4f} from the trainer")
    with Sender([server.url]) as sender:
        for step in range(1, steps + 1):
            loss = optimise(model, optimizer, step)
            before = gap(server, model)
            result = sender.push(model)
            after = gap(server, model)
            held.append(after <= TOLERANCE < before)
            print(line(result, loss, before, after, held[-1]), flush=True)
    print("every push was served as trained" if all(held) else "FAILED: the engine does not serve what was trained")
    return 0 if all(held) else 1


def optimise(model: PreTrainedModel, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """Take one real step of next-token training on random bytes; return the loss."""
    tokens = torch.randint(0, models.BYTES, (4, 64), generator=torch.Generator().manual_seed(seed))
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def gap(server: servers.Server, model: PreTrainedModel) -> float:
    """Mean difference between the engine's greedy log-probabilities and the trainer's for the same tokens."""
    tokens, logprobs = servers.greedy(server, PROMPT, NEW_TOKENS)
    own = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
    return sum(abs(a - b) for a, b in zip(logprobs, own, strict=True)) / NEW_TOKENS


def line(result: PushResult, loss: float, before: float, after: float, held: bool) -> str:
    """One line that says what a push did."""
    phases = "  ".join(f"{phase} {1000 * seconds:.0f} ms" for phase, seconds in result.seconds.items())
    pause = max(engine.pause_s for engine in result.engines.values())
    verdict = "logprobs equal the trainer's" if held else "LOGPROBS DIFFER"
    return (
        f"version {result.version}  loss {loss:.2f}  {result.nbytes / 1e6:.2f} MB  {phases}  "
        f"pause {1000 * pause:.0f} ms  {verdict} (off by {before:.3f} before, {after:.3f} after)"
    )


if __name__ == "__main__":
    sys.exit(main())
