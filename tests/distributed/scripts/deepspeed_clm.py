"""A script for accelerate that trains a causal language model, saves, and goes on from there."""

import argparse
import json
import math
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

transformers.logging.set_verbosity_error()


def parse_args():
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--block_size", type=int, default=8)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=1)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def blocks_of(seed, count, length):
    """Return blocks of tokens."""
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randint(3, 64, (count, length), generator=draw))


def together(rows):
    """Make a batch, whose labels are its tokens."""
    ids = torch.stack([ids for (ids,) in rows])
    return {"input_ids": ids, "labels": ids}


def groups_of(model, decay):
    """Return the parameters, without weight decay of biases and norms."""
    is_plain = lambda name: "bias" in name or "norm" in name
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not is_plain(n)], "weight_decay": decay},
        {"params": [p for n, p in named if is_plain(n)], "weight_decay": 0.0},
    ]


def evaluate(model, loader, accelerator, count):
    """Return the perplexity."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    return math.exp(torch.cat(losses)[:count].mean().item())


def main():
    """Train."""
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    train, held_out = blocks_of(0, 32, args.block_size), blocks_of(1, 7, args.block_size)
    loader = DataLoader(
        train, shuffle=True, collate_fn=together, batch_size=args.per_device_train_batch_size
    )
    check = DataLoader(held_out, collate_fn=together, batch_size=args.per_device_eval_batch_size)
    optimizer = torch.optim.AdamW(groups_of(model, args.weight_decay), lr=args.learning_rate)
    updates = math.ceil(len(loader) / args.gradient_accumulation_steps)
    scheduler = transformers.get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.num_train_epochs * updates,
    )
    model, optimizer, loader, check, scheduler = accelerator.prepare(
        model, optimizer, loader, check, scheduler
    )
    first, rows, perplexities = args.output_dir / "first", [], []

    def epoch():
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            rows.append([mean, *scheduler.get_last_lr()])
        perplexities.append(evaluate(model, check, accelerator, len(held_out)))

    for number in range(args.num_train_epochs):
        epoch()
        if number == 0:
            accelerator.save_state(str(first))
    # The second epoch again, from the checkpoint of the first.
    accelerator.load_state(str(first))
    epoch()
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        found = {"rows": rows, "perplexities": perplexities, "ranks": accelerator.num_processes}
        (args.output_dir / "log.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
