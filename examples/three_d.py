"""A Llama over three axes of ranks: pipeline, data with a ZeRO stage, and tensor.

    torchrun --nproc-per-node 8 examples/three_d.py --folder runs/three_d
    torchrun --nproc-per-node 4 examples/three_d.py --folder runs/three_d --mesh 1 4 1 --steps 30
    python examples/three_d.py --simulate 8 --stage 3

The second line goes on where the first one ended, in another mesh. Losses depend on neither mesh
nor stage, up to rounding, because a step's batch depends on the number of the step alone.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zfun as zf
from zfun.interop.transformers import pipeline_stages, tp_plan

ROWS, MICRO_BATCHES = 16, 2  # sequences of all data ranks together; parts of a rank's
SIZES: Any = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same first values on every rank
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4))


def make_data(rank: int, size: int, after: int) -> Iterator[dict[str, Tensor]]:
    """Yield a data rank's batches that follow a number of steps: every n-th number, in order."""
    random = torch.Generator().manual_seed(0)
    for step in range(10**6):
        first, stride = torch.randint(1, 8, (2, ROWS, 1), generator=random)
        if step >= after:
            ids = ((first + stride * torch.arange(16)) % 32)[rank::size]
            yield {"input_ids": ids, "labels": ids}


def train(
    group: zf.Group, sizes: Sequence[int], stage: int, num_steps: int, folder: Path | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    pp, dp, tp = sizes
    mesh, model = zf.mesh(group, pp=pp, dp=dp, tp=tp), make_model()
    # A rank has its layers, and its heads and columns in them; ZeRO shards these over data ranks.
    stages = pipeline_stages(model, pp)
    cut = [zf.tensor_parallel(run, mesh["tp"], tp_plan(model)) for run in stages.functions]
    loss_fn = zf.pipeline(cut, mesh["pp"], num_micro_batches=MICRO_BATCHES, leaves=stages.leaves)
    optimizer = zf.optim.chain(zf.optim.clip_by_global_norm(1.0), zf.optim.adamw(1e-2))
    zero = zf.zero(stage, loss_fn, optimizer, mesh["dp"])

    state, losses = zero.init(zf.functional(model).params), list[float]()  # cuts the whole tree
    if folder and zf.checkpoint.latest(folder):
        state = zf.load(folder, state).state  # of any mesh and stage
    data = make_data(mesh.coordinates["dp"], dp, after=state.step)
    while state.step < num_steps:
        state, info = zero.step(state, next(data))
        losses.append(float(info.loss))  # over all data, on every rank
        if group.rank == 0:
            print(f"step {state.step}  loss {losses[-1]:.4f}  norm {float(info.grad_norm):.3f}")
    if folder is not None:
        zf.save(folder, state, keep=2)
    return losses, zero.params(state)  # the whole tree again


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=int, nargs=3, default=(2, 2, 2), metavar=("PP", "DP", "TP"))
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="of ZeRO")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="save there, and go on from there")
    parser.add_argument("--simulate", type=int, help="this many ranks in one process")
    args = parser.parse_args()
    given = args.mesh, args.stage, args.steps, args.folder
    if args.simulate:
        zf.simulate(args.simulate, train, *given)
    else:
        train(zf.process_group(), *given)
