"""Functions around a loss over model axes: they keep its axes, or a run refuses them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from zfun import optim
from zfun.errors import LeafError, OptionError
from zfun.parallel import dispatch, expert_parallel

WIDE = torch.float64
PLAN = {"up": "colwise", "down": "rowwise"}


def params() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {
        "up": torch.randn(8, 4, dtype=WIDE, generator=chance),
        "down": torch.randn(4, 8, dtype=WIDE, generator=chance),
    }


def block(held: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, held["up"])), held["down"])


def plain(held: dict[str, Tensor], batch: Tensor) -> Tensor:
    return block(held, batch).square().mean()


def one_step(loss: Any, group: zf.Group, whole: Any) -> tuple[float, float, Any]:
    z = zf.zero(1, loss, optim.sgd(0.1), group)
    state, info = z.step(z.init(whole), torch.ones(2, 4, dtype=WIDE))
    return float(info.loss), float(info.grad_norm), z.params(state)


def over_tensors(group: zf.Group, around: Callable[[Any], Any]) -> Any:
    mesh = zf.mesh(group, dp=1, tp=2)
    loss = zf.tensor_parallel(plain, mesh["tp"], PLAN)
    return one_step(around(loss), mesh["dp"], params())


def hidden(loss: Any, factor: float = 1.0) -> Callable[[Any, Tensor], Tensor]:
    """A function around a loss, into which nobody can look."""

    def scaled(held: Any, batch: Tensor) -> Tensor:
        return factor * loss(held, batch)

    return scaled


KEEPING: dict[str, Callable[[Any], Any]] = {
    "remat": zf.remat,
    "partial": functools.partial,
    "cast": functools.partial(zf.cast, dtype=WIDE),
    "two": lambda loss: zf.remat(functools.partial(loss)),
    "wraps": lambda loss: functools.wraps(loss)(hidden(loss)),
}


@pytest.mark.filterwarnings("ignore:remat.. around a whole loss")
@pytest.mark.parametrize("name", KEEPING)
def test_a_function_that_shows_the_loss_inside_has_its_axes(name: str) -> None:
    (expected,) = zf.simulate(1, lambda group: one_step(plain, group, params()))
    for found in zf.simulate(2, over_tensors, KEEPING[name]):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_function_that_hides_the_axes_of_matrices_is_refused() -> None:
    with pytest.raises(OptionError, match=r"function around a loss over .*tp.*functools\.wraps"):
        zf.simulate(2, over_tensors, hidden)


def test_a_function_that_hides_the_axis_of_experts_is_refused() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.mesh(group, dp=1, ep=2)

        def loss(held: dict[str, Tensor], x: Tensor) -> Tensor:
            experts = lambda rows, ids: rows * held["scales"][ids, None]
            chosen = torch.zeros(2, 1, dtype=torch.int64)
            return dispatch(experts, x, chosen, x[:, :1], mesh["ep"], 2).sum()

        mean = expert_parallel(loss, mesh["ep"], ["scales"])
        one_step(hidden(mean), mesh["dp"], {"scales": torch.ones(2, dtype=WIDE)})

    with pytest.raises(OptionError, match=r"function around a loss over .*ep"):
        zf.simulate(2, main)


def test_a_loss_of_pieces_is_called_as_it_likes_outside_of_a_run() -> None:
    def main(group: zf.Group) -> float:
        loss = zf.tensor_parallel(plain, group, PLAN)
        pieces = {
            path: loss.model_axes[0].rule(path, leaf).piece(leaf, group.rank, 2)  # type: ignore[union-attr]
            for path, leaf in params().items()
        }
        return hidden(loss)(pieces, torch.ones(2, 4, dtype=WIDE)).item()

    expected = plain(params(), torch.ones(2, 4, dtype=WIDE)).item()
    assert zf.simulate(2, main) == pytest.approx([expected] * 2, rel=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_stage_is_recomputed_with_its_batch_and_its_axes(stage: int) -> None:
    """As a function of three arguments, and as a loss over tensors."""

    def last(held: dict[str, Tensor], x: Tensor, batch: Tensor) -> Tensor:
        return (block(held, x) - batch).square().mean()

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, pp=2, dp=1, tp=2)
        cut = lambda fn: zf.remat(zf.tensor_parallel(fn, mesh["tp"], PLAN))
        loss = zf.pipeline([cut(block), cut(last)], mesh["pp"], num_micro_batches=2)
        z = zf.zero(stage, loss, optim.sgd(0.1), mesh["dp"])
        state, info = z.step(z.init([params(), params()]), torch.ones(2, 4, dtype=WIDE))
        return float(info.loss), float(info.grad_norm), z.params(state)

    def whole(held: Any, batch: Tensor) -> Tensor:
        return last(held[1], block(held[0], batch), batch)

    (expected,) = zf.simulate(1, lambda group: one_step(whole, group, [params(), params()]))
    for found in zf.simulate(4, main):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_used", [True, False])
def test_a_stage_without_used_leaves_beside_gradients_of_zero(is_used: bool) -> None:
    """Of all ranks, one that uses a leaf makes a step; none is refused on every rank alike."""
    factor = 0.0 if is_used else None

    def first(held: dict[str, Tensor], x: Tensor) -> Tensor:
        return x if factor is None else x + factor * held["w"]

    def last(held: dict[str, Tensor], x: Tensor) -> Tensor:
        return x.mean()

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, pp=2, dp=2)
        loss = zf.pipeline([first, last], mesh["pp"], num_micro_batches=1)
        z = zf.zero(1, loss, optim.sgd(0.1), mesh["dp"])
        state = z.init([{"w": torch.ones(3)}, {"w": torch.ones(3)}])
        try:
            return float(z.step(state, torch.ones(2, 3))[1].grad_norm)
        except LeafError as error:
            return str(error)[:32]

    expected = 0.0 if is_used else "a loss must use its parameters; "
    assert zf.simulate(4, main) == [expected] * 4


def test_a_tensor_axis_gathers_what_the_data_axis_alone_gathers() -> None:
    """A layer at a time, in the first step and in the next."""
    layers = {str(n): {"up": torch.eye(4), "down": torch.eye(4)} for n in range(3)}

    def loss(held: Any, x: Tensor) -> Tensor:
        for layer in held.values():
            x = x + F.linear(F.linear(x, layer["up"]), layer["down"])
        return x.square().mean()

    def main(group: zf.Group, tp: int) -> list[list[tuple[str, str]]]:
        mesh = zf.mesh(group, dp=2, tp=tp)
        log = zf.record(mesh["dp"])
        plan = {"*.up": "colwise", "*.down": "rowwise"}
        whole = zf.tensor_parallel(loss, mesh["tp"], plan) if tp > 1 else loss
        zero = zf.zero(3, whole, optim.sgd(0.1), log, bucket_bytes=1)
        state, found = zero.init(layers), []
        for _ in range(3):
            begin = len(log.log)
            state, _ = zero.step(state, torch.ones(2, 4))
            sent = [(entry.kind, entry.part) for entry in log.log[begin:]]
            found.append([x for x in sent if "bucket" in x[1]])
        return found

    (expected, *_), found = zf.simulate(2, main, 1), zf.simulate(4, main, 2)
    # Six sums, and twelve gathers; later steps keep the last two buckets of forward.
    assert [len(step) for step in expected] == [18, 16, 16]
    assert found == [expected] * 4
