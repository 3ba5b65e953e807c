"""Copies of a state: ``copy.deepcopy`` makes one, and pickle refuses with a remedy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from zfun import optim
from zfun.errors import DonatedStateError, OptionError
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(60)

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SAVERS: dict[str, Callable[[Any], Any]] = {
    "pickle": pickle.dumps,
    "torch": lambda value: torch.save(value, io.BytesIO()),
}


def trained(group: zf.Group, stage: int, **options: Any) -> Any:
    """Return the functions of a stage, the state after a step, and the batches of other steps."""
    z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, bucket_bytes=300, **options)
    batches = [step[group.rank] for step in models.mlp_batches(3, group.size)]
    state, _ = z.step(z.init(models.mlp()), batches.pop(0))
    return z, state, batches


@pytest.mark.parametrize("offload", [None, zf.stores.Offload(optimizer=zf.stores.host())])
@EACH_STAGE
def test_a_copy_keeps_its_values_and_trains_alike(stage: int, offload: Any) -> None:
    def main(group: zf.Group) -> None:
        z, state, batches = trained(group, stage, offload=offload)
        held, before = copy.deepcopy(state), z.params(state)
        assert held.params.group is group
        results = []
        for start in (state, held):
            assert_same_bits(z.params(start), before)
            losses = []
            for batch in batches:
                start, info = z.step(start, batch)
                losses.append(info.loss)
            results.append((losses, z.params(start)))
        assert_same_bits(results[0], results[1])

    zf.simulate(2, main)


def test_a_copy_of_a_donated_state_raises() -> None:
    def main(group: zf.Group) -> None:
        z, state, batches = trained(group, 1)
        z.step(state, batches[0])
        with pytest.raises(DonatedStateError, match="taken over by step 1"):
            copy.deepcopy(state)
        with pytest.raises(DonatedStateError) as caught:
            z.step(state=state, batch=batches[0])
        assert caught.value.step == state.step

    zf.simulate(2, main)


@pytest.mark.parametrize("saver", SAVERS)
def test_a_state_that_is_pickled_raises_with_the_remedy(saver: str) -> None:
    def main(group: zf.Group) -> None:
        z, state, _ = trained(group, 3)
        message = (
            r"a Flat cannot be pickled or saved, .*; got Flat\(S, rank .*; save it with zf.save"
        )
        with pytest.raises(OptionError, match=message):
            SAVERS[saver](state)
        SAVERS[saver](z.params(state))

    zf.simulate(2, main)
    main(zf.process_group())


def test_a_group_that_is_pickled_raises_with_the_remedy() -> None:
    def main(group: zf.Group) -> None:
        for each in (group, zf.record(group), zf.split(group, inner=1), zf.process_group()):
            for save in (*SAVERS.values(), copy.deepcopy):
                with pytest.raises(OptionError, match=r"make a group in each process with"):
                    save(each)

    zf.simulate(2, main)
