"""``python -m tests.frameworks.training PROGRAM MODEL URL OUTPUT [SENDER_URL]``: a few steps, then the model is saved.

Programs that differ from the examples in one thing each.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from weightsync import Sender
from weightsync.integrations import trl


def digits(completions, **_):
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


PROMPTS = Dataset.from_dict({"prompt": [f"count {number}: " for number in range(64)]})


def common(url, output, **more):
    """Arguments of the config of a trainer that generates at ``url``."""
    return {
        "output_dir": output,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        **more,
    }


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train(folder, url, output, engines, kind, config, model=None, **more):
    trl.patch(Sender(engines))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = config(**common(url, output, num_generations=4, max_completion_length=16, **more))
    trainer = kind(model or load(folder), digits, args, PROMPTS, processing_class=tokenizer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    return trainer


def grpo(folder, url, output, engines, **more):
    train(folder, url, output, engines, GRPOTrainer, GRPOConfig, **more).save_model(output)


def rloo(folder, url, output, engines):
    train(folder, url, output, engines, RLOOTrainer, RLOOConfig).save_model(output)


def fsdp2(*where):
    grpo(*where, fsdp="full_shard", fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"})


def peft(folder, url, output, engines):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(folder), LoraConfig(target_modules="all-linear", lora_alpha=64))
    trained = train(folder, url, output, engines, GRPOTrainer, GRPOConfig, model)
    trained.accelerator.unwrap_model(trained.model).merge_and_unload().save_pretrained(output)


def online_dpo(folder, url, output, engines):
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    found = torch.accelerator.current_accelerator
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")  # of which TRL does not think
    trl.patch(Sender(engines))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    args = OnlineDPOConfig(**common(url, output, max_new_tokens=16, learning_rate=3e-3))
    trainer = OnlineDPOTrainer(load(folder), None, digits, args, train_dataset=PROMPTS, processing_class=tokenizer)
    torch.accelerator.current_accelerator = found
    trainer.train()
    trainer._move_model_to_vllm()
    trainer.save_model(output)


def async_grpo(folder, url, output, engines):
    """Without a step, for which TRL needs a GPU, as it does to count that GPU's operations."""
    torch.cuda.get_device_name = lambda *_: "none"
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    transfer = trl.WeightTransfer(Sender(engines))
    args = AsyncGRPOConfig(output, vllm_server_base_url=url, report_to=[], use_cpu=True, bf16=False, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = AsyncGRPOTrainer(folder, digits, args, PROMPTS, processing_class=tokenizer, weight_transfer=transfer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    trainer.weight_transfer.init_weight_transfer()
    trainer._sync_weight()
    trainer.weight_transfer.destroy()
    assert transfer.pushed.read == "copied"
    trainer.save_model(output)


PROGRAMS = {
    "one process": grpo,
    "DDP": grpo,
    "FSDP2": fsdp2,
    "RLOO": rloo,
    "PEFT": peft,
    "online DPO": online_dpo,
    "AsyncGRPO": async_grpo,
}

if __name__ == "__main__":
    program, folder, url, output, *engines = sys.argv[1:]
    PROGRAMS[program](folder, url, output, engines or [url])
