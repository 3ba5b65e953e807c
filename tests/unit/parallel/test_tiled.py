"""Functions run tile by tile: exact, with the activations of one tile, and with no more gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import zfun as zf
from tests.conftest import examples
from tests.unit.planner import test_memory
from zfun.errors import LeafError, OptionError
from zfun.parallel import tiled, token_mean
from zfun.testing import assert_same_bits

WIDTH, WIDER, VOCAB = 8, 24, 40


def params(layers: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

    blocks = [{"up": draw(WIDTH, WIDER), "down": draw(WIDER, WIDTH)} for _ in range(layers)]
    return {"blocks": blocks, "head": draw(WIDTH, VOCAB)}


def mlp(x: Tensor, *, layer: Any) -> Tensor:
    return x + F.gelu(x @ layer["up"]) @ layer["down"]


def head(x: Tensor, labels: Tensor, *, weight: Tensor) -> Any:
    return token_mean(x @ weight, labels)


def loss_of(num_tiles: int | None, *, again: bool = False) -> Any:
    """A loss with tiles, or without, whose blocks are recomputed or not."""
    cut = (lambda fn: tiled(fn, num_tiles)) if num_tiles else lambda fn: fn
    run, end = cut(mlp), cut(head)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, labels = batch
        for layer in params["blocks"]:
            block = lambda layer, x: run(x, layer=layer)
            x = (zf.remat(block) if again else block)(layer, x)
        return end(x, labels, weight=params["head"])

    return loss_fn


def batch_of(rank: int = 0, tokens: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, tokens, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (2, tokens), generator=generator)
    labels[0, : tokens // 2 + rank] = -100
    return x, labels


@settings(max_examples=examples(24))
@given(tokens=st.integers(1, 9), num_tiles=st.integers(1, 12), again=st.booleans())
def test_tiles_have_the_values_of_the_whole(tokens: int, num_tiles: int, again: bool) -> None:
    batch = batch_of(tokens=tokens)
    batch[0].requires_grad_()

    def found(loss_fn: Any) -> Any:
        loss, grads = zf.value_and_grad(loss_fn)(params(), batch)
        of_x = torch.autograd.grad(loss_fn(params(), batch).total, batch[0])
        return zf.tree.leaves((loss, grads, of_x))

    for mine, expected in zip(
        found(loss_of(num_tiles, again=again)), found(loss_of(None)), strict=True
    ):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-12)


def test_every_stage_has_the_same_bits_and_no_more_gathers() -> None:
    def main(group: zf.Group, stage: int, num_tiles: int | None, again: bool = False) -> Any:
        log = zf.record(group)
        zero = zf.zero(
            stage,
            loss_of(num_tiles, again=again),
            zf.optim.adamw(0.01),
            log,
            bucket_bytes=WIDTH * WIDER * 8,
        )
        state = zero.init(params(layers=2))
        for step in range(3):
            log.clear()
            state, _ = zero.step(state, batch_of(group.rank + step))
        gathers = [entry.part for entry in log.log if entry.kind == "all_gather"]
        return zero.params(state), gathers, log.bytes_sent()

    results = [zf.simulate(2, main, stage, 4)[0] for stage in range(4)]
    for found, _, _ in results:
        assert_same_bits(found, results[0][0])
    # The third step follows the schedule: a gather of each bucket in a pass, as under remat.
    plain, gathers, sent = zf.simulate(2, main, 3, None, True)[0]
    for found, mine, of_mine in (results[3], zf.simulate(2, main, 3, 4, True)[0]):
        assert mine == gathers
        assert of_mine == sent
        for leaf, expected in zip(zf.tree.leaves(found), zf.tree.leaves(plain), strict=True):
            torch.testing.assert_close(leaf, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_peak_has_the_activations_of_one_tile(stage: int) -> None:
    tokens, tiles = 1024, 16
    batch = batch_of(tokens=tokens)
    logits = 2 * tokens * VOCAB * 8
    hidden = 2 * tokens * WIDER * 8

    def peak(loss_fn: Any) -> int:
        zero = zf.zero(stage, loss_fn, zf.optim.sgd(0.1), test_memory.Echo())
        state = zero.init(params())
        state, _ = zero.step(state, batch)
        return test_memory.peak_of(lambda: zero.step(state, batch))

    # Between the blocks stay their inputs, as they do under remat. A block in progress has its
    # result and a gradient.
    rest = 8 * batch[0].nbytes + 20 * zf.tree.leaves(params())[-1].nbytes
    found, plain = peak(loss_of(tiles)), peak(loss_of(None))
    assert plain > 2 * logits + 3 * 2 * hidden
    assert found < rest + 4 * (logits + hidden) // tiles
    assert 3 * found < plain


def test_the_tiles_of_a_module_have_the_parameters_of_the_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    own = zf.functional(model)
    loss = lambda apply: lambda params, x: apply(params, x).square().sum()
    values = {name: leaf + 1 for name, leaf in own.params.items()}
    expected = zf.value_and_grad(loss(own))(values, x)
    last: Any = model[1]
    last.forward = tiled(last.forward, 3)
    found = zf.value_and_grad(loss(zf.functional(model)))(values, x)
    for mine, other in zip(zf.tree.leaves(found), zf.tree.leaves(expected), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)


def test_trees_other_dims_and_plain_values() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.arange(3.0)
    fn = lambda pair, *, scale: {"sum": (pair["x"].sum(1) + pair["y"]) * scale, "n": 3}
    run = tiled(fn, 2, 0)
    assert_same_bits(run({"x": x, "y": y}, scale=2.0), {"sum": (x.sum(1) + y) * 2, "n": 3})


@pytest.mark.parametrize(
    ("fn", "arguments", "error", "message"),
    [
        (torch.sin, (), OptionError, "got none; pass tensors by position"),
        (torch.add, (torch.ones(2, 3), torch.ones(2, 4)), LeafError, r"shapes \(2, 3\), \(2, 4\)"),
        (torch.sin, (torch.ones(2),), LeafError, "one length along dim 1"),
        (torch.mean, (torch.ones(2, 4),), LeafError, r"return the sum and the count"),
        (lambda x: (x, x.shape[1]), (torch.ones(2, 5),), LeafError, "got 3 and others for '1'"),
        (lambda x: (x, x.sum(1)), (torch.ones(2, 4),), LeafError, r"got a result '1' of shape"),
    ],
)
def test_what_cannot_be_tiled_is_refused_by_name(
    fn: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiled(fn, 2)(*arguments)
