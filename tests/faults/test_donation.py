"""A state whose buffers a step has taken over raises at every use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from tests.faults.programs.small import EACH_STAGE, batch_of, fresh
from zfun import optim, tree
from zfun.errors import (
    DonatedStateError,
    OptionError,
)
from zfun.testing import assert_same_bits, same_bits

pytestmark = pytest.mark.timeout(60)


@EACH_STAGE
@pytest.mark.parametrize("offload", [False, True])
def test_using_a_donated_state_names_the_step_that_took_the_buffers(
    stage: int, offload: bool, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> None:
        stores = zf.stores.Offload(optimizer=zf.stores.host()) if offload else None
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, offload=stores)
        old = z.init(fresh())
        new, _ = z.step(old, batch_of(group))
        rule = (
            r"a donated value must not be used again; its buffers were taken over by step 0 "
            r"at .*test_donation\.py:\d+; use the value"
        )
        uses = [
            lambda: z.step(old, batch_of(group)),
            lambda: z.params(old),
            lambda: zf.describe(old),
            lambda: zf.unshard(old.params),
            lambda: old.params.buffers,
            lambda: tree.leaves(old.params),
            lambda: zf.redistribute(old.params, zf.S, group).buffers,
            lambda: zf.save(tmp_path, old),
        ]
        if not offload:
            uses.append(lambda: zf.unshard(old.opt_state.mu))
        for use in uses:
            with pytest.raises(DonatedStateError, match=rule):
                use()
        # The new state is whole, and the old state still prints.
        assert "rank" in repr(old.params)
        newer, _ = z.step(new, batch_of(group, 1))
        assert z.params(newer)["out"].shape == (5,)

    zf.simulate(2, main)


@EACH_STAGE
def test_without_donation_a_state_can_be_used_again(stage: int) -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, donate=False)
        old = z.init(fresh())
        before = z.params(old)
        first, second = (z.step(old, batch_of(group))[0] for _ in range(2))
        assert_same_bits(z.params(first), z.params(second))
        assert_same_bits(z.params(old), before)
        assert not same_bits(z.params(first), before)

    zf.simulate(2, main)


def test_apply_may_donate() -> None:
    def main(group: zf.Group) -> None:
        optimizer = zf.shard_optimizer(optim.adamw(0.1), group)
        params = zf.replicate(fresh(), group)
        state = optimizer.init(params)
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        _, grads = vg(params, batch_of(group))
        new, new_state = zf.apply(optimizer, grads, state, params, donate=True)
        for use in (
            lambda: params.buffers,
            lambda: state.mu.buffers,
            lambda: vg(params, batch_of(group)),
        ):
            with pytest.raises(
                DonatedStateError,
                match=r"taken over by zf.apply\(..., donate=True\) at .*test_donation\.py",
            ):
                use()
        # The same state twice, the second time under an old name.
        with pytest.raises(DonatedStateError):
            zf.apply(optimizer, vg(new, batch_of(group))[1], state, new, donate=True)
        zf.apply(optimizer, vg(new, batch_of(group))[1], new_state, new)

    zf.simulate(2, main)


def test_a_line_of_a_folder_whose_path_begins_like_the_package_is_named() -> None:
    name = str(Path(f"{Path(zf.__file__).parent}_models", "train.py"))
    values: dict[str, Any] = {"call_site": zf.flat.call_site}
    exec(compile("found = call_site()", name, "exec"), values)
    assert values["found"] == f"{name}:1"


def test_only_flat_values_can_be_donated() -> None:
    params = {"w": torch.ones(2)}
    with pytest.raises(
        OptionError, match="donate=True takes over flat buffers; got trees of tensors"
    ):
        zf.apply(optim.sgd(0.1), params, optim.sgd(0.1).init(params), params, donate=True)

    def main(group: zf.Group) -> None:
        _, grads = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)(
            fresh(), batch_of(group)
        )
        with pytest.raises(
            OptionError,
            match="donate=True takes over flat buffers; got parameters as a tree of tensors",
        ):
            zf.apply(optim.sgd(0.1), grads, (), fresh(), donate=True)

    zf.simulate(1, main)
