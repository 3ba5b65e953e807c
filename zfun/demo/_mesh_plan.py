"""The command ``zfun plan --mesh``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zfun.modules import functional
from zfun.optim import adamw
from zfun.options import BOOL, PATH, instance, integer, number, one_of, takes
from zfun.planner import Hardware, Plan, module_of, recompute
from zfun.planner import plan as plan_of
from zfun.recipes import zero
from zfun.tables import in_columns

_SIZE = number(above=0, infinite=True, example="80e9")


@takes(
    path=PATH,
    ranks=integer(1),
    mesh=instance(dict, "the size of each axis, by name", "{'pp': 8, 'dp': 16, 'tp': 8}"),
    rows=integer(1),
    length=integer(2),
    micro_batches=integer(1) | None,
    stage=integer(0),
    recomputed=BOOL,
    dtype=one_of("fp32", "bf16"),
    device_bytes=_SIZE,
    host_bytes=_SIZE,
    hardware=PATH | None,
)
def mesh_plan(
    path: str | Path,
    *,
    ranks: int,
    mesh: Mapping[str, int],
    rows: int = 1,
    length: int = 1024,
    micro_batches: int | None = None,
    stage: int = 1,
    recomputed: bool = False,
    dtype: str = "fp32",
    device_bytes: float = float("inf"),
    host_bytes: float = float("inf"),
    hardware: str | Path | None = None,
) -> int:
    """Print the plan of a model of Hugging Face over the axes of a mesh.

    Args:
        path: ``config.json``.
        ranks: the number of ranks.
        mesh: the size of each axis, the slowest first: of ``pp``, ``dp``, ``sp`` and ``tp``.
        rows: sequences in the batch of a data rank.
        length: tokens in a sequence.
        micro_batches: of a step; by default one for each row in a pipeline, else 1.
        stage: of :func:`zfun.zero`.
        recomputed: whether layers are recomputed in backward.
        dtype: ``"bf16"`` for mixed precision.
        device_bytes: the memory of the device of a rank.
        host_bytes: the host memory for one rank.
        hardware: a file of ``zfun hw-bench``, for times.

    Returns:
        The exit status: 0 if the plan fits, else 1.

    Raises:
        OptionError: a package is missing, a file cannot be read, or the mesh fits neither the ranks
            nor the model.
    """
    machine = Hardware.load(hardware) if hardware else Hardware(flops_per_s=math.inf)
    machine = dataclasses.replace(
        machine,
        device_bytes=min(device_bytes, machine.device_bytes),
        host_bytes=min(host_bytes, machine.host_bytes),
    )
    module = module_of(path)
    if recomputed:
        recompute(module)
    count = micro_batches or (rows if mesh.get("pp", 1) > 1 else 1)
    precision = torch.bfloat16 if dtype == "bf16" else None
    found = planned_mesh(module, ranks, mesh, rows, length, count, stage, precision)
    sizes = ", ".join(f"{name}={size}" for name, size in found.mesh)
    print(f"{path}: {ranks} ranks ({sizes}), {rows} x {length} tokens on each data rank\n")
    print(found)
    stages = found.stages or (found,)
    if len(stages) > 1:
        print(f"\n{in_columns(_rows_of(stages, machine if hardware else None))}")
    return int(any(plan.excess(machine) for plan in stages))


def planned_mesh(
    module: Any,
    ranks: int,
    mesh: Mapping[str, int],
    rows: int,
    length: int,
    num_micro_batches: int,
    stage: int,
    precision: torch.dtype | None,
) -> Plan:
    """Plan a causal model of Hugging Face over a mesh, with AdamW."""
    # transformers takes seconds to import.
    from zfun.interop.transformers import mesh_batch, mesh_loss

    def make(axes: Any) -> Any:
        is_pipeline = axes.sizes.get("pp", 1) > 1
        data = [name for name in axes.names if name in ("dp", "sp")]
        return zero(
            stage,
            mesh_loss(module, axes, num_micro_batches),
            adamw(1e-4),
            axes[tuple(data)],
            precision=precision,
            num_micro_batches=1 if is_pipeline else num_micro_batches,
        )

    sizes = dict(mesh) if {"dp", "sp"} & mesh.keys() else {"dp": 1, **mesh}
    batch = mesh_batch(sizes, rows, length)
    return plan_of(
        make, functional(module).params, batch, ranks, mesh=sizes, device="meta", fold=True
    )


def _rows_of(stages: tuple[Plan, ...], machine: Hardware | None) -> list[tuple[str, ...]]:
    times = ("at least, s", "at most, s") if machine else ()
    rows: list[tuple[str, ...]] = [
        ("stage", "kept", "peak", "in flight", "sent", "operations", *times)
    ]
    for index, plan in enumerate(stages):
        cells: tuple[str, ...] = (
            f"{index}",
            f"{plan.steady.device.total:,}",
            f"{plan.peak.device.total:,}",
            f"{plan.pipeline.in_flight if plan.pipeline else 0}",
            f"{plan.bytes_sent():,}",
            f"{plan.flops.total:.4g}",
        )
        if machine:
            found = plan.on(machine)
            cells = (*cells, f"{found.at_least_s:.3g}", f"{found.at_most_s:.3g}")
        rows.append(cells)
    return rows
