"""The command ``zfun plan --mesh auto``: the fastest mesh that fits, with a table of all."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zfun.demo._mesh_plan import mesh_model, print_mesh
from zfun.errors import OptionError
from zfun.options import PATH, instance, integer, one_of, takes
from zfun.planner import Advice, Hardware, advise, module_of, recompute
from zfun.tables import in_bytes, in_columns

# Tokens of a sequence from which on a mesh may cut it.
_LONG = 16_384
# Of a tensor axis, where the machine does not say how many ranks share a host.
_MOST_TENSOR_RANKS = 8


@takes(
    path=PATH,
    machine=instance(Hardware, "the rates and sizes of a machine", "demo.machine_of(None)"),
    ranks=integer(1),
    stage=integer(0) | None,
    micro_batches=integer(1) | None,
    precision=one_of(torch.bfloat16, torch.float16) | None,
    rows=integer(1),
    length=integer(2),
)
def mesh_search(
    path: str | Path,
    machine: Hardware,
    *,
    ranks: int,
    stage: int | None = None,
    micro_batches: int | None = None,
    precision: torch.dtype | None = None,
    rows: int = 1,
    length: int = 1024,
) -> int:
    """Plan a model of Hugging Face over every mesh, and print them all, then the best one.

    Layers are recomputed where a step does not fit without. All meshes get the same sequences.

    Args:
        path: ``config.json``.
        machine: from :func:`zfun.demo.machine_of`, with rates.
        ranks: the number of ranks.
        stage: of :func:`zfun.zero`; by default 1, and 3 as well where no layer is cut.
        micro_batches: of a step; by default one for each row in a pipeline, else 1.
        precision: mixed precision.
        rows: sequences that each rank brings.
        length: tokens in a sequence.

    Returns:
        The exit status: 0 if a mesh fits, else 1.

    Raises:
        OptionError: the machine has no rates, a package is missing, or a file cannot be read.
    """
    if not math.isfinite(machine.flops_per_s):
        raise OptionError(
            "--mesh auto compares the times of steps; got no rates of a machine; pass --hardware "
            "with a file of zfun hw-bench"
        )
    modules = module_of(path), module_of(path)
    recompute(modules[True])
    meshes = [*_meshes(modules[False].config, ranks, machine, length)]

    def rows_of(sizes: Mapping[str, int]) -> int:
        print(f"planning {sizes}", file=sys.stderr, flush=True)
        return rows * (ranks // sizes["dp"])

    models = [mesh_model(module, meshes, rows_of, length) for module in modules]
    model = dataclasses.replace(
        models[False],
        recomputed=models[True].loss,
        precision=precision,
        stages=(1, 3) if stage is None else (stage,),
        micro_batches=micro_batches,
    )
    print(f"{path}: {ranks} ranks, {rows} x {length} tokens of each rank\n")
    found = advise(model, machine, ranks)
    print(in_columns([_HEAD, *_rows(found)]))
    if found.best is None:
        nearest = min(one.excess(machine)["device"] for one in found.bounds)
        print(f"\nno mesh fits; the nearest needs {in_bytes(int(nearest))} more")
        return 1
    best = found.best
    num_fitting = sum(not rung.excess for rung in found.rungs)
    print(
        f"\n{best.composition}\nis the fastest of {num_fitting} that fit: a step takes "
        f"{best.forecast.at_most_s:.3g} s at most, the most of it for {best.forecast.bottleneck}, "
        f"with a bubble of {best.forecast.bubble:.1%}\n"
    )
    stages = best.plan.stages or (best.plan,)
    return print_mesh(stages[0], stages, machine)


def _meshes(config: Any, ranks: int, machine: Hardware, length: int) -> Iterator[dict[str, int]]:
    """Yield meshes whose axes divide the model; short pipelines first."""
    heads = config.num_attention_heads
    groups = math.gcd(heads, getattr(config, "num_key_value_heads", None) or heads)
    most = machine.ranks_per_host or _MOST_TENSOR_RANKS
    for pp in _divisors(ranks, config.num_hidden_layers):
        for tp in _divisors(math.gcd(ranks // pp, groups), most):
            is_long = pp == 1 and length >= _LONG
            parts = math.gcd(math.gcd(ranks // pp // tp, groups // tp), length)
            for sp in _divisors(parts, parts if is_long else 1):
                sizes = {"pp": pp, "dp": ranks // pp // tp // sp, "sp": sp, "tp": tp}
                yield {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"}


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


_HEAD = ("mesh", "peak", "bubble", "sent", "at most, s", "")


def _rows(found: Advice) -> Iterator[tuple[str, ...]]:
    """Yield a row for each composition: those that fit first, the fastest first."""
    place = lambda rung: rung.excess.get("device", 0.0)
    for rung in sorted(found.rungs, key=lambda rung: (place(rung), rung.forecast.at_most_s)):
        stages = rung.plan.stages or (rung.plan,)
        yield (
            str(rung.composition),
            in_bytes(rung.plan.peak.device.total),
            f"{max(plan.pipeline.bubble if plan.pipeline else 0.0 for plan in stages):.1%}",
            in_bytes(max(plan.bytes_sent() for plan in stages)),
            f"{rung.forecast.at_most_s:.3g}",
            rung.verdict,
        )
    planned = {rung.composition for rung in found.rungs}
    for bound in found.bounds:
        if bound.composition not in planned:
            excess = in_bytes(int(bound.excess(found.hardware)["device"]))
            yield str(bound.composition), "", "", "", "", f"its state alone has {excess} too much"
