"""Compositions over a group that delivers in waits alone, and freezes inputs until then.

So does nccl, and so do queues of copies, over which the stores run here. The simulated group
delivers early and copies its inputs, so it hides a result that is read too soon and an input that
is overwritten.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.property.collectives.strict import StrictGroup, StrictQueue
from zfun import optim
from zfun.collectives import AllGather, AllReduce, Collective, ReduceScatter, Stream
from zfun.stores import _streams
from zfun.testing import assert_same_bits

NUM_RANKS, NUM_STEPS, NUM_COMPOSITIONS = 4, 2, 40
# One of each stage, each with a mesh.
EVERYDAY = (9, 15, 16, 22)


class Drawn(NamedTuple):
    """A composition of ``zf.zero``, drawn by number."""

    stage: int
    mesh: str
    precision: Any
    offloaded: tuple[str, ...]
    remat: str
    num_micro_batches: int
    is_clipped: bool
    is_compressed: bool
    bucket_bytes: int
    prefetch: int
    queues: bool


def drawn(number: int) -> Drawn:
    choose = random.Random(number)
    stage = number % 4
    parts = ("grads", "optimizer", "params")[: 3 if stage == 3 else 2]
    return Drawn(
        stage,
        choose.choice(["", "inner and outer", "hybrid", "three axes"]),
        choose.choice([None, torch.bfloat16, zf.Precision(compute=torch.bfloat16)]),
        tuple(part for part in parts if choose.random() < 0.4),
        choose.choice(["", "", "again", "store"]),
        choose.choice([1, 2]),
        choose.random() < 0.5,
        choose.random() < 0.3,
        choose.choice([64, 200, 100_000]),
        choose.choice([0, 1, 2]),
        choose.random() < 0.6,
    )


def _over(group: zf.Group, mesh: str) -> zf.Group:
    match mesh:
        case "inner and outer":
            return zf.mesh(group, outer=2, inner=2)["outer", "inner"]
        case "hybrid":
            return zf.mesh(group, outer=2, inner=2).group("inner", replicate="outer")
        case "three axes":
            return zf.mesh(group, a=2, b=1, c=2)["a", "b", "c"]
    return group


def loss_of(run: Drawn) -> Any:
    block: Any = lambda layer, x: torch.tanh(x @ layer["w"] + layer["b"])
    if run.remat:
        block = zf.remat(block, store=zf.stores.host() if run.remat == "store" else None)

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params["h"]:
            x = block(layer, x)
        return (x @ params["out"]).float().pow(2).mean()

    return loss


def train(group: zf.Group, run: Drawn) -> Any:
    codec = zf.compression.int8() if run.is_compressed else None
    stores: dict[str, Any] = dict.fromkeys(run.offloaded, zf.stores.host())
    rule = optim.adamw(0.01)
    z = zf.zero(
        run.stage,
        loss_of(run),
        optim.chain(optim.clip_by_global_norm(0.1), rule) if run.is_clipped else rule,
        _over(group, run.mesh),
        precision=run.precision,
        num_micro_batches=run.num_micro_batches,
        offload=zf.stores.Offload(**stores),
        compression=zf.compression.Compression(
            grads=codec, params=codec if run.stage == 3 else None
        ),
        schedule=zf.ScheduleOptions(prefetch=run.prefetch),
        bucket_bytes=run.bucket_bytes,
    )
    state, infos = z.init(models.mlp(dtype=torch.float32)), []
    for batches in models.mlp_batches(NUM_STEPS, group.size, dtype=torch.float32):
        state, info = z.step(state, batches[group.rank])
        infos.append((float(info.loss), float(info.grad_norm), bool(info.skipped)))
    return z.params(state), infos


def strictly(group: zf.Group, run: Drawn) -> Any:
    over = StrictGroup(group, queues=run.queues)
    found = train(over, run)
    over.check_nothing_left()
    return found


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=() if number in EVERYDAY else pytest.mark.slow)
        for number in range(NUM_COMPOSITIONS)
    ],
)
def test_results_in_waits_and_frozen_inputs_change_no_bit(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = drawn(number)
    expected = zf.simulate(NUM_RANKS, train, run)
    monkeypatch.setattr(_streams, "queue_of", lambda device: StrictQueue())
    found = zf.simulate(NUM_RANKS, strictly, run)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine[0], theirs[0])
        assert mine[1] == theirs[1]


def test_the_drawn_compositions_have_every_option() -> None:
    runs = [drawn(number) for number in range(NUM_COMPOSITIONS)]
    for field in Drawn._fields:
        values = {str(getattr(run, field)) for run in runs}
        assert len(values) >= 2, field
    assert all(runs[number].mesh for number in EVERYDAY)
    assert {runs[number].stage for number in EVERYDAY} == {0, 1, 2, 3}
    assert {run.remat for run in runs} == {"", "again", "store"}
    assert {part for run in runs for part in run.offloaded} == {"params", "grads", "optimizer"}
    chained = [run for run in runs if run.queues and run.mesh and not run.is_compressed]
    assert {run.stage for run in chained} == {0, 1, 2, 3}


# The stand-in finds faults.


def _early(group: zf.Group) -> float:
    out = torch.zeros(8)
    pending = group.start(Collective(AllGather()), torch.ones(2), out)
    seen = float(out.sum())
    pending.wait()
    assert out.tolist() == [1.0] * 8
    return seen


def test_a_result_is_not_there_before_its_wait() -> None:
    found = zf.simulate(NUM_RANKS, lambda group: _early(StrictGroup(group, queues=False)))
    assert all(seen != seen for seen in found)


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("op", [AllReduce(), ReduceScatter(), AllGather()])
@pytest.mark.parametrize("over", ["", "inner and outer"])
def test_an_input_that_is_overwritten_is_found(op: Any, queues: bool, over: str) -> None:
    def main(group: zf.Group) -> None:
        whole = _over(StrictGroup(group, queues=queues), over)
        x = torch.ones(8000)
        pending = whole.start(Collective(op, "grads", stream=Stream.GRADS), x)
        x.zero_()
        pending.wait()

    with pytest.raises(AssertionError, match=r"somebody wrote to the input of .* 'grads'"):
        zf.simulate(NUM_RANKS, main)


def test_an_output_that_is_written_is_found() -> None:
    def main(group: zf.Group) -> None:
        out = torch.zeros(8)
        pending = StrictGroup(group, queues=False).start(
            Collective(AllGather(), "params"), torch.ones(2), out
        )
        out.zero_()
        pending.wait()

    with pytest.raises(AssertionError, match="somebody wrote to the output of all_gather 'params'"):
        zf.simulate(NUM_RANKS, main)


def test_a_collective_that_nobody_waits_for_is_found() -> None:
    def main(group: zf.Group) -> None:
        over = StrictGroup(group, queues=False)
        over.start(Collective(AllReduce()), torch.ones(2))
        over.check_nothing_left()

    with pytest.raises(AssertionError):
        zf.simulate(NUM_RANKS, main)
