"""A step of ``zfun.interop.transformers.Trainer`` beside the plain functional step.

    python benchmarks/trainer.py --steps 40
    python benchmarks/trainer.py --write    # the table into benchmarks/results/trainer.md

Two ranks with one thread each train GPT-2 at stage 3. After each step of the Trainer the same rank
takes one step of ``zf.zero`` with an equal model, an equal optimizer and the same batch, so that a
slow moment of the machine hits both. The step of the Trainer includes the data loader, the loop,
the schedule and the log of every tenth step. A step is over when the slower rank has ended it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import zfun as zf
from zfun.collectives import Workers, barrier
from zfun.interop.transformers import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import pages

WARM_STEPS = 4
VOCAB, LENGTH = 1024, 128
PRESETS = {
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 2, "batch_size": 2},
    "small": {"n_embd": 256, "n_layer": 6, "n_head": 4, "batch_size": 4},
}


def make_model(preset: str) -> Any:
    torch.manual_seed(0)
    sizes = {name: x for name, x in PRESETS[preset].items() if name != "batch_size"}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, use_cache=False, **sizes, **drop
    )
    return transformers.GPT2LMHeadModel(config)


def functional_step(group: zf.Group, preset: str) -> Any:
    """Return a function that takes one step on a batch, and returns the loss."""
    apply = zf.functional(make_model(preset).train())
    rule = zf.optim.adamw(1e-4, weight_decay=0.0)
    optimizer = zf.optim.chain(zf.optim.clip_by_global_norm(1.0), rule)
    zero = zf.zero(3, lambda params, batch: apply(params, **batch).loss, optimizer, group)
    held = [zero.init(apply.params)]

    def step(batch: dict[str, torch.Tensor]) -> float:
        held[0], info = zero.step(held[0], batch)
        return float(info.loss)

    return step


class Paired(transformers.TrainerCallback):  # type: ignore[misc]
    """Takes a functional step after each step of the Trainer, and times both."""

    def __init__(
        self, group: zf.Group, preset: str, batches: list[dict[str, torch.Tensor]]
    ) -> None:
        self.group, self.batches = group, batches
        self.step = functional_step(group, preset)
        self.pairs: list[tuple[float, float]] = []
        self.losses: list[float] = []
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        of_trainer = time.perf_counter() - self.began
        barrier(self.group)
        began = time.perf_counter()
        self.losses.append(self.step(self.batches[state.global_step - 1]))
        self.pairs.append((of_trainer, time.perf_counter() - began))
        barrier(self.group)
        self.began = time.perf_counter()


def measure(group: zf.Group, preset: str, steps: int) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    batch_size = PRESETS[preset]["batch_size"]
    count = (steps + WARM_STEPS) * batch_size * group.size
    tokens = torch.randint(VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    # No label predicts the first token, so that every count of labels is the same.
    labels = tokens.clone()
    labels[:, 0] = -100
    # Each rank gets every second batch of the sequential order.
    batches = zip(tokens.split(batch_size), labels.split(batch_size), strict=True)
    own = [{"input_ids": x, "labels": y} for x, y in batches][group.rank :: group.size]
    paired = Paired(group, preset, own)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps + WARM_STEPS,
            per_device_train_batch_size=batch_size,
            train_sampling_strategy="sequential",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            make_model(preset),
            arguments,
            train_dataset=[
                {"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)
            ],
            callbacks=[paired],
            zero={"stage": 3, "group": group},
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"pairs": paired.pairs[WARM_STEPS:], "losses": paired.losses, "logged": logged}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median, by the binomial distribution of ranks."""
    ordered, n = sorted(ratios), len(ratios)
    half = 0.98 * n**0.5
    return ordered[max(0, int(n / 2 - half))], ordered[min(n - 1, int(n / 2 + half))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with Workers(2, timeout_s=170.0) as workers:
        ranks = workers.run(measure, options.preset, options.steps)
    first = ranks[0]
    mean = statistics.fmean(first["losses"][:10])
    if abs(mean - first["logged"][0]) > 1e-4:
        raise SystemExit(f"the losses differ: {first['logged'][0]} and {mean}")
    pairs = [
        tuple(map(max, zip(mine, other, strict=True)))
        for mine, other in zip(ranks[0]["pairs"], ranks[1]["pairs"], strict=True)
    ]
    ratios = [trainer / plain for trainer, plain in pairs]
    low, high = interval(ratios)
    medians = [1e3 * statistics.median(pair[place] for pair in pairs) for place in (0, 1)]
    ratio = f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
    rows = [
        "| step | median ms | ratio (95 %) |",
        "|---|---|---|",
        f"| functional, stage 3 | {medians[1]:.1f} | 1 |",
        f"| Trainer, stage 3 | {medians[0]:.1f} | {ratio} |",
    ]
    print("\n".join(rows))
    if options.write:
        pages.write_section(
            "trainer.md",
            f"{options.preset}, {options.steps} paired steps on two ranks",
            pages.environment() + f" transformers {transformers.__version__}.",
            "\n".join(rows),
        )


if __name__ == "__main__":
    main()
