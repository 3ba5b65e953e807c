"""Custom functions whose backward pass calls the module again, as that of an ODE's adjoint."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zfun as zf
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.interop.engine import Engine


def reads(net: Any) -> tuple[Tensor, ...]:
    return net[0].weight, net[0].bias, net[2].weight, net[2].bias


def direct(x: Tensor, params: Any) -> Tensor:
    return F.linear(F.linear(x, *params[:2]).tanh(), *params[2:])


class Residual(torch.autograd.Function):
    """``x + net(x)``, which saves the input alone, and runs the module again in backward."""

    calls_in_forward = True

    @classmethod
    def forward(cls, ctx: Any, net: Any, x: Tensor, *params: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.net, ctx.params = net, ()
        cls.keep(ctx, x, params)
        with torch.no_grad():
            return x + (net(x) if cls.calls_in_forward else direct(x, params))

    @staticmethod
    def keep(ctx: Any, x: Tensor, params: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(x, *params)

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        with torch.enable_grad():
            kept, *saved = ctx.saved_tensors
            x = kept.detach().requires_grad_()
            return None, *cls.grads(ctx, x, x + ctx.net(x), saved or ctx.params, grad)

    @staticmethod
    def grads(ctx: Any, x: Tensor, y: Tensor, params: Any, grad: Tensor) -> Any:
        return torch.autograd.grad(y, (x, *params), grad, allow_unused=True)


class Direct(Residual):
    calls_in_forward = False


class Kept(Residual):
    @staticmethod
    def keep(ctx: Any, x: Tensor, params: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(x)
        ctx.params = params


class Again(Residual):
    """Reads the parameters in backward, after the module has run there."""

    @staticmethod
    def grads(ctx: Any, x: Tensor, y: Tensor, params: Any, grad: Tensor) -> Any:
        return torch.autograd.grad(y, (x, *reads(ctx.net)), grad, allow_unused=True)


class Nested(Residual):
    """Runs a backward pass of its own, as a reversible block does."""

    @staticmethod
    def grads(ctx: Any, x: Tensor, y: Tensor, params: Any, grad: Tensor) -> Any:
        y.backward(grad)
        return x.grad, *[None] * len(params)


class NestedDirect(Nested):
    calls_in_forward = False


EACH_FUNCTION = pytest.mark.parametrize(
    "function", [Residual, Direct, Kept, Again, Nested, NestedDirect]
)


class Model(nn.Module):
    def __init__(self, function: Any, *, calls: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.function, self.calls = function, calls

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.function.apply(self.net, x, *reads(self.net))
        return self.head(x + self.net(x) if self.calls else x)


def batches() -> Tensor:
    return torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1))


@EACH_FUNCTION
@EACH_STAGE
@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_backward_of_a_function_calls_the_module(
    function: Any, stage: int, calls: bool, size: int
) -> None:
    plain = Model(function, calls=calls)
    optimizer = torch.optim.Adam(plain.parameters(), 0.05)
    for x in batches():
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()

    def main(group: zf.Group) -> Any:
        model = Model(function, calls=calls)
        adam = torch.optim.Adam(model.parameters(), 0.05)
        engine = Engine(model, adam, zero={"stage": stage, "bucket_bytes": 64}, group=group)
        for x in batches():
            engine.backward(model(x.chunk(size)[group.rank]).square().mean())
            engine.step()
        return model.state_dict()

    for found in zf.simulate(size, main):
        torch.testing.assert_close(found, plain.state_dict())


@EACH_FUNCTION
@pytest.mark.parametrize("size", [1, 2])
def test_backward_of_a_function_calls_a_closure(function: Any, size: int) -> None:
    """The same in a loss that is a plain function; a ``backward()`` inside is refused there."""
    plain = Model(function, calls=True)
    params = {name: x.detach().clone() for name, x in plain.named_parameters()}
    batch = batches()[0]

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])

        class Net:
            def __call__(self, x: Tensor) -> Tensor:
                return linear("net.2", linear("net.0", x).tanh())

            def __getitem__(self, index: int) -> Any:
                weight, bias = (params[f"net.{index}.{name}"] for name in ("weight", "bias"))
                return SimpleNamespace(weight=zf.gather(weight), bias=zf.gather(bias))

        x = linear("first", x)
        for _ in range(2):
            x = function.apply(Net(), x, *reads(Net()))
        return linear("head", x + Net()(x)).square().mean()

    def main(group: zf.Group) -> Any:
        sharded = zf.shard(params, group, bucket_bytes=64)
        grad_fn = zf.value_and_grad(zf.shard_params(loss_fn, group))
        vg = zf.shard_grads(zf.data_parallel(grad_fn, group), group)
        return zf.unshard(vg(sharded, batch.chunk(size)[group.rank])[1])

    if issubclass(function, Nested):
        with pytest.raises(zf.ZfunError, match=r"let its backward pass return what torch.autogr"):
            zf.simulate(size, main)
        return
    plain(batch).square().mean().backward()
    for found in zf.simulate(size, main):
        torch.testing.assert_close(found, {k: x.grad for k, x in plain.named_parameters()})


def cached(net: Any, x: Tensor) -> Tensor:
    """A loss of all rows whose gradients come later, in parts, as GradCache does."""
    parts = x.split(2)
    with torch.no_grad():
        rows = [net(part).requires_grad_() for part in parts]
    with torch.enable_grad():
        loss = torch.cat(rows).logsumexp(0).sum() ** 2
        grads = torch.autograd.grad(loss, rows)

    def backward(grad: Tensor) -> None:
        with torch.enable_grad():
            for part, own in zip(parts, grads, strict=True):
                torch.autograd.backward(net(part), own * grad)

    loss = loss.detach().requires_grad_()
    loss.register_hook(backward)
    return loss


@EACH_STAGE
@pytest.mark.parametrize("is_call", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_hook_of_the_loss_calls_the_module(stage: int, is_call: bool, size: int) -> None:
    """At stage 3 such a call had ended, and its parameters were refused."""
    first = Model(Residual, calls=True).net
    plain = copy.deepcopy(first)
    optimizer = torch.optim.Adam(plain.parameters(), 0.05)
    for x in batches():
        optimizer.zero_grad()
        cached(plain, x).backward()
        optimizer.step()

    def main(group: zf.Group) -> Any:
        model = copy.deepcopy(first)
        engine = Engine(model, torch.optim.Adam(model.parameters(), 0.05), zero=stage, group=group)
        for x in batches():
            engine.backward(engine.run(cached, model, x) if is_call else cached(model, x))
            engine.step()
        return model.state_dict()

    for found in zf.simulate(size, main):
        torch.testing.assert_close(found, plain.state_dict())
