"""Advice that chooses a mesh too."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.conftest import FORM
from zfun.planner import MeshModel, advise

F = torch.nn.functional


def mlp(p: Any, x: Tensor) -> Tensor:
    return x + F.linear(torch.tanh(F.linear(x, p["up"])), p["down"])


def over_mesh(mesh: Any, count: int, wrap: Any = lambda fn: fn) -> Any:
    """A loss of two blocks over pipeline and tensor axes."""

    def run(p: Any, x: Any, batch: Any = None, *, first: int, last: int) -> Any:
        x = batch if x is None else x
        for number in range(first, last):
            x = wrap(mlp)(p[number], x)
        return x.square().mean() if last == 2 else x

    tp = lambda fn: (
        zf.tensor_parallel(fn, mesh["tp"], {"*.up": "colwise", "*.down": "rowwise"})
        if mesh.sizes.get("tp", 1) > 1
        else fn
    )
    pp = mesh.sizes.get("pp", 1)
    parts = [
        tp(functools.partial(run, first=2 * n // pp, last=2 * (n + 1) // pp)) for n in range(pp)
    ]
    if pp == 1:
        return tp(lambda p, batch: run(p, None, batch, first=0, last=2))
    leaves = [[f"{n}.*" for n in range(2 * s // pp, 2 * (s + 1) // pp)] for s in range(pp)]
    return zf.pipeline(parts, mesh["pp"], num_micro_batches=count, leaves=leaves)


def mesh_model(size: int = 2) -> MeshModel:
    empty = lambda *shape: torch.empty(shape, device="meta")
    return MeshModel(
        over_mesh,
        [{"up": empty(256, 64), "down": empty(64, 256)} for _ in range(2)],
        lambda sizes: empty(64 * size // sizes["dp"], 64),
        zf.planner.mesh_sizes(size, {"pp": 2, "tp": 4}),
        recomputed=lambda mesh, count: over_mesh(mesh, count, zf.remat),
        micro_batches=2,
    )


def test_advice_on_meshes_is_the_best_of_an_exhaustive_search() -> None:
    size = 4 if FORM == "all" else 2
    model = mesh_model(size)
    space = [
        choice._replace(recomputed=recomputed)
        for choice in model.candidates()
        for recomputed in (False, True)
    ]
    plans = {one: one.plan(model, model.batch(dict(one.sizes))) for one in space}
    # Each mesh at two stages, one with a pipeline at one.
    assert len(plans) == (2 * (3 * 2 + 2) if size == 4 else 2 * (2 * 2 + 1))
    # To plan all of them once more would take as long again.
    model.known.update(plans)
    peaks = sorted(plan.peak.device.total for plan in plans.values())
    limits = [peaks[0] - 1, peaks[0], peaks[len(peaks) // 2], math.inf]
    chosen = set()
    for limit, network in itertools.product(limits, (1e8, 1e11)):
        machine = zf.planner.Hardware(
            flops_per_s=1e11, network=network, touch=1e11, op_s=1e-6, device_bytes=limit
        )
        times = {
            one: max(stage.on(machine).at_most_s for stage in plan.stages or (plan,))
            for one, plan in plans.items()
            if not any(stage.excess(machine) for stage in plan.stages or (plan,))
        }
        found = advise(model, machine, size)
        if not times:
            assert found.best is None
            assert "no composition fits" in str(found)
            continue
        assert found.best is not None
        assert found.best.forecast.at_most_s == min(times.values())
        assert times[found.best.composition] == min(times.values())
        assert "why not" in str(found)
        assert found.rows()[1:]
        chosen.add(found.best.composition)
    assert len(chosen) > 1


def test_advice_on_meshes_leaves_out_those_whose_state_is_too_much() -> None:
    machine = zf.planner.Hardware(flops_per_s=1e12, device_bytes=1000)
    found = advise(mesh_model(4), machine, 4)
    assert found.best is None
    assert not found.rungs
    assert len(found.bounds) == 8
    assert found.frontier() == ()
    assert "add ranks" in str(found)


def test_advice_on_meshes_says_by_how_much_the_batch_can_grow() -> None:
    model = mesh_model(4)
    batch = torch.empty(8192, 64, device="meta")
    model = dataclasses.replace(model, meshes=[{"dp": 4}], stages=(1,), batch=lambda sizes: batch)
    (plan,) = [one.plan(model, model.batch({"dp": 4})) for one in model.candidates()]
    limit = plan.peak.device.total
    assert [
        advise(
            model, zf.planner.Hardware(flops_per_s=1e12, device_bytes=factor * limit), 4
        ).batch_factor
        for factor in (1, 100)
    ] == [1, 16]


def test_advice_on_meshes_refuses_other_ranks_and_machines_without_rates() -> None:
    machine = zf.planner.Hardware(flops_per_s=1e12)
    with pytest.raises(zf.errors.OptionError, match=r"got dp=4, ZeRO-1 for 8 ranks; pass meshes="):
        advise(mesh_model(4), machine, 8)
    with pytest.raises(zf.errors.OptionError, match="without rates; pass those that zfun hw-bench"):
        advise(mesh_model(4), dataclasses.replace(machine, flops_per_s=math.inf), 4)
