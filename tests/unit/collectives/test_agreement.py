"""Options that all ranks must share are compared at ``init``, before anything else is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.errors import OptionError, PlacementError, SpecMismatch

pytestmark = pytest.mark.timeout(60)


def momentum(*extra: str) -> Any:
    """Return a user's pair of functions, whose state has more entries by name."""

    def init(params: Any) -> Any:
        state = {name: torch.zeros(3) for name in extra}
        return {"velocity": tree.map(torch.zeros_like, params), **state}

    def update(grads: Any, state: Any, params: Any) -> Any:
        velocity = tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        return tree.map(lambda v: -0.1 * v, velocity), {**state, "velocity": velocity}

    return init, update


def clipped(bound: float) -> optim.Optimizer:
    return optim.chain(optim.clip_by_global_norm(bound), optim.sgd(0.1))


def labelled(rate: float) -> optim.Optimizer:
    rules = {"w": optim.sgd(0.1), "b": optim.sgd(rate)}
    return optim.by_label(rules, lambda path, leaf: path.rpartition(".")[2])


RMS = torch.optim.RMSprop
OPTIMIZERS = {
    "learning rate": (optim.adamw(0.1), optim.adamw(0.2), r"optimizer.learning_rate is 0.1 on"),
    "rule": (optim.adamw(0.1), optim.sgd(0.1), r"optimizer is adamw on ranks 0, 2 and sgd on"),
    "schedule": (
        optim.sgd(optim.linear(0.1, 0.0, 10)),
        optim.sgd(optim.linear(0.1, 0.0, 20)),
        r"optimizer.learning_rate is .*\[0.1, 0.09, 0.0.* and .*\[0.1, 0.095, 0.05, 0.0",
    ),
    "part": (clipped(1.0), clipped(2.0), r"optimizer.parts\[0\].max_norm is 1.0 on"),
    "label": (labelled(0.1), labelled(0.2), r"optimizer.parts\[1\].learning_rate is 0.1 on"),
    "torch": (
        optim.from_torch(RMS, lr=0.1),
        optim.from_torch(RMS, lr=0.2),
        r"optimizer.lr is 0.1 on ranks 0, 2 and 0.2 on rank 1",
    ),
    "state": (
        momentum(),
        momentum("ages"),
        r"optimizer.state is velocity.0: .* on ranks 0, 2 and .* ages: torch.float32 \(3,\) on",
    ),
}
OPTIONS = {
    "num_micro_batches": (1, 2, r"num_micro_batches is 1 on"),
    "bucket_bytes": (100, 300, r"bucket_bytes is 100 on"),
    "max_skipped": (10, 20, r"max_skipped is 10 on"),
    "trainable": (
        lambda path, leaf: path != "h.0.w",
        lambda path, leaf: True,
        r"trainable\[h.0.w\] is False on ranks 0, 2 and True on rank 1",
    ),
    "precision": (
        torch.bfloat16,
        torch.float16,
        r"precision.param is torch.bfloat16 on ranks 0, 2 and torch.float16 on rank 1",
    ),
    "schedule": (
        zf.ScheduleOptions(prefetch=0),
        zf.ScheduleOptions(prefetch=2),
        r"schedule.prefetch is 0 on ranks 0, 2 and 2 on rank 1",
    ),
    "compression": (
        zf.compression.Compression(grads=zf.compression.int8()),
        zf.compression.Compression(),
        r"compression.grads is BlockCodec\(bits=8.* and None on rank 1",
    ),
}


def refused(message: str, init: str, *sides: tuple[int, Any, dict[str, Any]]) -> None:
    """Check that rank 1, which differs, and the others raise before anything else is sent."""

    def main(group: zf.Group) -> list[str]:
        recorded = zf.record(group)
        stage, optimizer, options = sides[group.rank == 1]
        z = zf.zero(stage, models.mlp_loss, optimizer, recorded, **options)
        with pytest.raises(SpecMismatch, match=f"must hold the same options; option {message}"):
            z.init(models.mlp(), init=init)
        return [entry.name for entry in recorded.log]

    assert zf.simulate(3, main) == [["digest", "digest lengths", "digest texts"]] * 3


@pytest.mark.parametrize("init", ["check", "broadcast"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_ranks_with_different_optimizers_raise(case: str, init: str) -> None:
    first, second, message = OPTIMIZERS[case]
    for stage in (0, 3):
        refused(message, init, (stage, first, {}), (stage, second, {}))


@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_with_different_options_raise(option: str) -> None:
    first, second, message = OPTIONS[option]
    sides = [(2, optim.sgd(0.1), {option: value}) for value in (first, second)]
    refused(message, "check", *sides)


def test_ranks_with_different_stages_raise() -> None:
    sides = [(stage, optim.sgd(0.1), {}) for stage in (0, 1)]
    refused(r"stage is 0 on ranks 0, 2 and 1 on rank 1", "check", *sides)


def test_ranks_that_make_equal_options_apart_agree() -> None:
    def main(group: zf.Group) -> None:
        schedule = lambda step: 0.1 / (1 + step)
        for rule in (
            optim.adamw(schedule, b1=optim.constant(0.9)),
            momentum(),
            optim.masked(optim.sgd(0.1), lambda path, leaf: leaf.ndim > 1),
        ):
            options = {
                "precision": zf.Precision(loss_scale=optim.dynamic_loss_scale()),
                "compression": zf.compression.Compression(grads=zf.compression.int8()),
                "trainable": lambda path, leaf: path != "out",
            }
            z = zf.zero(1, models.mlp_loss, rule, group, **options)
            z.init(models.mlp())

    zf.simulate(2, main)


@pytest.mark.parametrize("placement", ["R", "S", None, 0])
def test_other_values_are_no_placements(placement: Any) -> None:
    def main(group: zf.Group) -> None:
        flat = zf.replicate({"w": torch.ones(64)}, group)
        with pytest.raises(OptionError, match=r"placement .* must be a placement; got"):
            zf.redistribute(flat, placement, group)
        with pytest.raises(PlacementError, match=r"a placement is zf.R, zf.P or zf.S; got"):
            zf.flat.Flat(flat.buffers, placement, flat.layout, group)

    zf.simulate(2, main)
