"""A read or write of one rank alone at stage 3 pairs with no collective of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import config, net, ranks
from zfun.errors import CollectiveMismatch


def engine_of(group: zf.Group) -> Any:
    return deepspeed.initialize(model=net(), config=config(3), mpu=ranks(group))[0]


def gather_all(engine: Any) -> None:
    for param in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([param]):
            pass


def write(engine: Any, index: int) -> None:
    with torch.no_grad():
        list(engine.module.parameters())[index].zero_()


READS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "state_dict": (
        "on all ranks.*save_16bit_model",
        lambda engine: engine.module.state_dict(),
        gather_all,
    ),
    "part": (
        "on all ranks.*save_16bit_model",
        lambda engine: next(engine.module.children()).state_dict(),
        gather_all,
    ),
    "saved": (
        "on all ranks.*save_16bit_model",
        lambda engine: engine.module.state_dict(),
        lambda engine: engine.module_state_dict(),
    ),
    "read": (
        "read a parameter of stage 3 on all ranks",
        lambda engine: [param.sum() for param in engine.module.parameters()],
        gather_all,
    ),
    "other": (
        "read a parameter of stage 3 on all ranks",
        lambda engine: next(engine.module.parameters()).sum(),
        lambda engine: list(engine.module.parameters())[1].sum(),
    ),
}


@pytest.mark.shows(
    "`module.state_dict()` of stage 3",
    "different",
    "whole: every rank calls, also where rank 0 alone saves, and rank 0 alone ends in an error; "
    "DeepSpeed has empty tensors there",
)
@pytest.mark.parametrize("case", READS)
def test_a_read_of_one_rank_ends_at_once(case: str) -> None:
    remedy, alone, together = READS[case]

    def main(group: zf.Group) -> None:
        engine = engine_of(group)
        (alone if group.rank == 0 else together)(engine)

    with pytest.raises(CollectiveMismatch, match=rf"(state_dict\(\)|a read of).*{remedy}"):
        zf.simulate(2, main)


def test_a_write_of_one_leaf_pairs_with_no_other() -> None:
    def main(group: zf.Group) -> None:
        engine = deepspeed.initialize(
            model=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
            config=config(3),
            mpu=ranks(group),
        )[0]
        # Of one shape.
        write(engine, 2 * group.rank)

    with pytest.raises(CollectiveMismatch, match=r"a (read|write) of"):
        zf.simulate(2, main)


def test_all_ranks_read_whole_weights_in_every_way() -> None:
    def main(group: zf.Group) -> None:
        engine = engine_of(group)
        whole, expected = engine.module.state_dict(), net().state_dict()
        for name, value in engine.module_state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=0)
            torch.testing.assert_close(whole[name], expected[name], rtol=0, atol=0)
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                torch.testing.assert_close(whole[name], param.detach(), rtol=0, atol=0)

    zf.simulate(2, main)
