"""Programs of a rank in a pipeline, for simulated ranks and for real processes, which import this
module.
"""

from __future__ import annotations

from typing import Any

import zfun as zf
from tests.unit.parallel import pipelines
from zfun import optim
from zfun.parallel import pipeline


def trained(group: zf.Group) -> Any:
    """Train by each schedule, over two and four ranks, with short and with long messages."""
    kept = []
    for name, pp, per_rank, stage, rows in (
        ("1f1b", 4, 1, 1, 8),
        ("1f1b", 2, 2, 3, 8),
        ("zero_bubble", 4, 1, 0, 12_000),
    ):
        mesh = zf.mesh(group, pp=pp, dp=-1)
        fns = pipelines.stages(pp * per_rank, pipelines.last_weighted)
        loss = pipeline(fns, mesh["pp"], name, num_micro_batches=4)
        z = zf.zero(stage, loss, optim.adamw(1e-2), mesh["dp"])
        state = z.init(pipelines.params(len(fns)))
        for step in range(2):
            batch = pipelines.batch(mesh.coordinates["dp"], step, rows)
            state, info = z.step(state, batch)
        kept.append((z.params(state), info.loss, info.grad_norm))
    return kept


def of_other_schedules(group: zf.Group) -> Any:
    """Ranks whose schedules differ."""
    loss = pipeline(
        pipelines.stages(group.size),
        group,
        ["1f1b", "gpipe"][group.rank == 1],
        num_micro_batches=4,
    )
    z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group())
    state = z.init(pipelines.params(group.size))
    return z.step(state, pipelines.batch(0, 0))


def that_raises(group: zf.Group) -> Any:
    """A rank whose stage raises in its third forward pass."""
    count = 0

    def broken(params: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise ValueError("no such token")
        return pipelines.middle(params, x)

    fns = pipelines.stages(group.size)
    fns[1] = broken
    loss = pipeline(fns, group, num_micro_batches=4)
    z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group())
    return z.step(z.init(pipelines.params(group.size)), pipelines.batch(0, 0))
