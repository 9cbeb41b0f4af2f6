"""Fine-tuning with Hugging Face's Trainer, which pushes its model into a running engine every two steps: one line.

    python examples/hf_trainer.py MODEL http://127.0.0.1:8000 OUTPUT
    torchrun --nproc-per-node 2 examples/hf_trainer.py MODEL http://127.0.0.1:8000 OUTPUT

The trained model is saved in the folder OUTPUT.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from weightsync.integrations.huggingface import PushCallback

folder, url, output = sys.argv[1:]
tokens = torch.randint(0, 256, (64, 32), generator=torch.Generator().manual_seed(0))
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    TrainingArguments(
        output,
        use_cpu=not torch.cuda.is_available(),
        max_steps=5,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[PushCallback([url], steps=2)],
)
trainer.train()
trainer.save_model(output)
