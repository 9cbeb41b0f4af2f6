"""The trainer of `make grpo`: GRPO with TRL. For every step a line of JSON says what was sampled, and by which weights.

    python benchmarks/grpo_trainer.py MODEL URL vllm|sglang weightsync|stale|reload STEPS SEED OUTPUT

The task is to write the letter of the prompt, again and again; the reward is the share of letters that are right.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.from_disk import load_saved
from benchmarks.grpo_task import LENGTH, LETTERS, prompt_of, share
from weightsync import PushResult, Sender
from weightsync.integrations.trl import patch

GENERATIONS, PROMPTS = 8, 8
TIMEOUT_S = 120.0

folder, url, engine, how, steps, seed, output = sys.argv[1:]


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of letters that are the prompt's."""
    found = [share(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
    run.rewards.append(sum(found) / len(found))
    return found


class Noting(Sender):
    """A sender that remembers its last push."""

    pushed: PushResult | None = None
    seconds = 0.0

    def push(self, *args: Any, **options: Any) -> PushResult:
        """See `Sender.push`."""
        start = time.perf_counter()
        self.pushed = super().push(*args, **options)
        self.seconds = time.perf_counter() - start
        return self.pushed


class Run:
    """What the engine samples with, and how it gets the weights of the last step."""

    def __init__(self) -> None:
        self.sender = Noting([url])
        self.rewards: list[float] = []
        self.versions: set[str] = set()
        self.synchronised, self.seconds = -1, 0.0
        self.threads = ThreadPoolExecutor(PROMPTS)

    def synchronise(self, model: PreTrainedModel) -> None:
        """Bring the trainer's weights into the engine, as ``how`` says."""
        start = time.perf_counter()
        if how == "weightsync":
            self.sender.push(model)
        elif how == "reload":
            saved = Path(output) / "saved"
            model.save_pretrained(saved)
            load_saved(engine, url, saved, TIMEOUT_S)
        self.seconds = time.perf_counter() - start

    def roll_out(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Sample a completion for every prompt; equal prompts follow each other."""
        if self.synchronised != trainer.state.global_step and not trainer.use_vllm:
            self.synchronise(trainer.model)
            self.synchronised = trainer.state.global_step
        tokenizer = trainer.processing_class
        asked = [tokenizer(prompt)["input_ids"] for prompt in prompts[::GENERATIONS]]
        answers = [answer for found in self.threads.map(SAMPLE[engine], asked) for answer in found]
        self.versions = {version for answer in answers for version in answer["versions"]}
        return {
            "prompt_ids": [ids for ids in asked for _ in range(GENERATIONS)],
            "completion_ids": [answer["ids"] for answer in answers],
            "logprobs": [answer["logprobs"] for answer in answers],
        }


class Tell(TrainerCallback):  # type: ignore[misc]
    """Prints a line for every step."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print what the step sampled."""
        told = {
            "step": state.global_step,
            "reward": run.rewards[-1],
            "seconds": time.perf_counter() - self.start,
            "synchronise": run.sender.seconds if how == "weightsync" else run.seconds,
            "pushed": run.sender.pushed.version if run.sender.pushed else "",
            "sampled": sorted(run.versions),
        }
        print(json.dumps(told), flush=True)


def vllm(ids: list[int]) -> list[dict[str, Any]]:
    """Sample completions of one prompt with vLLM, which says which weights have sampled each token."""
    sampling = {"n": GENERATIONS, "max_tokens": LENGTH, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": ids, "sampling_params": sampling}
    reply = requests.post(f"{url}/inference/v1/generate", json=body, timeout=TIMEOUT_S)
    reply.raise_for_status()
    return [
        {
            "ids": choice["token_ids"],
            "logprobs": [token["logprob"] for token in choice["logprobs"]["content"]],
            "versions": _covering(choice["weight_versions"]),
        }
        for choice in reply.json()["choices"]
    ]


def sglang(ids: list[int]) -> list[dict[str, Any]]:
    """`vllm` with SGLang."""
    sampling = {"n": GENERATIONS, "max_new_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    reply = requests.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
    reply.raise_for_status()
    return [
        {
            "ids": choice["output_ids"],
            "logprobs": [logprob for logprob, *_ in choice["meta_info"]["output_token_logprobs"]],
            "versions": _covering(choice["meta_info"]["weight_versions"]),
        }
        for choice in reply.json()
    ]


def _covering(spans: list[dict[str, Any]]) -> list[str]:
    if [span["start"] for span in spans] + [LENGTH] != [0] + [span["end"] for span in spans]:
        raise RuntimeError(f"the engine does not say which weights have sampled each of {LENGTH} tokens: {spans}")
    return [span["version"] for span in spans]


SAMPLE = {"vllm": vllm, "sglang": sglang}


run = Run()
# The two lines of weightsync: a sender, and this one.
patch(run.sender)
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    reward,
    GRPOConfig(
        output,
        use_vllm=engine == "vllm",
        vllm_mode="server",
        vllm_server_base_url=url,
        max_steps=int(steps),
        per_device_train_batch_size=GENERATIONS * PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=LENGTH,
        learning_rate=1e-3,
        beta=0.0,
        lr_scheduler_type="constant",
        seed=int(seed),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    ),
    Dataset.from_dict({"prompt": [prompt_of(letter) for letter in LETTERS * 64]}),
    processing_class=AutoTokenizer.from_pretrained(folder),
    rollout_func=run.roll_out,
    callbacks=[Tell()],
)
if engine == "sglang":
    run.sender.push(trainer.model)
elif how != "weightsync":
    trainer.vllm_generation.sync_weights = lambda: run.synchronise(trainer.model)
trainer.train()
