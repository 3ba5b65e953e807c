"""The command ``zfun plan --mesh``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zfun.errors import OptionError
from zfun.modules import functional
from zfun.optim import adamw
from zfun.options import PATH, instance, integer, takes
from zfun.planner import Hardware, MeshCandidate, MeshModel, Plan, module_of, recompute
from zfun.tables import in_columns


@takes(
    path=PATH,
    machine=instance(Hardware, "the rates and sizes of a machine", "demo.machine_of(None)"),
    ranks=integer(1),
    choice=instance(MeshCandidate, "a composition", "MeshCandidate((('dp', 8),))"),
    micro_batches=integer(1) | None,
    rows=integer(1),
    length=integer(2),
)
def mesh_plan(
    path: str | Path,
    machine: Hardware,
    *,
    ranks: int,
    choice: MeshCandidate,
    micro_batches: int | None = None,
    rows: int = 1,
    length: int = 1024,
) -> int:
    """Print the plan of a model of Hugging Face over the axes of a mesh.

    Args:
        path: ``config.json``.
        machine: from :func:`zfun.demo.machine_of`.
        ranks: the number of ranks.
        choice: the composition. The size of one axis may be -1, for the ranks that are left.
        micro_batches: of a step; by default one for each row in a pipeline, else 1.
        rows: sequences in the batch of a data rank.
        length: tokens in a sequence.

    Returns:
        The exit status: 0 if the plan fits, else 1.

    Raises:
        OptionError: a package is missing, a file cannot be read, or the mesh fits neither the ranks
            nor the model.
    """
    module = module_of(path)
    if choice.recomputed:
        recompute(module)
    known = math.prod(size for _, size in choice.sizes if size != -1)
    sizes = {name: max(1, ranks // known) if x == -1 else x for name, x in choice.sizes}
    if length % sizes.get("sp", 1):
        raise OptionError(
            f"the ranks of a sequence axis divide the tokens; got sp={sizes['sp']} for a length of "
            f"{length}; use a length that sp divides"
        )
    model = mesh_model(module, [sizes], lambda sizes: rows, length)
    model = dataclasses.replace(model, micro_batches=micro_batches)
    choice = choice._replace(sizes=tuple(sizes.items()), recomputed=False)
    found = choice.plan(model, model.batch(sizes), ranks)
    shown = ", ".join(f"{name}={size}" for name, size in found.mesh)
    print(f"{path}: {ranks} ranks ({shown}), {rows} x {length} tokens on each data rank\n")
    return print_mesh(found, found.stages or (found,), machine)


def print_mesh(first: Plan, stages: Sequence[Plan], machine: Hardware) -> int:
    """Print the plan of a rank, and a row for each stage; return 0 if all fit, else 1."""
    print(first)
    if len(stages) > 1 or math.isfinite(machine.flops_per_s):
        print(f"\n{in_columns(_rows_of(stages, machine))}")
    return int(any(plan.excess(machine) for plan in stages))


def mesh_model(
    module: Any,
    meshes: Sequence[Mapping[str, int]],
    rows_of: Callable[[Mapping[str, int]], int],
    length: int,
) -> MeshModel:
    """Return a causal model of Hugging Face over meshes, with AdamW.

    Args:
        module: the model.
        meshes: the sizes of the axes.
        rows_of: returns the sequences of a data rank.
        length: tokens in a sequence.
    """
    # transformers takes seconds to import.
    from zfun.interop.transformers import mesh_batch, mesh_loss

    return MeshModel(
        functools.partial(mesh_loss, module),
        functional(module).params,
        lambda sizes: mesh_batch(sizes, rows_of(sizes), length),
        meshes,
        adamw(1e-4),
    )


def _rows_of(stages: Sequence[Plan], machine: Hardware) -> list[tuple[str, ...]]:
    has_times = math.isfinite(machine.flops_per_s)
    times = ("at least, s", "at most, s") if has_times else ()
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
        if has_times:
            found = plan.on(machine)
            cells = (*cells, f"{found.at_least_s:.3g}", f"{found.at_most_s:.3g}")
        rows.append(cells)
    return rows
