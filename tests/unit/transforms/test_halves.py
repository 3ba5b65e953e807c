"""A backward pass in two halves: the gradients of one pass, and no matrix product twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zfun as zf
from zfun import tree
from zfun.testing import assert_same_bits
from zfun.transforms import Pullback


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket is torch.ops.aten.mm
        return func(*args, **(kwargs or {}))


def blocks(num: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (8, 8), "b": (8,), "scale": (8,)}
    return {
        f"{name}{i}": torch.randn(*shape, generator=generator) / 2
        for i in range(num)
        for name, shape in shapes.items()
    }


def forward(params: Any, x: Tensor, num: int) -> Any:
    for i in range(num):
        normed = torch.nn.functional.rms_norm(x, (8,), params[f"scale{i}"])
        x = x + torch.tanh(torch.nn.functional.linear(normed, params[f"w{i}"], params[f"b{i}"]))
    return x


def halves(fn: Any, params: Any, x: Tensor) -> tuple[Any, Any, list[int]]:
    """Return the cotangent of the input, the gradients, and the products of both halves."""
    x = x.clone().requires_grad_()
    views: list[tuple[Tensor, Tensor]] = []

    def viewed(params: Any, batch: Tensor) -> Any:
        seen = tree.map(lambda leaf: leaf.view_as(leaf), params)
        views.extend(zip(tree.leaves(params), tree.leaves(seen), strict=True))
        return fn(seen, batch)

    out, pullback = zf.vjp(viewed, params, x)
    cotangents = tree.map(torch.ones_like, out)
    with _Products() as products:
        (found,), rest = pullback.inputs_first(cotangents, [x], views)
        first = products.count
        grads = rest()
    return found, grads, [first, products.count - first]


def whole(fn: Any, params: Any, x: Tensor) -> tuple[Any, Any]:
    x = x.clone().requires_grad_()
    out, pullback = zf.vjp(fn, params, x)
    grads, (found,) = pullback.with_inputs(tree.map(torch.ones_like, out), [x])
    return found, grads


def test_two_halves_have_the_bits_of_one_pass_and_its_products() -> None:
    fn = lambda params, x: forward(params, x, 4)
    params, x = blocks(4), torch.randn(6, 8)
    found, grads, products = halves(fn, params, x)
    assert_same_bits((found, grads), whole(fn, params, x))
    assert products == [4, 4]


def test_parameters_that_are_used_twice_or_beside_the_input_have_their_gradients() -> None:
    def fn(params: Any, x: Tensor) -> Any:
        again = {name: params[f"{name[:-1]}0"] for name in params}
        y = forward(again, x, 2)
        return {"y": y, "beside": (params["w1"] * params["scale1"]).sum(), "z": x * params["b1"]}

    params, x = blocks(2), torch.randn(6, 8)
    found, grads, _ = halves(fn, params, x)
    expected, wanted = whole(fn, params, x)
    assert_same_bits(found, expected)
    torch.testing.assert_close(grads, wanted, rtol=1e-5, atol=1e-6)


def test_a_pullback_without_views_runs_at_once() -> None:
    params, x = blocks(1), torch.randn(6, 8, requires_grad=True)
    fn = lambda params, x: forward(params, x, 1)
    out, pullback = zf.vjp(fn, params, x)
    assert isinstance(pullback, Pullback)
    (found,), rest = pullback.inputs_first(torch.ones_like(out), [x])
    assert_same_bits((found, rest()), whole(fn, params, x.detach()))


def test_an_input_that_is_an_output_has_its_cotangent() -> None:
    fn = lambda params, x: {"x": forward(params, x, 1), "skip": x}
    params, x = blocks(1), torch.randn(6, 8)
    found, grads, _ = halves(fn, params, x)
    assert_same_bits((found, grads), whole(fn, params, x))
    found, grads, _ = halves(lambda params, x: {"y": x, "z": params["w0"] * 2}, params, x)
    assert_same_bits(found, torch.ones_like(x))
    assert_same_bits(grads["w0"], torch.full((8, 8), 2.0))


def test_hooks_of_activations_change_gradients_once() -> None:
    def fn(params: Any, x: Tensor) -> Any:
        for i in range(2):
            x = torch.tanh(x @ params[f"w{i}"]) * params[f"scale{i}"] + params[f"b{i}"]
            x.register_hook(lambda grad: 3 * grad)
        return x

    params, x = blocks(2), torch.randn(6, 8)
    found, grads, _ = halves(fn, params, x)
    assert_same_bits((found, grads), whole(fn, params, x))
