"""The types that a user's training loop gets; ``make lint`` checks the calls of assert_type."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, assert_type

import pytest
import torch
from torch import Tensor

import zfun as zf


class Metrics(NamedTuple):
    total: Tensor


def plain(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return (params["w"] * batch).sum()


def summed(params: dict[str, Tensor], batch: Tensor) -> Tensor | int:
    return sum((p * batch).sum() for p in params.values())


def with_aux(params: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Metrics]:
    return (params["w"] * batch).sum(), Metrics(batch.sum())


def untyped(params: Any, batch: Any) -> Any:
    return (params["w"] * batch).sum()


def test_parameters_and_aux_have_the_types_of_the_loss() -> None:
    group, params, batch = zf.process_group(), {"w": torch.ones(2)}, torch.ones(2)
    zero = zf.zero(3, plain, zf.optim.sgd(0.1), group)
    state, info = zero.step(zero.init(params), batch)
    assert_type(zero.params(state), dict[str, Tensor])
    assert_type(info.loss, Tensor)
    with_metrics = zf.zero(2, with_aux, zf.optim.sgd(0.1), group)
    state, told = with_metrics.step(with_metrics.init(params), batch)
    assert_type(told.aux, Metrics)
    assert told.aux.total == 2
    sharded = zf.shard(params, group)
    assert_type(sharded, zf.Flat[dict[str, Tensor]])
    assert_type(zf.unshard(sharded), dict[str, Tensor])
    assert torch.equal(zf.unshard(sharded)["w"], params["w"])


def test_a_loaded_state_has_the_type_of_the_given_one(tmp_path: Path) -> None:
    zero = zf.zero(3, plain, zf.optim.sgd(0.1), zf.process_group())
    state = zero.init({"w": torch.ones(2)})
    zf.save(tmp_path, state)
    loaded = zf.load(tmp_path, state)
    assert_type(loaded.state, zf.recipes.ZeroState)
    assert zero.params(loaded.state)["w"].sum() == 2


@pytest.mark.parametrize("loss", [summed, untyped, lambda p, b: (p["w"] * b).sum()])
def test_other_losses_are_taken_too(loss: Any) -> None:
    zero = zf.zero(1, loss, zf.optim.sgd(0.5), zf.process_group())
    state, _ = zero.step(zero.init({"w": torch.ones(2)}), torch.ones(2))
    assert torch.equal(zero.params(state)["w"], torch.full((2,), 0.5))


def test_type_checkers_read_the_annotations_of_the_package() -> None:
    assert resources.files("zfun").joinpath("py.typed").is_file()


def test_a_type_checker_agrees() -> None:
    pytest.importorskip("pyrefly")
    program = Path(sys.executable).with_name("pyrefly")
    command = [str(program), "check", "--output-format", "min-text", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
