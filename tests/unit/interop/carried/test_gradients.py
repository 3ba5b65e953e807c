"""Gradients that are there when an engine is made, or when another one takes the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests.interop import fabrics
from tests.unit.interop.gradients.test_followed import accelerator_of
from tests.unit.interop.runs.test_missed import EACH_STAGE, initialized
from zfun.errors import OptionError
from zfun.interop import Engine
from zfun.interop.accelerate import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
WIDTH = 3


def batch(seed: int = 1) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(params: Any, **options: Any) -> Any:
    return torch.optim.SGD(params, 0.1, momentum=0.9, **options)


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, 0.05)


def values(*modules: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for module in modules for x in module.parameters()]


def back(accelerator: Any, model: nn.Module, seed: int = 1) -> None:
    accelerator.backward(model(batch(seed)).square().mean())


def steps(accelerator: Any, model: nn.Module, optimizer: Any, count: int) -> None:
    for seed in range(count):
        optimizer.zero_grad()
        back(accelerator, model, seed)
        optimizer.step()


def before_prepare(accelerator: Any, *, backward: bool = True) -> Any:
    model = net()
    model(batch(5)).square().mean().backward()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    if backward:
        back(accelerator, model)
    optimizer.step()
    return model


def before_prepare_alone(accelerator: Any) -> Any:
    return before_prepare(accelerator, backward=False)


def of_one_layer(accelerator: Any) -> Any:
    model = net()
    model[0](batch(5)).square().mean().backward()
    model, first, second = accelerator.prepare(
        model, sgd(model[0].parameters()), sgd(model[2].parameters())
    )
    for optimizer in (first, second):
        optimizer.step()
    return model


def read_and_written(accelerator: Any) -> Any:
    model = net()
    model(batch(5)).square().mean().backward()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    model[0].weight.grad = None
    model[2].weight.grad.mul_(3)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    back(accelerator, model)
    optimizer.step()
    return model


def dropped(accelerator: Any) -> Any:
    model = net()
    model(batch(5)).square().mean().backward()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    optimizer.zero_grad()
    back(accelerator, model)
    optimizer.step()
    return model


def frozen_after(accelerator: Any) -> Any:
    """A frozen parameter with a gradient, which torch steps."""
    model = net()
    model(batch(5)).square().mean().backward()
    model[0].weight.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    back(accelerator, model)
    optimizer.step()
    steps(accelerator, model, optimizer, 2)
    return model


def another(accelerator: Any, *, backward: bool = True) -> Any:
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    steps(accelerator, model, optimizer, 2)
    optimizer.zero_grad()
    back(accelerator, model, 5)
    optimizer = accelerator.prepare(sgd(model.parameters()))
    if backward:
        back(accelerator, model)
    optimizer.step()
    return model


def another_alone(accelerator: Any) -> Any:
    return another(accelerator, backward=False)


def of_other_layers(accelerator: Any) -> Any:
    model = net()
    model, first = accelerator.prepare(model, adamw(model[0].parameters()))
    back(accelerator, model, 5)
    second = accelerator.prepare(sgd(model[2].parameters()))
    back(accelerator, model)
    for optimizer in (first, second):
        optimizer.step()
    return model


def frozen_between(accelerator: Any) -> Any:
    model = net()
    model, _ = accelerator.prepare(model, adamw(model.parameters()))
    back(accelerator, model, 5)
    model[0].weight.requires_grad_(False)
    optimizer = accelerator.prepare(sgd(model.parameters()))
    back(accelerator, model)
    optimizer.step()
    return model


def zeros(accelerator: Any) -> Any:
    """A layer whose gradients are zeros decays."""
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    back(accelerator, model, 5)
    optimizer.zero_grad(set_to_none=False)
    optimizer = accelerator.prepare(sgd(model.parameters(), weight_decay=0.5))
    accelerator.backward(model[0](batch()).square().mean())
    optimizer.step()
    return model


def taken_by_a_step(accelerator: Any) -> Any:
    """Gradients that a step has taken, and the loop drops before the next one."""
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    steps(accelerator, model, optimizer, 2)
    optimizer = accelerator.prepare(sgd(model.parameters()))
    steps(accelerator, model, optimizer, 2)
    return model


def of_a_loss(accelerator: Any) -> Any:
    model, weight = net(), nn.Parameter(torch.ones(()))
    both = [*model.parameters(), weight]
    model, _ = accelerator.prepare(model, adamw(both))
    accelerator.backward((model(batch(5)) * weight).mean())
    optimizer = accelerator.prepare(sgd(both))
    accelerator.backward((model(batch()) * weight).mean())
    optimizer.step()
    return nn.ModuleList([model, nn.ParameterList([weight])])


def of_an_earlier_run(accelerator: Any) -> Any:
    model = net()
    prepared, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    steps(accelerator, prepared, optimizer, 2)
    optimizer.zero_grad()
    back(accelerator, prepared, 5)
    second = type(accelerator)(cpu=True)
    prepared, optimizer = second.prepare(
        accelerator.unwrap_model(prepared), sgd(model.parameters())
    )
    back(second, prepared)
    optimizer.step()
    return model


LOOPS: list[Callable[[Any], Any]] = [
    before_prepare,
    before_prepare_alone,
    of_one_layer,
    read_and_written,
    dropped,
    frozen_after,
    another,
    another_alone,
    of_other_layers,
    frozen_between,
    zeros,
    taken_by_a_step,
    of_a_loss,
    of_an_earlier_run,
]


@EACH_STAGE
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_gradients_of_accelerate_stay(stage: int, loop: Callable[[Any], Any]) -> None:
    """They were dropped in silence where prepare() took an optimizer."""
    found, expected = values(loop(accelerator_of(stage))), values(loop(accelerator_of(None)))
    changes = [(x - y, z - y) for x, y, z in zip(found, values(net()), expected, strict=False)]
    for change, plain in changes:
        torch.testing.assert_close(change, plain)
    torch.testing.assert_close(found, expected)


@EACH_STAGE
def test_gradients_that_a_step_has_taken_are_refused(stage: int) -> None:
    """Plain accelerate would add the new ones to them."""
    accelerator = accelerator_of(stage)
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    back(accelerator, model)
    optimizer.step()
    optimizer = accelerator.prepare(adamw(model.parameters()))
    back(accelerator, model)
    with pytest.raises(OptionError, match=r"got another step after it without zero_grad\(\)"):
        optimizer.step()


def test_gradients_with_a_loss_scale_are_refused() -> None:
    accelerator = Accelerator(cpu=True, zero=2, mixed_precision="fp16")
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    back(accelerator, model)
    with pytest.raises(
        OptionError, match=r"a loss scale.* stay with their engine; got another opt"
    ):
        accelerator.prepare(adamw(model.parameters()))
    optimizer.zero_grad()
    steps(accelerator, model, accelerator.prepare(adamw(model.parameters())), 1)


def fabric_before(fabric: Any) -> Any:
    model = net()
    model(batch(5)).square().mean().backward()
    live, optimizer = fabric.setup(model, sgd(model.parameters()))
    fabric.backward(live(batch()).square().mean())
    optimizer.step()
    return model


def fabric_apart(fabric: Any) -> Any:
    """A model alone, which has gradients before its optimizer comes."""
    model = net()
    model(batch(5)).square().mean().backward()
    live = fabric.setup(model)
    fabric.backward(live(batch()).square().mean())
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    optimizer.step()
    return model


def fabric_another(fabric: Any) -> Any:
    model = net()
    first = adamw(model.parameters())
    live, optimizer = fabric.setup(model, first)
    steps(fabric, live, optimizer, 2)
    optimizer.zero_grad()
    back(fabric, live, 5)
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    back(fabric, live)
    optimizer.step()
    steps(fabric, live, fabric.setup_optimizers(first), 2)
    return model


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("loop", [fabric_before, fabric_apart, fabric_another])
def test_gradients_of_fabric_stay(stage: int, loop: Callable[[Any], Any]) -> None:
    found = values(loop(fabrics.fabric_of(f"zfun_stage_{stage}")))
    torch.testing.assert_close(found, values(loop(fabrics.fabric_of("auto"))))


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
def test_gradients_that_an_engine_of_fabric_has_not_computed_are_refused() -> None:
    fabric, model = fabrics.fabric_of("zfun_stage_2"), net()
    live, optimizer = fabric.setup(model, sgd(model[0].parameters()))
    back(fabric, live)
    with pytest.raises(OptionError, match=r"leaf '2\.weight', which was in no optimizer; step bef"):
        fabric.setup_optimizers(sgd(model[2].parameters()))
    optimizer.step()
    optimizer.zero_grad()
    fabric.setup_optimizers(sgd(model[2].parameters()))


def of_each_rank(size: int) -> nn.Module:
    """Take the step by the mean of what the ranks have: before, and in a pass."""
    model = net()
    optimizer = sgd(model.parameters())
    for rank in range(size):
        for seed in (rank, 10 + rank):
            (model(batch(seed)).square().mean() / size).backward()
    optimizer.step()
    return model


@EACH_STAGE
@pytest.mark.parametrize("size", [1, 3])
def test_gradients_before_an_engine_are_those_of_each_rank(stage: int, size: int) -> None:
    def body(group: zf.Group) -> list[Tensor]:
        model = net()
        model(batch(group.rank)).square().mean().backward()
        engine = Engine(model, sgd(model.parameters()), zero=stage, group=group)
        engine.backward(engine(batch(10 + group.rank)).square().mean())
        engine.step()
        engine.close()
        return values(model)

    for found in zf.simulate(size, body):
        torch.testing.assert_close(found, values(of_each_rank(size)))


@EACH_STAGE
@pytest.mark.parametrize("reads", [False, True])
def test_a_closed_engine_leaves_gradients_to_the_next_one(stage: int, reads: bool) -> None:
    def body(group: zf.Group) -> list[Tensor]:
        model = net()
        engine = Engine(model, adamw(model.parameters()), zero=stage, group=group)
        engine.backward(engine(batch(group.rank)).square().mean())
        if reads:
            assert model[0].weight.grad is not None
        engine.close()
        engine = Engine(model, sgd(model.parameters()), zero=abs(2 - stage), group=group)
        engine(batch(10 + group.rank)).square().mean().backward()
        engine.step()
        engine.close()
        return values(model)

    for found in zf.simulate(2, body):
        torch.testing.assert_close(found, values(of_each_rank(2)))


@EACH_STAGE
def test_gradients_before_initialize_stay(stage: int) -> None:
    def body(group: zf.Group) -> list[Tensor]:
        model = net()
        model(batch(group.rank)).square().mean().backward()
        engine = initialized(group, stage, model, optimizer=sgd(model.parameters()))
        engine.backward(engine(batch(10 + group.rank)).square().mean())
        engine.step()
        return [x.clone() for x in engine.module_state_dict().values()]

    for found in zf.simulate(2, body):
        torch.testing.assert_close(found, values(of_each_rank(2)))


@EACH_STAGE
def test_a_closed_module_has_the_gradients_of_torch(stage: int) -> None:
    expected, model = net(), net()
    expected(batch()).square().mean().backward()
    engine = Engine(model, sgd(model.parameters()), zero=stage, group=zf.process_group())
    engine.backward(engine(batch()).square().mean())
    engine.close()
    for own, plain in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, plain.grad)
