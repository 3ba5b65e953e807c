"""Options are checked where they are given, by one table of types for each function."""

from __future__ import annotations

import collections
import inspect
import zlib
from typing import Any

import numpy as np
import pytest
import torch

import zfun as zf
from tests import bad_values, models
from tests.conftest import FORM
from zfun.errors import OptionError
from zfun.options import BOOL, each, integer, number, one_of, takes

# Of 11,640 values; most of them are functions of the caller that raise by themselves.
MAX_RAW = 100

untyped: Any = zf


def test_every_public_function_has_a_call() -> None:
    """A new public function needs a valid call in tests/bad_values_calls.py."""
    assert set(bad_values.public_functions()) == set(bad_values.calls.CASES)


def test_bad_values_are_refused_clearly() -> None:
    """Every argument of every public function, with 20 bad values; a part of them by the form."""
    names = sorted(bad_values.public_functions())
    # By a hash of the name, so that a new function leaves the others in the sample.
    part = {"everyday": 4, "all": 2, "search": 1}[FORM]
    names = [name for name in names if zlib.crc32(name.encode()) % part == 0]
    if FORM == "everyday":
        names = [name for name in names if name not in bad_values.calls.SLOW]
    found = collections.Counter(answer.kind for answer in bad_values.answers(names))
    share = len(names) / len(bad_values.public_functions())
    assert found["raw"] <= MAX_RAW * share
    assert (found["hang"], found["wrong"]) == (0, 0)
    assert found["refused"] > 0.5 * found.total()


@takes(stage=one_of(0, 1), rate=number(0) | None, ranks=each(integer(0), "ranks", "[0]"), sure=BOOL)
def checked(stage: int, rate: float | None = 0.5, *ranks: Any, sure: bool = True) -> Any:
    """Build nothing."""
    return stage, rate, ranks, sure


build: Any = checked


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build(2), r"stage of checked\(\) must be 0 or 1; got 2; write stage=0"),
        (lambda: build(True), r"stage of checked\(\) must be 0 or 1; got True"),
        (lambda: build(torch.ones(2)), r"got a tensor of shape \(2,\), torch.float32"),
        (lambda: build(1, -1.0), "must be a finite number of at least 0 or None; got -1.0"),
        (lambda: build(1, float("nan")), "must be a finite number of at least 0 or None; got nan"),
        (lambda: build(1, 10**400), "must be a finite number of at least 0 or None; got 1000"),
        (lambda: build(1, True), "must be a finite number of at least 0 or None; got True"),
        (lambda: build(1, 0.5, [0], [-1]), r"ranks of checked\(\) must be ranks; got \[-1\]"),
        (lambda: build(1, sure=1), "must be True or False; got 1; write sure=True"),
        (lambda: build(1, sur=1), r"checked\(\) has no option 'sur'; did you mean 'sure'\?"),
    ],
)
def test_a_table_checks_each_argument(call: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_numbers_of_numpy_are_numbers() -> None:
    assert build(1, np.float32(0.5), [np.int64(3)]) == (1, 0.5, ([3],), True)
    assert not integer(1).accepts(np.float64(2.0))
    assert not integer(1).accepts(np.bool_(True))


def test_a_checked_function_keeps_signature_and_docstring() -> None:
    assert inspect.getdoc(build) == "Build nothing."
    assert list(inspect.signature(build).parameters) == ["stage", "rate", "ranks", "sure"]
    assert list(inspect.signature(zf.stores.Offload).parameters) == [
        "params",
        "grads",
        "optimizer",
        "fraction",
    ]


def test_an_argument_without_a_kind_is_a_mistake_of_the_table() -> None:
    with pytest.raises(AssertionError, match="second"):
        takes(first=BOOL)(lambda first, second: None)


def zero(**options: Any) -> Any:
    return zf.simulate(
        1, lambda group: zf.zero(3, models.mlp_loss, zf.optim.sgd(0.1), group, **options)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: untyped.stores.Offload(optimizer="cpu"),
            r"must be a store of zf.stores or None; got 'cpu'; write optimizer=zf.stores.host\(\)",
        ),
        (
            lambda: untyped.compression.Compression(params=8),
            r"params of Compression\(\) must be a codec or None",
        ),
        (lambda: zero(trainable="w"), r"trainable of zero\(\) must be a function of path and leaf"),
        (lambda: zero(donate="yes"), r"donate of zero\(\) must be True or False; got 'yes'"),
        (
            lambda: zero(offload_optimizer="cpu"),
            r"has no option 'offload_optimizer'; write offload=zf.stores.Offload\(optimizer=",
        ),
        (lambda: zero(wire_params=8), r"write compression=zf.compression.Compression\(params="),
        (lambda: zero(secondary=1), r"write schedule=zf.ScheduleOptions\(secondary=True\)"),
        (
            lambda: untyped.zero(3, models.mlp_loss, zf.optim.sgd(0.1), 4),
            r"group of zero\(\) must be a group of ranks; got 4; write group=zf.process_group\(\)",
        ),
        (
            lambda: zf.simulate(1, lambda group: zf.zero(3, models.mlp_loss, 3, group)),
            r"an optimizer is an Optimizer or a pair of functions \(init, update\); got int",
        ),
        (lambda: untyped.optim.adamw(lr=0.1), r"adamw\(\) has no option 'lr'; write learning_rate"),
        (
            lambda: untyped.optim.adamw(0.1, betas=(0.9, 0.99)),
            r"adamw\(\) has no option 'betas'; write b1 and b2",
        ),
    ],
)
def test_options_of_other_libraries_and_wrong_types_name_the_right_ones(
    call: Any, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_an_order_names_leaves() -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(
            3, lambda params, batch: params["w"].sum(), zf.optim.sgd(0.1), group, order=["v"]
        )
        with pytest.raises(OptionError, match=r"got 'v'; zf\.planner\.order_of_use") as caught:
            z.init({"w": torch.ones(2)})
        assert caught.value.leaf == "v"

    zf.simulate(2, main)
