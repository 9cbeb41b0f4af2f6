"""GRPO with TRL, whose vLLM server gets new weights by weightsync: two lines, and no development mode.

    VLLM_PLUGINS=weightsync vllm serve MODEL --logprobs-mode processed_logprobs
    python examples/trl_grpo.py MODEL http://127.0.0.1:8000 OUTPUT

The trained model is saved in the folder OUTPUT.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from weightsync import Sender
from weightsync.integrations.trl import patch


def digits(completions: list[str], **_: object) -> list[float]:
    """Reward the share of digits."""
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


GPU = torch.cuda.is_available()
folder, url, output = sys.argv[1:]
patch(Sender([url]))
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    digits,
    GRPOConfig(output, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, max_steps=3, logging_steps=1,
               use_cpu=not GPU, bf16=GPU, num_generations=8, max_completion_length=24, learning_rate=3e-3,
               report_to=[], save_strategy="no"),
    Dataset.from_dict({"prompt": [f"count {number}: " for number in range(64)]}),
    processing_class=AutoTokenizer.from_pretrained(folder),
)  # fmt: skip
trainer.train()
trainer.vllm_generation.sync_weights()  # what the last step made
trainer.save_model(output)
