"""The command ``zfun plan --mesh auto``: plans of all meshes of a model, and the fastest that fits.

[Note: one batch for all meshes]
Ranks along model and sequence axes work on the batch of one data rank, so a mesh with more of them
has fewer data ranks. All meshes get the same sequences: each rank brings some, and the batch of a
data rank has those of all ranks that work on it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zfun.demo._mesh_plan import MeshChoice, planned_mesh, print_mesh
from zfun.errors import OptionError
from zfun.options import PATH, instance, integer, one_of, takes
from zfun.planner import Hardware, Plan, module_of, recompute
from zfun.tables import in_bytes, in_columns

# Tokens of a sequence from which on a mesh may cut it.
_LONG = 16_384
# Of a tensor axis, where the machine does not say how many ranks share a host.
_MOST_TENSOR_RANKS = 8


class Tried(NamedTuple):
    """A composition over a mesh.

    Attributes:
        choice: the composition.
        stages: the plans of the ranks along the pipeline; none where the state alone is too much.
        seconds: of a step at most, on the slowest rank.
        excess: bytes of the device that are missing.
    """

    choice: MeshChoice
    stages: tuple[Plan, ...]
    seconds: float
    excess: float


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

    Layers are recomputed where a step does not fit without. See [Note: one batch for all meshes].

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
    found: list[Tried] = []
    print(f"{path}: {ranks} ranks, {rows} x {length} tokens of each rank\n")
    for choice in _choices(modules[0].config, ranks, machine, length, stage):
        for recomputed in (False, True):
            its = MeshChoice(choice.sizes, choice.stage, micro_batches, recomputed, precision)
            found.append(_tried(modules[recomputed], its, machine, rows, length))
            print(f"planned {_name_of(its)}", file=sys.stderr, flush=True)
            if not found[-1].excess:
                break
    found.sort(key=lambda one: (one.excess > 0, one.excess or one.seconds))
    print(in_columns([_HEAD, *map(_row_of, found)]))
    best = found[0]
    if best.excess:
        print(f"\nno mesh fits; the nearest needs {in_bytes(int(best.excess))} more")
        return 1
    slow = max(best.stages, key=lambda plan: plan.on(machine).at_most_s).on(machine)
    num_fitting = sum(not one.excess for one in found)
    print(
        f"\n{_name_of(best.choice)}\nis the fastest of {num_fitting} that fit: a step takes "
        f"{best.seconds:.3g} s at most, the most of it for {slow.bottleneck}, with a bubble of "
        f"{slow.bubble:.1%}\n"
    )
    return print_mesh(best.stages[0], best.stages, machine)


def _choices(
    config: Any, ranks: int, machine: Hardware, length: int, stage: int | None
) -> Iterator[MeshChoice]:
    """Yield meshes whose axes divide the model, with stages of ZeRO; short pipelines first."""
    heads = config.num_attention_heads
    groups = math.gcd(heads, getattr(config, "num_key_value_heads", None) or heads)
    most = machine.ranks_per_host or _MOST_TENSOR_RANKS
    for pp in _divisors(ranks, config.num_hidden_layers):
        for tp in _divisors(math.gcd(ranks // pp, groups), most):
            is_long = pp == 1 and length >= _LONG
            parts = math.gcd(math.gcd(ranks // pp // tp, groups // tp), length)
            for sp in _divisors(parts, parts if is_long else 1):
                sizes = {"pp": pp, "dp": ranks // pp // tp // sp, "sp": sp, "tp": tp}
                sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp"}
                for one in (1, 3) if stage is None and pp == 1 else (stage or 1,):
                    yield MeshChoice(sizes, one if stage is None else stage)


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _tried(module: Any, choice: MeshChoice, machine: Hardware, rows: int, length: int) -> Tried:
    """Plan a composition, unless its state alone is too much for the device."""
    excess = _least_state(module, choice) - machine.device_bytes
    if excess > 0:
        return Tried(choice, (), math.inf, excess)
    ranks = math.prod(choice.sizes.values())
    rows *= ranks // choice.sizes["dp"]
    plan = planned_mesh(module, ranks, choice, rows, length)
    stages = plan.stages or (plan,)
    excess = max(one.excess(machine).get("device", 0.0) for one in stages)
    return Tried(choice, stages, max(one.on(machine).at_most_s for one in stages), excess)


def _least_state(module: Any, choice: MeshChoice) -> float:
    """Return bytes that the state of AdamW has on the fullest rank at the least."""
    sizes = dict(choice.sizes)
    sharded = sizes["dp"] * sizes.get("sp", 1)
    numel = sum(x.numel() for x in module.parameters())
    here = numel * sharded / math.prod(sizes.values()) / sharded
    params, rest = (4, 8) if choice.precision is None else (2, 12)
    of_params = params / (sharded if choice.stage == 3 else 1)
    return here * (of_params + rest / (sharded if choice.stage else 1))


_HEAD = ("mesh", "peak", "bubble", "sent", "at most, s", "")


def _row_of(one: Tried) -> tuple[str, ...]:
    name = _name_of(one.choice)
    if not one.stages:
        return name, "", "", "", "", f"its state alone has {in_bytes(int(one.excess))} too much"
    bubble = max(plan.pipeline.bubble if plan.pipeline else 0.0 for plan in one.stages)
    verdict = f"{in_bytes(int(one.excess))} too much" if one.excess else "fits"
    return (
        name,
        in_bytes(max(plan.peak.device.total for plan in one.stages)),
        f"{bubble:.1%}",
        in_bytes(max(plan.bytes_sent() for plan in one.stages)),
        f"{one.seconds:.3g}",
        verdict,
    )


def _name_of(choice: MeshChoice) -> str:
    sizes = ", ".join(f"{axis}={size}" for axis, size in choice.sizes.items())
    return f"{sizes}, ZeRO-{choice.stage}{', recomputed' if choice.recomputed else ''}"
