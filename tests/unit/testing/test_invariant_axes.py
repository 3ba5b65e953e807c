"""assert_invariant over a mesh passes on right programs, and names the axis of planted bugs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from tests.conftest import FORM
from zfun import optim
from zfun.collectives import leave
from zfun.errors import OptionError
from zfun.parallel import Cut, Held, ModelAxis, ParallelLoss
from zfun.testing import assert_invariant

PLAN = {"*up": "colwise", "*down": "rowwise", "*gain": "replicated_with_grad_allreduce"}


def params() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=random) / 2
    return [{"gain": draw(1), "up": draw(4, 3), "down": draw(3, 4)} for _ in range(2)]


BATCH = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def block(p: Any, x: Tensor) -> Tensor:
    return x + F.linear(torch.tanh(F.linear(x, p["up"])) * p["gain"], p["down"])


def last(p: Any, x: Tensor, batch: Tensor) -> Tensor:
    return (block(p, x) - batch.flip(-1)).square().mean()


def plain(p: Any, batch: Tensor) -> Tensor:
    return last(p[1], block(p[0], batch), batch)


check = functools.partial(assert_invariant, plain, params(), BATCH, optim.sgd(0.1), num_steps=2)


def message(make: Callable[[Any], Any], **sizes: int) -> str:
    with pytest.raises(AssertionError) as caught:
        check(make, mesh=sizes)
    return str(caught.value)


def three_axes(mesh: Any) -> Any:
    stages = [zf.tensor_parallel(stage, mesh["tp"], PLAN) for stage in (block, last)]
    return zf.pipeline(stages, mesh["pp"], num_micro_batches=2)


def test_a_right_program_passes_at_every_stage() -> None:
    mesh = {"pp": 2, "dp": 2 if FORM != "everyday" else 1, "tp": 2}
    assert_invariant(plain, params(), BATCH, optim.adamw(0.01), three_axes, mesh=mesh, num_steps=2)


def test_frozen_leaves_lie_over_the_axes_too() -> None:
    trained = lambda path, leaf: "down" in path
    cut = lambda mesh: zf.tensor_parallel(plain, mesh["tp"], PLAN)
    check(cut, mesh={"dp": 2, "tp": 2}, trainable=trained)


def test_a_forgotten_sum_over_an_axis_names_the_leaf() -> None:
    plan = {glob: style for glob, style in PLAN.items() if glob != "*gain"}
    text = message(lambda mesh: zf.tensor_parallel(plain, mesh["tp"], plan), dp=2, tp=2)
    assert "stage 0 over the mesh dp=1, tp=2" in text
    assert "the gradient of leaf '1.gain' differs between ranks" in text
    assert "'replicated_with_grad_allreduce'" in text


COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "a softmax": lambda h: h.softmax(-1),
    "halves": lambda h: torch.cat(h.chunk(2, -1)[::-1], -1),
    "two heads of any width": lambda h: h.view(len(h), 2, -1).softmax(-1).view_as(h),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_function_of_all_columns_on_those_of_a_rank_is_found(name: str) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return F.linear(COLUMNS[name](F.linear(x, p["up"])), p["down"]).pow(3).mean()

    leaves, styles = params()[0], {"up": "colwise", "down": "rowwise"}
    del leaves["gain"]
    cut = lambda mesh: zf.tensor_parallel(loss, mesh["tp"], styles)
    with pytest.raises(AssertionError, match=r"stage 0 over the mesh dp=1, tp=2"):
        assert_invariant(loss, leaves, BATCH, optim.sgd(0.1), cut, mesh={"dp": 1, "tp": 2})


def test_a_wrong_divisor_names_the_axis_that_has_its_size() -> None:
    def halved(mesh: Any) -> Any:
        cut = zf.tensor_parallel(plain, mesh["tp"], PLAN)
        return ParallelLoss(lambda p, x: cut(p, x) / mesh.sizes["tp"], cut.model_axes)

    text = message(halved, dp=2, tp=2)
    assert "the gradient of leaf '0.gain' differs" in text
    assert "stage 0 over the mesh dp=1, tp=2" in text
    assert "wrong divisor: the leaf is off by a factor of 0.5, and axis 'tp' has 2 ranks" in text


@pytest.mark.parametrize("kind", [None, Held((0, 1))])
def test_a_leaf_that_several_ranks_hold_has_one_value(kind: Held | None) -> None:
    def loss_over(mesh: Any) -> Any:
        axis = mesh["xp"]

        def part(p: Any, x: Tensor) -> Tensor:
            whole = (x * p["w"]).square().mean()
            # Parts of a sum, of which each rank takes another share.
            return whole if axis.size == 1 else leave(whole * [0.25, 0.75][axis.rank], axis)

        rule = lambda path, leaf: kind and Held(tuple(range(axis.size)))
        return ParallelLoss(part, [ModelAxis(axis, rule)])

    with pytest.raises(AssertionError) as caught:
        assert_invariant(
            lambda p, x: (x * p["w"]).square().mean(),
            {"w": torch.ones(3)},
            BATCH,
            optim.sgd(0.1),
            loss_over,
            mesh={"dp": 2, "xp": 2},
        )
    assert "the copies of leaf 'w' differ along axis 'xp'" in str(caught.value)
    assert "dp=1, xp=2" in str(caught.value)


def test_a_forgotten_message_names_the_axis_without_which_the_case_passes() -> None:
    def loss_over(mesh: Any) -> Any:
        def part(p: Any, x: Tensor) -> Tensor:
            x = x.chunk(mesh.sizes["xp"], -1)[mesh.coordinates["xp"]]
            return F.linear(x, p["w"]).square().sum()  # without leave()

        return ParallelLoss(part, [ModelAxis(mesh["xp"], lambda path, leaf: Cut(1))])

    with pytest.raises(AssertionError) as caught:
        assert_invariant(
            lambda p, x: F.linear(x, p["w"]).square().sum(),
            {"w": torch.ones(2, 4)},
            torch.randn(4, 4, generator=torch.Generator().manual_seed(2)),
            optim.sgd(0.1),
            loss_over,
            mesh={"xp": 2},
        )
    assert "stage 0 over the mesh xp=2, 1 step" in str(caught.value)
    assert "the case passes with one rank along 'xp' (2 ranks)" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": {"tp": 2}}, "got no make="),
        ({"mesh": {"tp": 2}, "make": three_axes, "sizes": (2,)}, "got sizes= beside mesh="),
        ({"mesh": {"pp": 1, "dp": 3, "tp": 1}, "make": three_axes}, "got 8 rows for 3 ranks"),
    ],
)
def test_options_that_do_not_go_with_a_mesh_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        check(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_right_program_passes_in_other_dtypes(dtype: torch.dtype) -> None:
    """Gradients over a mesh are differences of parameters, which round."""
    large = [{name: x + 1.0 for name, x in layer.items()} for layer in params()]
    cut = lambda mesh: zf.tensor_parallel(plain, mesh["tp"], PLAN)
    narrow = zf.tree.map(lambda x: x.to(dtype), large)
    assert_invariant(
        plain,
        narrow,
        BATCH.to(dtype),
        optim.sgd(0.1),
        cut,
        mesh={"dp": 2, "tp": 2},
        num_steps=2,
        dtype=None,
    )


def test_the_first_error_stays_where_a_smaller_mesh_has_another() -> None:
    def make(mesh: Any) -> Any:
        def failing(p: Any, batch: Tensor) -> Tensor:
            raise KeyError("the first") if mesh.sizes["tp"] == 2 else ValueError("another")

        return zf.tensor_parallel(failing, mesh["tp"], PLAN)

    assert "KeyError" in message(make, dp=2, tp=2)
