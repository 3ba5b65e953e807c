"""Limits of traffic and memory, duals, strategies, and the plugin of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import optim
from zfun.collectives import all_reduce
from zfun.errors import OptionError
from zfun.layout import Layout
from zfun.recipes import Zero
from zfun.testing import (
    assert_adjoint,
    assert_memory,
    assert_same_bits,
    assert_traffic,
    bucket_sizes,
    group_sizes,
    layouts,
    micro_batch_splits,
    schedules,
)
from zfun.testing.plugin import parse_sizes

BATCHES = models.mlp_batches(2, 3)


class Unreduced(torch.autograd.Function):
    """An all-reduce whose backward forgets the other ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: zf.Group) -> Tensor:  # type: ignore[override]
        return all_reduce(x.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def test_a_dual_that_is_not_the_transpose_is_found() -> None:
    inputs = [torch.ones(3), torch.zeros(3)]
    assert_adjoint(all_reduce, inputs)
    assert_adjoint(lambda x, group: all_reduce(x.sin(), group), inputs)
    with pytest.raises(AssertionError, match=r"transpose of its derivative; the inner product"):
        assert_adjoint(Unreduced.apply, inputs)


def test_traffic_and_memory_have_limits() -> None:
    def by_default(group: zf.Group) -> Zero:
        return zf.zero(3, models.mlp_loss, optim.adamw(0.05), group)

    def make(group: zf.Group) -> Zero:
        schedule = zf.ScheduleOptions(reuse_distance=0)
        return zf.zero(3, models.mlp_loss, optim.adamw(0.05), group, schedule=schedule)

    sent = assert_traffic(make, models.mlp(), BATCHES, at_most=3)
    assert sent == {"params": 2.0, "grads": 1.0}
    # The only bucket stays for backward.
    sent = assert_traffic(by_default, models.mlp(), BATCHES, at_most=2)
    assert sent == {"params": 1.0, "grads": 1.0}
    with pytest.raises(AssertionError, match=r"may send 2 Ψ .* sent 2 of params, 1 of grads"):
        assert_traffic(make, models.mlp(), BATCHES, at_most=2)
    live = assert_memory(make, models.mlp(), BATCHES[0][0], size=2, at_most=10**9)
    peak = live.peak.device.total
    assert_memory(make, models.mlp(), BATCHES[0][0], size=2, at_most=peak)
    with pytest.raises(AssertionError, match=rf"(?s)rank 0 of 2 holds {peak:,} at .*\ngathered"):
        assert_memory(make, models.mlp(), BATCHES[0][0], size=2, at_most=peak - 1)


@settings(max_examples=examples(20))
@given(layouts())
def test_layouts_hold_every_leaf_once_and_divide_among_the_ranks(layout: Layout) -> None:
    for bucket in layout.buckets:
        assert bucket.padded_numel % layout.size == 0
        assert bucket.padded_numel >= bucket.numel
        assert sum(layout.leaves[leaf].numel for leaf in bucket.leaves) <= bucket.numel
    held = sorted(leaf for bucket in layout.buckets for leaf in bucket.leaves)
    assert held == list(range(len(layout.leaves)))


@settings(max_examples=examples(10))
@given(
    size=group_sizes(),
    schedule=schedules(),
    bucket_bytes=bucket_sizes(),
    count=micro_batch_splits(4),
    seed=st.integers(0, 9),
)
def test_drawn_schedules_sizes_and_splits_train_alike(
    size: int, schedule: zf.ScheduleOptions, bucket_bytes: int, count: int, seed: int
) -> None:
    batches = models.mlp_batches(1, size)

    def main(group: zf.Group, options: zf.ScheduleOptions | None) -> Any:
        zero = zf.zero(
            3,
            models.mlp_loss,
            optim.sgd(0.1),
            group,
            schedule=options,
            bucket_bytes=bucket_bytes,
            num_micro_batches=count,
        )
        state, _ = zero.step(zero.init(models.mlp(seed=seed)), batches[0][group.rank])
        return zero.params(state)

    drawn, plain = (zf.simulate(size, main, options)[0] for options in (schedule, None))
    assert_same_bits(drawn, plain)
    assert not torch.equal(drawn["out"], models.mlp(seed=seed)["out"])


# The plugin.

_TESTS = """
def test_each(zfun_size):
    assert zfun_size > 0

def test_all(zfun_sizes):
    assert zfun_sizes == (2, 5)

def test_none():
    pass
"""


def pytest_of(folder: Path, *flags: str) -> str:
    (folder / "test_sizes.py").write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "zfun.testing.plugin", *flags]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_the_plugin_gives_tests_their_sizes(tmp_path: Path) -> None:
    text = pytest_of(tmp_path, "--zfun-sizes", "2,5")
    assert "test_each[2 ranks] PASSED" in text
    assert "test_each[5 ranks] PASSED" in text
    assert "test_all[all sizes] PASSED" in text
    assert "4 passed" in text


@pytest.mark.slow
@pytest.mark.processes
def test_the_plugin_refuses_sizes_that_are_none(tmp_path: Path) -> None:
    text = pytest_of(tmp_path, "--zfun-sizes", "2,none")
    assert "--zfun-sizes takes numbers of ranks, 1 or more, with commas between" in text


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1.5", "two"])
def test_sizes_are_numbers_with_commas(text: str) -> None:
    with pytest.raises(OptionError, match=r"takes numbers of ranks.*write --zfun-sizes 1,2,4"):
        parse_sizes(text)
