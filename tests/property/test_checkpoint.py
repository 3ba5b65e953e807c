"""Law 8: a checkpoint is the state, for every pair of sizes and compositions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import zfun as zf
from tests.checkpoints import (
    OPTIMIZERS,
    PRECISIONS,
    Case,
    directories,
    load_into,
    replace,
    save_after,
    unbroken,
)
from tests.conftest import examples
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(300)


@st.composite
def cases(draw: Any, optimizer: str) -> Case:
    size = draw(st.integers(1, 8))
    inner = draw(st.sampled_from([0, *(n for n in (2, 4) if size % n == 0 and size > n)]))
    return Case(
        size=size,
        stage=draw(st.integers(0, 2 if optimizer == "onebit" else 3)),
        inner=inner,
        precision=draw(st.sampled_from(list(PRECISIONS))),
        optimizer=optimizer,
        store=draw(st.sampled_from(["", "", "host", "nvme"])),
        bucket_bytes=draw(st.sampled_from([1, 64, 300, 1 << 20])),
        seed=draw(st.integers(1, 3)),
    )


@st.composite
def pairs(draw: Any) -> tuple[Case, Case]:
    optimizer = draw(st.sampled_from([name for name in OPTIMIZERS if name != "onebit"]))
    first, second = draw(cases(optimizer)), draw(cases(optimizer))
    if optimizer == "muon":
        # Muon steps real matrices, in the dtype of the parameters.
        assume(first.precision == second.precision == "as it is")
    return first, second


WIDE = ("as it is", "computes bfloat16")


def check_values(first: Case, second: Case) -> None:
    with directories() as (saved, stores):
        expected = zf.simulate(first.size, save_after, first, saved, stores)[0]
        for found, _ in zf.simulate(second.size, load_into, second, saved, stores):
            assert_same_bits(found, expected, f"{second} loaded from {first}")


def check_unbroken(first: Case, second: Case) -> None:
    """The unbroken run has the new composition; at one size, compositions have equal bits."""
    second = replace(second, size=first.size, inner=first.inner, precision=first.precision)
    second = replace(second, seed=first.seed)
    with directories() as (saved, stores):
        zf.simulate(first.size, save_after, first, saved, stores)
        expected = zf.simulate(second.size, unbroken, second, stores, 4)[0]
        for _, found in zf.simulate(second.size, load_into, second, saved, stores, range(2, 4)):
            assert_same_bits(found, expected, f"{second} loaded from {first}")


@example((Case(4, 3), Case(3, 1, precision="bfloat16")))
@example((Case(4, 2, 2, "float16"), Case(5, 3, store="nvme")))
@example((Case(3, 0, precision="bfloat16", store="host"), Case(4, 3, 2, "float16")))
@given(pairs())
@settings(max_examples=examples(6))
def test_a_loaded_state_has_the_values_that_were_saved(pair: tuple[Case, Case]) -> None:
    check_values(*pair)


@pytest.mark.slow
@given(pairs())
@settings(max_examples=examples(40))
def test_a_loaded_state_has_the_values_that_were_saved_at_length(pair: tuple[Case, Case]) -> None:
    check_values(*pair)


@example((Case(4, 3, frozen=True), Case(4, 1, 2, frozen=True)))
@given(pairs())
@settings(max_examples=examples(4))
def test_a_loaded_run_goes_on_as_one_that_never_stopped(pair: tuple[Case, Case]) -> None:
    check_unbroken(*pair)


@pytest.mark.slow
@given(pairs())
@settings(max_examples=examples(30))
def test_a_loaded_run_goes_on_as_one_that_never_stopped_at_length(
    pair: tuple[Case, Case],
) -> None:
    check_unbroken(*pair)


@pytest.mark.slow
@given(pairs(), st.integers(0, 3))
@settings(max_examples=examples(20))
def test_runs_of_one_size_go_on_alike_whatever_was_saved(
    pair: tuple[Case, Case], stage: int
) -> None:
    first, second = pair
    third = replace(second, stage=stage, store="", bucket_bytes=512)
    with directories() as (saved, stores):
        zf.simulate(first.size, save_after, first, saved, stores)
        one = zf.simulate(second.size, load_into, second, saved, stores, range(2, 4))
        other = zf.simulate(third.size, load_into, third, saved, stores, range(2, 4))
    assert_same_bits(one[0][1], other[0][1], f"{second} and {third} from {first}")


@given(cases("onebit"))
@settings(max_examples=examples(4))
def test_onebit_adam_goes_on_with_its_errors(case: Case) -> None:
    """The errors of messages belong to ranks, so the size and the sharding stay."""
    assume(not case.inner and case.precision in WIDE)
    with directories() as (saved, stores):
        zf.simulate(case.size, save_after, case, saved, stores, 4)
        expected = zf.simulate(case.size, unbroken, case, stores, 6)[0]
        found = zf.simulate(case.size, load_into, case, saved, stores, range(4, 6))
    assert_same_bits(found[0][1], expected, f"{case}")
