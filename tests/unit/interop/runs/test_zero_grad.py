"""The loop drops the gradients of a step, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.interop import deepspeed_runs as runs
from tests.unit.interop.runs.test_missed import EACH_STAGE, steps
from zfun.errors import OptionError, PlacementError
from zfun.interop.accelerate import Accelerator


def by_parameter(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


# Lines that drop gradients: of the optimizer and the model, before backward or after the step.
DROPS: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda optimizer, model: optimizer.zero_grad(),
    "optimizer, to zeros": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model": lambda optimizer, model: model.zero_grad(),
    "by parameter": lambda optimizer, model: by_parameter(model),
    "in place": lambda optimizer, model: in_place(model),
}


def trained(
    accelerator: Any, drop: Callable[[Any, Any], Any], *, first: bool, every: int = 1
) -> dict[str, Tensor]:
    """Take four steps, and drop the gradients of each ``every``-th."""
    model = runs.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net, optimizer = accelerator.prepare(model, optimizer)
    turn = 0

    def train(x: Tensor, y: Tensor) -> None:
        if first and turn % every == 0:
            drop(optimizer, model)
        accelerator.backward(mse_loss(net(x), y))

    def step() -> None:
        nonlocal turn
        optimizer.step()
        turn += 1
        if not first and turn % every == 0:
            drop(optimizer, model)

    steps(train, step, 0, 4)
    return dict(model.state_dict())


@EACH_STAGE
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("drop", DROPS)
def test_gradients_are_dropped_by_the_loop(drop: str, first: bool, stage: int) -> None:
    expected = trained(accelerate.Accelerator(cpu=True), DROPS[drop], first=first)
    found = trained(Accelerator(cpu=True, zero=stage), DROPS[drop], first=first)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


ZEROES: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda optimizer, model: optimizer.zero_grad(),
    "optimizer": lambda optimizer, model: optimizer.zero_grad(set_to_none=False),
    "model": lambda optimizer, model: model.zero_grad(set_to_none=False),
    "in place": lambda optimizer, model: in_place(model),
    "data": lambda optimizer, model: [
        x.grad.data.fill_(0.0) for x in model.parameters() if x.grad is not None
    ],
}


def zeroed(
    accelerator: Any, zero: Callable[[Any, Any], Any], *, reads: bool, freezes: str
) -> tuple[list[Any], dict[str, Tensor]]:
    """Train a branch in the first step alone, and freeze a layer in the second or after it."""
    model: Any = runs.net()
    model.branch = nn.Linear(runs.WIDTH, runs.WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    net, optimizer = accelerator.prepare(model, optimizer)
    seen: list[Any] = []
    for index in range(5):
        x, y = runs.batch(index, 0, 1)
        loss = mse_loss(net(x), y) + (model.branch(x).square().mean() if index == 0 else 0.0)
        if index != 3:  # a step of what is there
            accelerator.backward(loss)
        if index == 1 and freezes == "before the step":
            model.body[0].requires_grad_(False)
        if reads:
            grads = (x.grad for x in model.parameters())
            seen.append([None if x is None else float(x.norm()) for x in grads])
        if index != 3 or zero is not ZEROES["none"]:
            optimizer.step()
        zero(optimizer, model)
        if index == 1 and freezes == "after it":
            model.body[0].requires_grad_(False)
    return seen, dict(model.state_dict())


@EACH_STAGE
@pytest.mark.parametrize("freezes", ["before the step", "after it"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("zero", ZEROES)
@pytest.mark.shows(
    "`zero_grad(set_to_none=False)` and `p.grad.zero_()` of a parameter that goes unused",
    "right",
    "momentum and weight decay move it, as a gradient of zeros does in torch",
)
def test_gradients_of_zeros_are_stepped(zero: str, reads: bool, freezes: str, stage: int) -> None:
    """The zeros were dropped like None, so the leaf stood still."""
    options: Any = {"reads": reads, "freezes": freezes}
    seen, expected = zeroed(accelerate.Accelerator(cpu=True), ZEROES[zero], **options)
    found, values = zeroed(Accelerator(cpu=True, zero=stage), ZEROES[zero], **options)
    for row, right in zip(found, seen, strict=True):
        assert row == pytest.approx(right, abs=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, msg=name)


@EACH_STAGE
@pytest.mark.parametrize("every", [2, 9])
@pytest.mark.shows(
    "two steps without `zero_grad()` between them, in accelerate and Lightning",
    "refused",
    "torch would add to the old gradients, which are gone",
)
def test_gradients_that_nobody_drops_are_refused(every: int, stage: int) -> None:
    """torch adds to them; they were dropped in silence."""
    with pytest.raises(OptionError, match=r"got another step after it without zero_grad"):
        trained(Accelerator(cpu=True, zero=stage), DROPS["optimizer"], first=True, every=every)


def stepped(stage: int) -> tuple[Any, nn.Module, Any, Callable[[], None]]:
    """Take a step that leaves a leaf out, and return the parts of the loop."""
    model = runs.net()
    model.unused = nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True, zero=stage)
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def backward() -> None:
        x, y = runs.batch(0, 0, 1)
        accelerator.backward(mse_loss(net(x), y))

    backward()
    optimizer.step()
    return accelerator, model, optimizer, backward


READS: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "norm": lambda grad, model: grad.norm(),
    "sum": lambda grad, model: sum(grad.flatten()),
    "arithmetic": lambda grad, model: 2 * grad + 1,
    "copy": lambda grad, model: grad.detach().clone(),
    "array": lambda grad, model: grad.cpu().numpy(),
    "comparison": lambda grad, model: bool((grad == 0).all()),
    "several": lambda grad, model: torch.nn.utils.get_total_norm([grad]),
    "clip": lambda grad, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "scale": lambda grad, model: grad.mul_(0.5),
    "not to zero": lambda grad, model: grad.fill_(1),
}


@EACH_STAGE
@pytest.mark.parametrize("read", READS)
@pytest.mark.shows(
    "a read of `.grad` after the step, in accelerate, Trainer and Lightning",
    "refused",
    "torch keeps the gradients until `zero_grad()`, and the step has taken these",
)
def test_a_gradient_that_a_step_has_taken_is_not_read(read: str, stage: int) -> None:
    """It was None, so a loop that asks `p.grad is not None` logged nothing."""
    _, model, _, _ = stepped(stage)
    grad = next(model.parameters()).grad
    assert grad is not None
    with pytest.raises(PlacementError, match=r"a step takes the gradients; got .* after it; read"):
        READS[read](grad, model)


@EACH_STAGE
def test_a_clip_after_the_step_is_refused(stage: int) -> None:
    """Its norm was 0."""
    accelerator, model, optimizer, _ = stepped(stage)
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(OptionError, match=r"got a use of them after it .* clip before it"):
            clip(model.parameters(), 1.0)
    optimizer.zero_grad()
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0


@EACH_STAGE
def test_a_hook_after_the_step_does_not_read_gradients(stage: int) -> None:
    _, model, optimizer, backward = stepped(stage)
    optimizer.zero_grad()
    backward()
    norms: list[Tensor] = []

    def read(inner: Any, args: Any, kwargs: Any) -> None:
        grads = [x.grad for x in inner.param_groups[0]["params"]]
        norms.extend(x.norm() for x in grads if x is not None)

    optimizer.optimizer.register_step_pre_hook(read)
    optimizer.optimizer.register_step_post_hook(read)
    with pytest.raises(PlacementError, match=r"a step takes the gradients; got norm\(\)"):
        optimizer.step()
    assert len(norms) == sum(x.requires_grad for x in model.parameters()) - 2  # the pre hook's


@EACH_STAGE
def test_a_gradient_that_a_step_has_taken_can_be_looked_at_and_dropped(stage: int) -> None:
    _, model, optimizer, backward = stepped(stage)
    for name, param in model.named_parameters():
        if name.startswith("unused"):
            assert param.grad is None
        else:
            grad: Any = param.grad
            assert "which the step has taken" in repr(grad)
            assert (grad.shape, grad.device, grad.dtype) == (param.shape, param.device, param.dtype)
    model.to("cpu").float()  # looks at gradients
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    for drop in (
        lambda: other.zero_grad(set_to_none=False),
        other.zero_grad,
        lambda: in_place(model),
        lambda: [x.grad.data.fill_(0) for x in model.parameters() if x.grad is not None],
        lambda: [x.grad.detach_().mul_(0.0) for x in model.parameters() if x.grad is not None],
    ):
        drop()
        backward()
        optimizer.step()


@EACH_STAGE
def test_gradients_that_are_dropped_in_part_are_refused(stage: int) -> None:
    """A read of one was taken for a drop of all."""
    _, model, optimizer, backward = stepped(stage)
    first, second, *_ = model.parameters()
    first.grad = None
    backward()
    assert second.grad is not None
    with pytest.raises(OptionError, match=r"got backward\(\) after it without zero_grad"):
        second.grad.norm()
    with pytest.raises(OptionError, match=r"got another step after it without zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    backward()
    assert isinstance(second.grad, Tensor)
    assert second.grad.norm() > 0
    optimizer.step()
