"""The training loop of each rank of the demo."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from zfun import tree
from zfun.demo._examples import load_example
from zfun.demo._memory import forget_peak, peak_bytes

MODEL_STATE = ("params", "grads")
# About one matrix of the preset "demo", so that the gathered buckets are a small part of the model.
BUCKET_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class DemoComposition:
    """A stage of ZeRO, with or without offload to host memory."""

    name: str
    stage: int
    offload: bool = False


COMPOSITIONS = (
    DemoComposition("DDP", 0),
    DemoComposition("ZeRO-1", 1),
    DemoComposition("ZeRO-2", 2),
    DemoComposition("ZeRO-3", 3),
    DemoComposition("ZeRO-3 + offload", 3, offload=True),
)


@dataclass(frozen=True, slots=True)
class DemoJob:
    """The training job, the same under every composition."""

    preset: str
    steps: int
    learning_rate: float = 4e-4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RankReport:
    """The measurements of one rank."""

    losses: tuple[float, ...]
    digest: str  # SHA-256 of all parameters after the last step
    step_s: tuple[float, ...]
    held_bytes: dict[str, int]  # of params, grads and optimizer
    peak_bytes: int  # growth of the resident set during training
    sent_bytes: int  # parameters and gradients, in a step
    theory_bytes: float  # the same according to ZeRO's formula


def train(group: zf.Group, job: DemoJob, composition: DemoComposition) -> RankReport:
    """Train on one rank; ``zf.collectives.spawn`` calls this function in a process per rank."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.size))
    gpt, text = load_example("gpt"), load_example("text")
    source = text.stdlib_bytes()
    # A tiny run first, because compiling kernels and loading libraries also takes memory.
    _run(group, DemoJob("tiny", 1), composition, gpt, text, source, bar=False)
    return _run(group, job, composition, gpt, text, source, bar=group.rank == 0)


def _run(
    group: zf.Group,
    job: DemoJob,
    composition: DemoComposition,
    gpt: Any,
    text: Any,
    source: Tensor,
    *,
    bar: bool,
) -> RankReport:
    from tqdm import tqdm

    recorder = zf.record(group)
    config = gpt.PRESETS[job.preset]
    data = text.batches(
        source, config.batch_size * group.size, config.length, group.rank, group.size, job.seed
    )
    optimizer = zf.optim.adamw(job.learning_rate, b2=0.95)
    baseline = forget_peak()

    loss_fn, params = gpt.init(config, job.seed)
    z = zf.zero(
        composition.stage,
        loss_fn,
        optimizer,
        recorder,
        bucket_bytes=BUCKET_BYTES,
        # No bucket stays from forward to backward, so that the bytes are those of the formula.
        schedule=zf.ScheduleOptions(reuse_distance=0) if composition.stage == 3 else None,
        offload=_stores(composition),
    )
    state = z.init(params)
    del params
    forget_peak()

    losses: list[float] = []
    step_s: list[float] = []
    sent = 0
    steps = tqdm(
        range(job.steps),
        desc=f"{composition.name:<16}",
        unit="step",
        file=sys.stderr,
        disable=not bar,
        mininterval=0.5,
    )
    for _ in steps:
        batch = next(data)
        recorder.clear()
        began = time.perf_counter()
        state, info = z.step(state, batch)
        losses.append(float(info.loss))
        step_s.append(time.perf_counter() - began)
        sent = sum(recorder.bytes_sent(name) for name in MODEL_STATE)
        steps.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)

    peak = peak_bytes() - baseline
    psi_bytes = _nbytes(state.params) * (group.size if composition.stage == 3 else 1)
    times = 3 if composition.stage == 3 else 2
    return RankReport(
        losses=tuple(losses),
        digest=_digest(z.params(state)),
        step_s=tuple(step_s),
        held_bytes={
            "params": _nbytes(state.params),
            "grads": psi_bytes // (group.size if composition.stage >= 2 else 1),
            "optimizer": _nbytes(state.opt_state),
        },
        peak_bytes=max(0, peak),
        sent_bytes=sent,
        theory_bytes=times * psi_bytes * (group.size - 1) / group.size,
    )


def _stores(composition: DemoComposition) -> zf.stores.Offload | None:
    if not composition.offload:
        return None
    return zf.stores.Offload(
        params=zf.stores.host(), grads=zf.stores.host(), optimizer=zf.stores.host()
    )


def _nbytes(value: Any) -> int:
    return sum(zf.describe(value).bytes_by_place.values())


def _digest(params: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        digest.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}\n".encode())
        digest.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
