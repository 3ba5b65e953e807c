"""Backward passes to some parameters alone, beside plain torch and the host libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from torch import Tensor, nn

import zfun as zf
import zfun.interop.lightning  # registers the names of the strategies
from zfun.errors import ZfunError
from zfun.interop import Engine
from zfun.interop.accelerate import Accelerator

STAGES = (0, 1, 2, 3)
X = torch.linspace(-1, 2, 12, dtype=torch.float64).view(2, 2, 3)


def net(width: int = 3) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, width)).double()
    for index, param in enumerate(made.parameters()):
        param.data = torch.linspace(-1, index + 1, param.numel()).double().view_as(param)
    return made


def decaying(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 0.1, weight_decay=0.5, eps=1e-2)


def trained(module: nn.Module, backward: Callable[..., None], step: Callable[[], Any]) -> Any:
    """Return the values, the gradient of a leaf that is no parameter, and which hooks ran."""
    ran: list[str] = []
    for name, param in module.named_parameters():
        param.register_hook(lambda grad, name=name: ran.append(name))
    for turn in range(3):
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        weight, bias = module.get_parameter("0.weight"), module.get_parameter("2.bias")
        loss = (module(X[0]) * scale).square().mean() + weight.square().sum()
        backward(loss, inputs=[weight, bias, *([scale] if turn else [])])
        # Another pass, to the other layer.
        backward(module(X[1]).square().mean(), inputs=module.get_parameter("2.weight"))
        assert (scale.grad is None) == (turn == 0)
        step()
    return {name: x.clone() for name, x in module.state_dict().items()}, scale.grad, set(ran)


@pytest.mark.parametrize("stage", STAGES)
def test_the_others_have_no_gradient(stage: int) -> None:
    """AdamW would decay a parameter with a gradient of zeros."""
    plain = net()
    optimizer = decaying(plain)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    expected = trained(plain, lambda loss, **options: loss.backward(**options), step)
    assert torch.equal(plain.get_parameter("0.bias"), net().get_parameter("0.bias"))

    def main(group: zf.Group) -> None:
        module = net()
        engine = Engine(module, decaying(module), zero=stage, group=group)
        found = trained(module, engine.backward, lambda: engine.step(boundary=True))
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-9, atol=1e-12)
        assert found[2] == expected[2]

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_of_torch_alone_gives_parameters_none(stage: int) -> None:
    """So the step is refused: torch does not ask a parameter that it is given."""
    module = net()
    engine = Engine(module, decaying(module), zero=stage, group=zf.collectives.single_group())
    module(X[0]).sum().backward(inputs=list(module.parameters()))
    with pytest.raises(ZfunError, match=r"gradients of backward\(\); got none since"):
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_to_the_batch_alone_is_no_pass_of_the_step(stage: int) -> None:
    """As adversarial training computes the gradient of a batch before the step's own passes."""

    def trained(module: nn.Module, backward: Callable[..., None], step: Callable[[], Any]) -> Any:
        found = []
        for x in X:
            batch = x.clone().requires_grad_()
            backward(module(batch).square().mean(), inputs=[batch])
            assert batch.grad is not None
            found.append(batch.grad)
            for part in (batch.detach() + 0.1 * batch.grad.sign(), x):
                backward(module(part).square().mean() / 2)
            step()
        return found, {name: x.clone() for name, x in module.state_dict().items()}

    plain = net()
    optimizer = decaying(plain)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    expected = trained(plain, lambda loss, **options: loss.backward(**options), step)

    def main(group: zf.Group) -> None:
        module = net()
        engine = Engine(module, decaying(module), zero=stage, group=group, accumulate=2)
        # The loop divides each loss itself.
        backward = lambda loss, **options: engine.backward(loss, scale=1.0, **options)
        # Without boundary=, which says that exactly two passes count.
        found = trained(module, backward, engine.step)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)

    zf.simulate(2, main)


def gan(setup: Callable[..., Any], backward: Callable[..., None]) -> list[Tensor]:
    """Train two networks, of which the second loss reaches both."""
    first, second = net(), net(1)
    first, one = setup(first, decaying(first))
    second, two = setup(second, decaying(second))
    for _ in range(3):
        backward(second(X[0]).mean() - second(first(X[1]).detach()).mean())
        two.step()
        two.zero_grad()
        backward(-second(first(X[1])).mean(), inputs=list(first.parameters()))
        one.step()
        one.zero_grad()
    return [x.clone() for module in (first, second) for x in module.state_dict().values()]


def accelerated(stage: int | None) -> list[Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    made = accelerate.Accelerator(cpu=True) if stage is None else Accelerator(cpu=True, zero=stage)
    return gan(made.prepare, made.backward)


def in_fabric(stage: int | None) -> list[Tensor]:
    strategy = "auto" if stage is None else f"zfun_stage_{stage}"
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    return gan(fabric.setup, fabric.backward)


@pytest.mark.parametrize("host", [accelerated, in_fabric])
@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.usefixtures("one_rank")
def test_a_loss_of_two_models_trains_one(host: Callable[[int | None], Any], stage: int) -> None:
    torch.testing.assert_close(host(stage), host(None), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.usefixtures("one_rank")
def test_fabric_takes_a_plain_backward_too(stage: int) -> None:
    """Fabric asks for ``fabric.backward()`` where a precision has a backward of its own."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=f"zfun_stage_{stage}")
    fabric.launch()
    plain = net()
    module, optimizer = fabric.setup(plain, decaying(plain))
    module(X[0]).sum().backward()
    optimizer.step()
    assert not torch.equal(module.state_dict()["0.weight"], net().state_dict()["0.weight"])
