"""Lines of loops that a live module would miss without a word: answered, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop import deepspeed_runs as runs
from zfun.errors import OptionError, ZfunError
from zfun.interop import Engine

EACH_STAGE = pytest.mark.parametrize("stage", [0, 2, 3])


def initialized(group: zf.Group, stage: int, model: nn.Module, **given: Any) -> Any:
    config = runs.config(stage, gradient_accumulation_steps=1, gradient_clipping=0.0)
    return deepspeed.initialize(model=model, config=config, mpu=runs.ranks(group), **given)[0]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(loss_of: Any, step: Any, first: int, count: int) -> None:
    for index in range(first, first + count):
        loss_of(*runs.batch(index, 0, 1))
        step()


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    def train(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()

    steps(train, optimizer.step, first, count)


def engine_steps(engine: Any, first: int, count: int) -> None:
    steps(lambda x, y: engine.backward(mse_loss(engine(x), y)), engine.step, first, count)


def assert_same(found: dict[str, Tensor], expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def init_normal(net: nn.Module) -> None:
    torch.manual_seed(1)
    for param in net.parameters():
        nn.init.normal_(param, std=0.1)


def init_by_name(net: nn.Module) -> None:
    torch.manual_seed(1)
    for param in net.parameters():
        nn.init.uniform_(tensor=param, a=-0.1)
        nn.init.constant_(param, 0.25) if param.ndim == 1 else nn.init.kaiming_uniform_(param)


def reset(net: nn.Module) -> None:
    torch.manual_seed(1)
    for part in net.modules():
        if isinstance(part, (nn.Linear, nn.LayerNorm)):
            part.reset_parameters()


@torch.no_grad()
def scale_all(net: nn.Module) -> None:
    params: list[Tensor] = list(net.parameters())
    torch._foreach_mul_(params, 0.9)


@torch.no_grad()
def move_all(net: nn.Module) -> None:
    params = tuple(net.parameters())
    torch._foreach_lerp_(params, [torch.ones_like(x) for x in params], 0.5)


@torch.no_grad()
def copy_some(net: nn.Module) -> None:
    first, second, *_ = net.parameters()
    other = torch.zeros(3)
    torch._foreach_copy_([other, first], [torch.ones(3), torch.full_like(first, 0.5)])
    assert other.sum() == 3
    second.mul_(0.5)


WRITES = (init_normal, init_by_name, reset, scale_all, move_all, copy_some)


@EACH_STAGE
@pytest.mark.parametrize("write", WRITES, ids=lambda x: x.__name__)
@pytest.mark.shows(
    "`nn.init`, `reset_parameters` and `torch._foreach_...` on parameters",
    "right",
    "the values of rank 0 are written",
)
def test_functions_that_write_parameters_reach_the_state(
    write: Callable[[nn.Module], None], stage: int
) -> None:
    expected = runs.net()
    optimizer = adamw(expected)
    plain_steps(expected, optimizer, 0, 2)
    write(expected)
    plain_steps(expected, optimizer, 2, 2)

    def body(group: zf.Group) -> dict[str, Tensor]:
        model = runs.net()
        engine = Engine(model, adamw(model), zero=stage, group=group)
        engine_steps(engine, 0, 2)
        write(model)
        engine_steps(engine, 2, 2)
        return engine.state_dict()

    for found in zf.simulate(2, body):
        assert_same(found, expected)


def replaced(engine: Any, net: Any) -> None:
    net.body[0] = nn.Linear(runs.WIDTH, 12)


def another_parameter(engine: Any, net: Any) -> None:
    net.body[0].weight = nn.Parameter(net.body[0].weight.detach() * 2)


def another_group(engine: Any, net: Any) -> None:
    net.body.append(nn.Linear(runs.WIDTH, runs.WIDTH))
    engine.optimizer.add_param_group({"params": list(net.body[-1].parameters())})


CHANGES = (replaced, another_parameter, another_group)


@EACH_STAGE
@pytest.mark.parametrize("change", CHANGES, ids=lambda x: x.__name__)
@pytest.mark.shows(
    "layers, parameters or adapters that are added or replaced later",
    "refused",
    "at the next step or save; call `initialize` again",
)
def test_a_parameter_that_comes_later_is_refused_and_goes_to_a_new_engine(
    change: Callable[[Any, Any], None], stage: int
) -> None:
    def body(group: zf.Group) -> None:
        model = runs.net()
        engine = initialized(group, stage, model, optimizer=adamw(model))
        engine_steps(engine, 0, 1)
        torch.manual_seed(2)
        change(engine, model)
        with pytest.raises(OptionError, match=r"got another one at|that is none of them"):
            engine_steps(engine, 1, 1)
        with pytest.raises(OptionError, match=r"another one at 'body\.[04]\.weight'; write"):
            engine.module_state_dict()
        again = initialized(group, stage, model, optimizer=adamw(model))
        engine_steps(again, 1, 1)

    zf.simulate(2, body)


def hooked(model: Any) -> None:
    model.scale.register_post_accumulate_grad_hook(lambda param: None)


def hooked_together(model: Any) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda grads: None)


def bounded(model: Any) -> None:
    model.extra = nn.Embedding(3, 2, max_norm=1.5)


def bag(model: Any) -> None:
    model.extra = nn.Sequential(nn.EmbeddingBag(3, 2, max_norm=2.0))


@EACH_STAGE
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (hooked, "got a hook of register_post_accumulate_grad_hook.. on leaf 'scale'"),
        (hooked_together, "got a hook of register_multi_grad_hook.. or .* on leaf 'scale'"),
        (bounded, r"got the Embedding 'extra' with max_norm=1\.5"),
        (bag, r"got the EmbeddingBag 'extra\.0' with max_norm=2"),
    ],
)
@pytest.mark.shows(
    "`nn.Embedding(max_norm=)`, `register_post_accumulate_grad_hook`, `register_multi_grad_hook`",
    "refused",
    "before the first step; `register_hook` is right",
)
def test_a_module_that_an_engine_cannot_serve_is_refused(
    change: Callable[[Any], None], match: str, stage: int
) -> None:
    model = runs.net()
    change(model)
    with pytest.raises(ZfunError, match=match):
        Engine(model, zf.optim.sgd(0.1), zero=stage, group=zf.process_group())
    # The module is as it was.
    assert type(model.scale) is nn.Parameter


def hook_later(engine: Engine, net: Any) -> None:
    net.scale.register_post_accumulate_grad_hook(lambda param: None)


def hook_together_later(engine: Engine, net: Any) -> None:
    hooked_together(net)


def edge(engine: Engine, net: Any) -> None:
    torch.autograd.graph.get_gradient_edge(net.scale)


def of_all(engine: Engine, net: Any) -> None:
    out = engine(torch.ones(2, runs.WIDTH))
    torch.autograd.grad(out.sum(), list(net.parameters()))


def of_one_unused(engine: Engine, net: Any) -> None:
    out = engine(torch.ones(2, runs.WIDTH))
    torch.autograd.grad(out.sum(), net.scale, allow_unused=True)


def of_a_function(engine: Engine, net: Any) -> None:
    torch.func.grad(lambda x: net(x).sum())(torch.ones(2, runs.WIDTH))


def of_a_batch(engine: Engine, net: Any) -> None:
    torch.func.vmap(net)(torch.ones(2, runs.WIDTH))


def parameter_of_data(engine: Engine, net: Any) -> None:
    nn.Parameter(net.scale.data)


def parametrized(engine: Engine, net: Any) -> None:
    nn.utils.parametrizations.weight_norm(net.first)


@EACH_STAGE
@pytest.mark.parametrize(
    ("line", "match"),
    [
        (hook_later, "got a hook of register_post_accumulate_grad_hook.. on leaf 'scale'"),
        (hook_together_later, "got a hook of register_multi_grad_hook.. or .* on leaf 'scale'"),
        (edge, "or get_gradient_edge.. on leaf 'scale', which would not be called"),
        (of_all, r"torch\.autograd\.grad\(\) takes tensors that .* got leaf 'scale' after a call"),
        (of_one_unused, "got leaf 'scale' after a call"),
        (of_a_function, r"got a call inside of torch\.func\.grad"),
        (of_a_batch, r"got a call inside of torch\.func\.vmap"),
        (parameter_of_data, r"got nn\.Parameter\(\) of leaf 'scale'"),
        (parametrized, r"got nn\.Parameter\(\) of leaf 'first\.weight'"),
    ],
)
@pytest.mark.shows(
    "`torch.autograd.grad` by parameters after a call, `torch.func` around a call",
    "refused",
    "differentiate inside of `forward` or `compute_loss`, where it is right",
)
def test_a_line_that_would_miss_a_parameter_is_refused(
    line: Callable[[Engine, Any], None], match: str, stage: int
) -> None:
    model = runs.net()
    engine = Engine(model, zf.optim.sgd(0.1), zero=stage, group=zf.process_group())
    with pytest.raises(ZfunError, match=match):
        line(engine, model)


@EACH_STAGE
def test_writes_need_no_gradients_as_in_torch(stage: int) -> None:
    model = runs.net()
    engine = Engine(model, zf.optim.sgd(0.1), zero=stage, group=zf.process_group())
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in"):
        model.scale.add_(1.0)
    model.scale.data.add_(1.0)
    torch._foreach_add_([model.scale.data], 1.0)
    assert engine.state_dict()["scale"].tolist() == [3.0] * 3


@EACH_STAGE
def test_a_gradient_in_a_call_is_that_of_plain_torch(stage: int) -> None:
    """As the adaptive weight of two losses, which divides the norms of their gradients."""

    def loss_of(net: Any, x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        first, second = mse_loss(out, y), out.abs().mean()
        last = net.body[3].weight
        norms = [torch.autograd.grad(z, last, retain_graph=True)[0].norm() for z in (first, second)]
        return first + (norms[0] / norms[1]).detach() * second

    expected, model = runs.net(), runs.net()
    x, y = runs.batch(0, 0, 1)
    loss_of(expected, x, y).backward()
    engine = Engine(model, zf.optim.sgd(0.1), zero=stage, group=zf.process_group())
    engine.backward(engine.run(loss_of, model, x, y))
    torch.testing.assert_close(model.scale.grad, expected.scale.grad)


def test_a_parameter_of_no_engine_is_refused() -> None:
    model, other = runs.net(), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    with pytest.raises(OptionError, match=r"got one of shape \(3,\) that is none of them"):
        Engine(model, optimizer, group=zf.process_group())


def by_chunks(weight: Tensor) -> None:
    weight.chunk(2)[1].mul_(0.5)


def by_rows(weight: Tensor) -> None:
    for row in weight:
        row.zero_()


def by_parts_of_data(weight: Tensor) -> None:
    first, *_ = weight.data.split(4)
    first.fill_(1.0)


@EACH_STAGE
@pytest.mark.parametrize("write", [by_chunks, by_rows, by_parts_of_data])
def test_a_write_to_one_of_several_views_is_one_to_the_parameter(
    write: Callable[[Tensor], None], stage: int
) -> None:
    model, expected = runs.net(), runs.net()
    engine = Engine(model, zf.optim.sgd(0.1), zero=stage, group=zf.process_group())
    with torch.no_grad():
        write(model.first.weight)
        write(expected.first.weight)
    x = torch.ones(2, runs.WIDTH)
    torch.testing.assert_close(engine(x), expected(x))
    torch.testing.assert_close(engine.state_dict(), dict(expected.state_dict()))


def hooked_optimizer(model: Any, seen: list[float]) -> torch.optim.Optimizer:
    """Return an optimizer with hooks: before a step the gradient counts, after it the value."""
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.scale.grad.norm().item()))
    optimizer.register_step_post_hook(lambda own, *_: seen.append(model.scale.sum().item()))
    return optimizer


@EACH_STAGE
def test_hooks_of_an_optimizer_run_around_its_step(stage: int) -> None:
    expected, seen = runs.net(), list[float]()
    plain_steps(expected, hooked_optimizer(expected, seen), 0, 2)

    def body(group: zf.Group) -> list[float]:
        model, found = runs.net(), list[float]()
        own = hooked_optimizer(model, found)
        engine_steps(initialized(group, stage, model, optimizer=own), 0, 2)
        return found

    assert len(seen) == 4
    for found in zf.simulate(2, body):
        assert found == pytest.approx(seen, rel=1e-4)


@pytest.fixture
def hooks_of_all_optimizers() -> Any:
    """Hooks around the steps of all optimizers: small gradients before, a decay after."""

    def clip(own: Any, *_: Any) -> None:
        for group in own.param_groups:
            nn.utils.clip_grad_value_(group["params"], 1e-3)

    @torch.no_grad()
    def decay(own: Any, *_: Any) -> None:
        for group in own.param_groups:
            for param in group["params"]:
                param.mul_(0.9)

    handles = [register_optimizer_step_pre_hook(clip), register_optimizer_step_post_hook(decay)]
    yield
    for handle in handles:
        handle.remove()


@EACH_STAGE
@pytest.mark.usefixtures("hooks_of_all_optimizers")
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam])
def test_hooks_of_all_optimizers_run_once_around_a_step(make: Any, stage: int) -> None:
    """NAdam's own step runs on the shards, without them."""
    expected = runs.net()
    plain_steps(expected, make(expected.parameters(), lr=1e-2), 0, 2)

    def body(group: zf.Group) -> Any:
        model = runs.net()
        own = make(model.parameters(), lr=1e-2)
        engine_steps(initialized(group, stage, model, optimizer=own), 0, 2)
        return model.state_dict()

    # One process has one set of hooks, so one rank.
    assert_same(body(zf.process_group()), expected)


def test_an_mpu_without_data_parallel_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match=r"by get_data_parallel_group\(\); got object without"):
        deepspeed.initialize(model=runs.net(), config=runs.config(1), mpu=object())
