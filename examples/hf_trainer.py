"""Train a tiny GPT-2 with the Trainer of Hugging Face, sharded by zfun. Nothing is downloaded.

    python examples/hf_trainer.py                          # one process
    torchrun --nproc-per-node 2 examples/hf_trainer.py     # two processes, on GPUs if there are two

The text is the source of Python's standard library, and a byte is a token. The script differs from
one for ``transformers.Trainer`` in two places: the import of ``Trainer``, and ``zero=3``.
Checkpoints go to the folder ``hf-trainer``, or to the folder that the command line names.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from text import stdlib_bytes
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from zfun.interop.transformers import Trainer

LENGTH, NUM_ROWS = 64, 512


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=2 * LENGTH, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


def make_rows() -> list[dict[str, Tensor]]:
    tokens = stdlib_bytes(limit=NUM_ROWS * LENGTH).long().view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder: str, steps: int = 30, zero: Any = 3) -> Trainer:
    rows = make_rows()
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=15,
        save_steps=15,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        make_model(), arguments, train_dataset=rows[:-32], eval_dataset=rows[-32:], zero=zero
    )
    trainer.train()
    return trainer


def main() -> None:
    trainer = train(sys.argv[1] if len(sys.argv) > 1 else "hf-trainer")
    prompt = torch.tensor([list(b"def ")], device=trainer.args.device)
    tokens = trainer.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    if trainer.is_world_process_zero():
        print(bytes(tokens[0].tolist()).decode(errors="replace"))
    trainer.save_model()  # model.safetensors and config.json, which plain transformers loads


if __name__ == "__main__":
    main()
