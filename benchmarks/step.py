"""A training step, side by side: plain torch, DDP, ZeroRedundancyOptimizer, FSDP2 and zfun's stages, in one interleaved run.

    python benchmarks/step.py --preset small --rounds 8
    python benchmarks/step.py --preset medium --rounds 3 --only ddp fsdp2 zfun-3    # all at once need more than 24 GiB

Every contender has the same weights, data and AdamW, on two ranks with one thread each (``one process`` has both threads and the whole
batch). In each round every contender takes a few steps, in turn, so that what the machine does meanwhile hits all of them. The medians are
compared as ratios; the loss curves must agree, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import zfun as zf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, PRESETS
from text import batches, stdlib_bytes

Step = Callable[[Any], Tensor]
LEARNING_RATE = 3e-4


class Many(nn.Module):
    """502 tiny tensors: what a step costs beside arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(250))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.1
        return self.head(x)


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        build: makes the module, the same on every rank.
        loss: of a module's call and a batch.
        batch: of a step, for a part of the ranks.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Callable[..., Tensor], Any], Tensor]
    batches: Callable[[int, int], Any]


def gpt(preset: str) -> Model:
    config = PRESETS[preset]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return GPT(config)

    def loss(call: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(call(tokens).flatten(0, 1), targets.flatten())

    text = stdlib_bytes()
    return Model(build, loss, lambda rank, size: batches(text, config.batch_size * 2, config.length, rank, size))


def many() -> Model:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Many()

    def draw(rank: int, size: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        while True:
            x = torch.randn(16, 16, generator=generator)
            share = 16 // size
            yield x[rank * share : (rank + 1) * share]

    return Model(build, lambda call, x: (call(x) ** 2).mean(), draw)


def model_of(preset: str) -> Model:
    return many() if preset == "many" else gpt(preset)


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


def plain(model: Model) -> Step:
    module = model.build()
    optimizer = adamw(module.parameters())
    return torch_step(module, optimizer, model)


def torch_step(module: nn.Module, optimizer: torch.optim.Optimizer, model: Model) -> Step:
    def step(batch: Any) -> Tensor:
        loss = model.loss(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ddp(model: Model) -> Step:
    module = nn.parallel.DistributedDataParallel(model.build(), gradient_as_bucket_view=True)
    return torch_step(module, adamw(module.parameters()), model)


def ddp_zero(model: Model) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model.build(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return torch_step(module, optimizer, model)


def fsdp2(model: Model) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = model.build()
    for block in getattr(module, "blocks", ()):
        fully_shard(block, mesh=mesh)
    if isinstance(module, Many):
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return torch_step(module, adamw(module.parameters()), model)


def zfun_stage(stage: int, **options: Any) -> Callable[[Model, zf.Group], Step]:
    def make(model: Model, group: zf.Group) -> Step:
        module = model.build()
        params = {name: weight.detach() for name, weight in module.named_parameters()}

        def loss_fn(params: Any, batch: Any) -> Tensor:
            return model.loss(lambda *args: functional_call(module, params, args), batch)

        z = zf.zero(stage, loss_fn, zf.optim.adamw(LEARNING_RATE), group, **options)
        state = z.init(params)

        def step(batch: Any) -> Tensor:
            nonlocal state
            state, info = z.step(state, batch)
            return info.loss

        return step

    return make


CONTENDERS: dict[str, Callable[[Model, zf.Group], Step]] = {
    "ddp": lambda model, group: ddp(model),
    "ddp+zero1": lambda model, group: ddp_zero(model),
    "fsdp2": lambda model, group: fsdp2(model),
    "zfun-0": zfun_stage(0),
    "zfun-1": zfun_stage(1),
    "zfun-2": zfun_stage(2),
    "zfun-3": zfun_stage(3),
}


@dataclass
class Report:
    """What one rank measured of one contender."""

    seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_rank(group: zf.Group, preset: str, names: list[str], rounds: int, steps: int) -> dict[str, Report]:
    model = model_of(preset)
    made: dict[str, tuple[Step, Any]] = {}
    for name in names:
        if name == "one process":
            made[name] = (plain(model), model.batches(0, 1))
        else:
            made[name] = (CONTENDERS[name](model, group), model.batches(group.rank, group.size))
    reports = {name: Report([], [], []) for name in names}
    for index in range(rounds + 1):
        for name in names:
            step, data = made[name]
            alone = name == "one process"
            group.barrier()
            if alone and group.rank:
                group.barrier()
                continue
            torch.set_num_threads(2 if alone else 1)
            for _ in range(steps):
                batch = next(data)
                cpu, began = cpu_seconds(), time.perf_counter()
                loss = step(batch)
                if index:  # the first round warms up
                    reports[name].seconds.append(time.perf_counter() - began)
                    reports[name].cpu_seconds.append(cpu_seconds() - cpu)
                reports[name].losses.append(float(loss))
            torch.set_num_threads(1)
            if alone:
                group.barrier()
    return reports


def curves_agree(reports: list[dict[str, Report]], names: list[str]) -> float:
    """The largest difference between the loss curves, averaged over ranks where a contender reports its own rank's loss."""
    curves = []
    for name in names:
        ranks = [r[name].losses for r in reports if r[name].losses]
        own = not name.startswith("zfun")
        curves.append([sum(values) / len(values) for values in zip(*ranks, strict=True)] if own else ranks[0])
    return max(abs(a - b) for curve in curves for a, b in zip(curve, curves[0], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=["tiny", "demo", "small", "medium", "many"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in each round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=["one process", *CONTENDERS])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    reports = zf.spawn(args.ranks, run_rank, args.preset, args.only, args.rounds, args.steps, timeout_s=3600.0, collective_timeout_s=300.0)
    spread = curves_agree(reports, args.only)
    rows = {}
    for name in args.only:
        slowest = [max(times) for times in zip(*(r[name].seconds for r in reports if r[name].seconds), strict=True)]
        cpu = [sum(times) for times in zip(*(r[name].cpu_seconds for r in reports if r[name].cpu_seconds), strict=True)]
        rows[name] = {"ms": 1e3 * statistics.median(slowest), "cpu_ms": 1e3 * statistics.median(cpu)}
    print(
        f"{args.preset}: {args.ranks} ranks, {args.rounds} rounds of {args.steps} steps; median; loss curves differ by at most {spread:.1e}"
    )
    print(f"{'':14}{'ms':>9}{'CPU ms':>9}" + "".join(f"{'/ ' + base:>14}" for base in ("ddp", "fsdp2", "one process") if base in rows))
    for name, row in rows.items():
        ratios = "".join(f"{row['ms'] / rows[base]['ms']:14.2f}" for base in ("ddp", "fsdp2", "one process") if base in rows)
        print(f"{name:14}{row['ms']:9.1f}{row['cpu_ms']:9.1f}{ratios}")
    if args.json:
        hardware = {"machine": platform.machine(), "processor": platform.processor(), "torch": torch.__version__}
        args.json.write_text(
            json.dumps(
                {
                    "preset": args.preset,
                    "spread": spread,
                    "rows": rows,
                    "hardware": hardware,
                    "raw": [{k: asdict(v) for k, v in r.items()} for r in reports],
                }
            )
        )
    if spread > 1e-4:
        sys.exit("the loss curves do not agree")


if __name__ == "__main__":
    main()
