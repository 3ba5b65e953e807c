"""Every optimizer at every stage, over a group and over a mesh: the same bits, and the numbers of
one process.

Programs of a rank, for simulated ranks and for real processes, which import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from tests import models, reference
from zfun import optim
from zfun.collectives import axis_of, sum_group
from zfun.testing import assert_same_bits

LR, STEPS = 0.05, 3


def is_matrix(path: str, leaf: Any) -> str:
    return "matrix" if leaf.ndim == 2 else "rest"


OPTIMIZERS: dict[str, optim.Optimizer] = {
    "sgd": optim.sgd(LR, momentum=0.9, nesterov=True),
    "adam": optim.adam(LR, weight_decay=0.1),
    "adamw": optim.adamw(LR),
    "lion": optim.lion(LR, weight_decay=0.1),
    "adagrad": optim.adagrad(LR),
    "lamb": optim.lamb(LR, weight_decay=0.1, max_ratio=1.5),
    "muon": optim.muon(LR, optim.adamw(LR), weight_decay=0.1),
    "from_torch": optim.from_torch(torch.optim.NAdam, lr=LR),
    "by_label": optim.by_label({"matrix": optim.lamb(LR), "rest": optim.sgd(LR)}, is_matrix),
    "parts": optim.chain(
        optim.clip_by_global_norm(0.5),
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.1, mask=lambda path, leaf: leaf.ndim == 2),
        optim.scale_by_learning_rate(LR),
    ),
    "onebit_adam": optim.onebit_adam(LR, freeze_step=1, weight_decay=0.1),
}


def in_one_process(name: str, size: int) -> dict[str, Tensor]:
    """Take the same steps on one rank, with the batches of all ranks."""
    params, steps = models.mlp(num_layers=2), models.mlp_batches(STEPS, size)
    loss = lambda flat, batch: models.mlp_loss(models.unflat_dict(flat, params), batch)
    flat, state = models.flat_dict(params), {}
    if name == "onebit_adam":
        for step in steps:
            grads = [reference.gradients(loss, flat, [batch])[1] for batch in step]
            flat = reference.onebit_adam(flat, grads, state, LR, 1, decay=0.1)
        return flat
    optimizer = OPTIMIZERS[name]
    whole: Any = params
    kept = optimizer.init(whole)
    for step in steps:
        grads = reference.gradients(loss, models.flat_dict(whole), step)[1]
        whole, kept = optimizer.apply(models.unflat_dict(grads, params), kept, whole)
    return models.flat_dict(whole)


def trained(
    optimizer: optim.Optimizer, stage: int, group: zf.Group, rank: int, **options: Any
) -> Any:
    z = zf.zero(stage, models.mlp_loss, optimizer, group, bucket_bytes=100 + 200 * stage, **options)
    state = z.init(models.mlp(num_layers=2))
    for batches in models.mlp_batches(STEPS, sum_group(group).size):
        state, _ = z.step(state, batches[rank])
    return z.params(state)


def check_near(found: Any, expected: dict[str, Tensor], label: str) -> None:
    before = models.flat_dict(models.mlp(num_layers=2))
    for path, leaf in models.flat_dict(found).items():
        torch.testing.assert_close(
            leaf - before[path],
            expected[path] - before[path],
            rtol=1e-9,
            atol=1e-11,
            msg=lambda m: f"{label}: {m}",
        )
        assert not torch.equal(leaf, before[path])


def every_optimizer(group: zf.Group) -> Any:
    """Two stages that send different tensors; simulated ranks compare all stages."""
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        first, second = (
            trained(optimizer, stage, group, group.rank)
            for stage in ((0, 2) if name == "onebit_adam" else (1, 3))
        )
        assert_same_bits(first, second, f"{name} at two stages")
        check_near(
            first, in_one_process(name, group.size), f"{name} on {group.size} ranks and on one"
        )
        found[name] = first
    return found


def places_of(name: str, mesh: zf.collectives.Mesh) -> list[tuple[int, zf.Group, dict[str, Any]]]:
    """Stages over the whole mesh and over the inner axis."""
    places: list[tuple[int, zf.Group, dict[str, Any]]] = [
        (0, mesh, {}),
        (1, mesh.inner, {}),
        (1, mesh, {}),
        (2, mesh.inner, {}),
        (2, mesh, {}),
    ]
    return (
        places
        if name == "onebit_adam"
        else [
            *places,
            (3, mesh.inner, {}),
            (3, mesh, {}),
            (3, mesh, {"schedule": zf.ScheduleOptions(secondary=True)}),
        ]
    )


def over_a_mesh(group: zf.Group, inner: int, names: Sequence[str], chosen: slice) -> Any:
    """Let rows share all of the state, a part, or nothing."""
    found, mesh = {}, zf.split(group, inner=inner)
    for name in names:
        places = places_of(name, mesh)[chosen]
        runs = [
            trained(OPTIMIZERS[name], stage, over, group.rank, **options)
            for stage, over, options in places
        ]
        for (stage, over, _), run in zip(places, runs, strict=True):
            assert_same_bits(
                run,
                runs[0],
                f"{name} at stage {stage} over {axis_of(over) or 'all'} and at stage "
                f"{places[0][0]}",
            )
        check_near(
            runs[0],
            in_one_process(name, group.size),
            f"{name} on a mesh of {group.size} ranks and on one",
        )
        found[name] = runs[0]
    return found


def every_optimizer_over_a_mesh(group: zf.Group) -> Any:
    """Train over the inner axis and over the mesh, with the last entry of :func:`places_of`."""
    return over_a_mesh(group, 2, list(OPTIMIZERS), slice(-2, None))


BODIES = [every_optimizer]
