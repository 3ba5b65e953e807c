"""Programs with ``transformers.Trainer``, plain and over zfun, on any number of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import zfun as zf
from zfun.interop.transformers import Trainer

VOCAB, LENGTH = 61, 16
BATCH, ACCUMULATED, STEPS = 4, 3, 20

transformers.logging.set_verbosity_error()


def model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=32, **drop
        )
    )


def rows(count: int = 200, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return sequences of which different numbers of tokens are trained."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, 10, (1,), generator=generator))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(folder: str, **options: Any) -> Any:
    usual: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 5,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return transformers.TrainingArguments(folder, **{**usual, **options})


def make(cls: Any, folder: str, *, options: Any = None, dropout: float = 0.0, **given: Any) -> Any:
    """Return a trainer; ``options`` are of TrainingArguments."""
    net = given.pop("model", None) or model(dropout)
    usual = {"train_dataset": rows(), "eval_dataset": rows(16, seed=2)}
    trainer = cls(net, arguments(folder, **(options or {})), **{**usual, **given})
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def history(trainer: Any) -> list[tuple[float, float, float]]:
    """Return loss, learning rate and gradient norm of each step."""
    names = ("loss", "learning_rate", "grad_norm")
    return [tuple(row[x] for x in names) for row in trainer.state.log_history if "loss" in row]


def plain(**options: Any) -> tuple[list[tuple[float, float, float]], dict[str, Tensor]]:
    """Train with plain transformers in one process; return history and parameters."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(transformers.Trainer, folder, options=options)
        trainer.train()
        return history(trainer), whole(trainer.model)


def whole(net: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def offload() -> zf.stores.Offload:
    host = zf.stores.host()
    return zf.stores.Offload(params=host, grads=host, optimizer=host)


def zero_of(name: str, group: zf.Group) -> dict[str, Any]:
    """Return ``zero=`` of a stage, or of stage 3 with offload."""
    if name == "offload":
        return {"stage": 3, "group": group, "offload": offload()}
    return {"stage": int(name), "group": group}


def every_stage(group: zf.Group, names: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Train with each kind of sharding; return history and parameters by name."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            per_rank = {"per_device_train_batch_size": BATCH // group.size, **options}
            trainer = make(Trainer, folder, options=per_rank, zero=zero_of(name, group))
            trainer.train()
            found[name] = history(trainer), whole(trainer.gather_model())
    return found


def resumed(group: zf.Group, name: str, folder: str) -> dict[str, Any]:
    """Train in one go, and again from the middle, with dropout; evaluate and save the model."""
    options = {
        "per_device_train_batch_size": BATCH // group.size,
        "per_device_eval_batch_size": 8 // group.size,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    zero = zero_of(name, group)
    first = make(Trainer, folder, options=options, dropout=0.1, zero=zero)
    first.train()
    second = make(Trainer, folder, options=options, dropout=0.1, zero=zero)
    second.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
    metrics = second.evaluate()
    second.save_model(str(Path(folder) / "saved"))
    prompt = torch.arange(4)[None]
    tokens = second.generate(prompt, max_new_tokens=5 + group.rank, do_sample=False, pad_token_id=0)
    return {
        "first": (history(first), whole(first.gather_model())),
        "second": (history(second), whole(second.gather_model())),
        "loss": metrics["eval_loss"],
        "tokens": tokens,
    }
