"""Optimizers of other classes than torch's: what a step needs is carried, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

import zfun as zf
from tests.unit.interop.runs.test_asked import step
from zfun.errors import OptionError
from zfun.interop import Engine
from zfun.interop.accelerate import Accelerator

RANKS, WIDTH = 2, 4
EACH_STAGE = pytest.mark.parametrize("stage", [0, 2, 3])


class Stepped(torch.optim.Optimizer):
    """Steps by the gradient times a factor, which a subclass may choose."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            factor = self.factor(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * factor)

    def factor(self, group: dict[str, Any]) -> float:
        return 1.0


class Signed(Stepped):
    """Keeps an option as an attribute, as most classes of ``pytorch_optimizer`` do."""

    def __init__(self, params: ParamsT, lr: float = 0.1, *, maximize: bool = False) -> None:
        self.maximize = maximize
        super().__init__(params, {"lr": lr})

    def factor(self, group: dict[str, Any]) -> float:
        return -1.0 if self.maximize else 1.0


class Halved(Stepped):
    """Changes an option in the constructor."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr / 2})


class Renamed(Stepped):
    """Keeps an option as an attribute of another name."""

    def __init__(self, params: ParamsT, lr: float = 0.1, scale: float = 1.0) -> None:
        self.times = scale
        super().__init__(params, {"lr": lr})

    def factor(self, group: dict[str, Any]) -> float:
        return self.times


class First(Stepped):
    """Keeps the first rate as an attribute, as Lion and AdamAtan2 of other packages do."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        self._init_lr = lr
        super().__init__(params, {"lr": lr})

    def factor(self, group: dict[str, Any]) -> float:
        return group["lr"] / self._init_lr


class Model(Stepped):
    """Steps by the gradients of a model's parameters."""

    def __init__(self, params: ParamsT, lr: float = 0.1, model: Any = None) -> None:
        super().__init__(params, {"lr": lr})
        self.model = model


class Decay:
    """Changes gradients before a step, as a preconditioner does."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.pairs = [(x, 0.5) for x in params]

    def step(self) -> None:
        for x, factor in self.pairs:
            if x.grad is not None:
                x.grad.mul_(factor)


def with_decay(params: Iterable[nn.Parameter]) -> Any:
    params = list(params)
    decay = Decay(params)

    class Decayed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            decay.step()
            return super().step(closure)

    return Decayed(params, lr=0.1)


def with_list(params: Iterable[nn.Parameter]) -> Any:
    params = list(params)
    made = Signed(params)
    made.mine = {"all": params}  # type: ignore[attr-defined]
    return made


class Scaled(Stepped):
    """Reads a key of the group that the constructor does not know, as GaLore does."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def factor(self, group: dict[str, Any]) -> float:
        return group.get("lr_scale", 1.0)


class Falling(Stepped):
    """Keeps a number in the group, and nothing for each parameter."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def factor(self, group: dict[str, Any]) -> float:
        group["k"] += 1
        return 1.0 / group["k"]


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, as those of several packages do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count, self.slow = optimizer, 0, dict[Any, Tensor]()
        super().__init__(optimizer.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        for p in (x for group in self.param_groups for x in group["params"]):
            slow = self.slow.setdefault(p, p.clone())
            if self.count % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class Beside:
    """Wraps another optimizer, and is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        raise AssertionError


def made() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()


Make = Callable[[Iterable[nn.Parameter]], Any]


def trained(make: Make, stage: int | None, group: Any = None, warm: int = 0) -> list[Tensor]:
    """Train four steps with an engine, after some steps of the optimizer without one."""
    net = made()
    rule, engine = make(net.parameters()), None
    for turn in range(warm + 4):
        if turn == warm and stage is not None:
            engine = Engine(net, rule, zero=stage, group=group)
        loss = net(torch.full((3, WIDTH), 0.5 + turn, dtype=torch.float64)).square().mean()
        step(loss, rule, engine)
    return [x.detach().clone() for x in net.state_dict().values()]


@EACH_STAGE
@pytest.mark.parametrize("maximize", [False, True])
def test_an_option_that_is_an_attribute_is_carried(maximize: bool, stage: int) -> None:
    """The default of the class took its place."""
    make = lambda params: Signed(params, lr=0.05, maximize=maximize)
    expected = trained(make, None)
    for found in zf.simulate(RANKS, lambda group: trained(make, stage, group)):
        torch.testing.assert_close(found, expected)


MADE: dict[str, Make] = {
    "an option is changed": Halved,
    "an option is changed, at a rate of 0": lambda params: Halved(params, lr=0.0),
    "an option has another name": lambda params: Renamed(params, scale=3.0),
    "the first rate is kept": lambda params: First(params, lr=0.05),
    "options are changed in groups": lambda params: Halved(
        [{"params": [x], "lr": 0.01 * i} if i else {"params": [x]} for i, x in enumerate(params)]
    ),
}


@EACH_STAGE
@pytest.mark.parametrize("name", MADE)
def test_what_a_constructor_makes_of_options_is_carried(name: str, stage: int) -> None:
    """They were refused; a rate may change from step to step all the same."""

    def make(params: Iterable[nn.Parameter]) -> Any:
        rule = MADE[name](params := list(params))
        rule.register_step_pre_hook(lambda *given: Decay(params).step())
        rule.register_step_post_hook(lambda rule, *given: halve(rule))
        return rule

    def halve(rule: Any) -> None:
        for group in rule.param_groups:
            group["lr"] *= 0.5

    expected = trained(make, None)
    for found in zf.simulate(RANKS, lambda group: trained(make, stage, group)):
        torch.testing.assert_close(found, expected)


@EACH_STAGE
def test_numbers_of_the_groups_alone_go_on(stage: int) -> None:
    """They began anew where the optimizer had taken steps, and keeps no moments."""
    expected = trained(Falling, None, warm=3)
    for found in zf.simulate(RANKS, lambda group: trained(Falling, stage, group, warm=3)):
        torch.testing.assert_close(found, expected)


def test_a_key_of_a_group_that_no_step_reads_is_left_alone() -> None:
    def make(params: Iterable[nn.Parameter]) -> Any:
        first, *rest = params
        return Scaled([{"params": [first], "name": "first"}, {"params": rest, "initial_lr": 3.0}])

    torch.testing.assert_close(trained(make, 2, zf.process_group()), trained(make, None))


REFUSED: dict[str, tuple[Make, str]] = {
    "a key": (
        lambda params: Scaled([{"params": list(params), "lr_scale": 0.5}]),
        r"got a group with 'lr_scale', which a step of Scaled reads",
    ),
    "a key at a rate of 0": (
        lambda params: Scaled([{"params": list(params), "lr_scale": 0.5}], lr=0.0),
        r"got a group with 'lr_scale', which a step of Scaled reads",
    ),
    "a key of some groups": (
        lambda params: Scaled([{"params": [x], "lr_scale": 0.5} for x in params]),
        r"got a group with 'lr_scale', which a step of Scaled reads",
    ),
    "a key of another kind": (
        lambda params: Scaled([{"params": list(params), "lr_scale": "half"}]),
        r"got a group with 'lr_scale', with which no step runs: TypeError",
    ),
    "a list": (with_list, r"with parameters in its attribute 'mine'; loop over self\.param_gro"),
    "a model": (
        lambda params: Model([x := list(params)][0], model=nn.ParameterList(x)),
        r"got Model with parameters in its attribute 'model'",
    ),
    "a closure": (with_decay, r"got Decayed with parameters in a closure of step\(\)"),
    "a wrapper": (
        lambda params: Lookahead(torch.optim.Adam(params)),
        r"got Lookahead, which wraps the Adam of its attribute 'optimizer'; pass that one",
    ),
}


@EACH_STAGE
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_is_not_made_anew_is_refused(name: str, stage: int) -> None:
    """They trained with other numbers, in silence; a wrapper as the optimizer in it."""
    make, message = REFUSED[name]
    with pytest.raises(OptionError, match=message):
        trained(make, stage, zf.process_group())


def of_accelerate(rule: Any, net: Any) -> None:
    Accelerator(zero=2, cpu=True).prepare(net, rule)


def of_fabric(rule: Any, net: Any) -> None:
    lightning = pytest.importorskip("lightning")
    import zfun.interop.lightning  # noqa: F401, names the strategies

    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy="zfun_stage_2")
    fabric.launch()
    fabric.setup(net, rule)


def of_the_facade(rule: Any, net: Any) -> None:
    from zfun.interop import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    deepspeed.initialize(model=net, optimizer=rule, config=config)


def test_accelerate_refuses_wrappers_of_others() -> None:
    net = made().float()
    with pytest.raises(OptionError, match=r"got Lookahead, which wraps the Adam"):
        of_accelerate(Lookahead(torch.optim.Adam(net.parameters())), net)


@pytest.mark.parametrize("way", ["the optimizer is not prepared", "it is none of torch"])
def test_gradients_of_a_model_without_its_optimizer_are_refused(way: str) -> None:
    """No ranks shared them, so each trained a model of its own, in silence."""
    accelerator, net = Accelerator(zero=2, cpu=True), made().float()
    rule: Any = torch.optim.SGD(net.parameters(), 0.1)
    if way == "it is none of torch":
        net, rule = accelerator.prepare(net, Beside(rule))
    else:
        net = accelerator.prepare(net)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        assert net(x).isfinite().all()
    with pytest.raises(OptionError, match=r"got gradients of a model whose optimizer prepare\(\)"):
        accelerator.backward(net(x).sum())
    if way == "the optimizer is not prepared":
        rule = accelerator.prepare(rule)
        accelerator.backward(net(x).sum())
        rule.step()


def test_a_model_without_trained_parameters_waits_for_no_optimizer() -> None:
    accelerator, net, teacher = Accelerator(zero=2, cpu=True), made().float(), made().float()
    teacher = accelerator.prepare(teacher.requires_grad_(False))
    net, rule = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    before = net[0].weight.detach().clone()
    x = torch.ones(2, WIDTH)
    accelerator.backward((net(x) - teacher(x) - 1).square().sum())
    rule.step()
    assert (net[0].weight != before).any()


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper", [Lookahead, Beside])
@pytest.mark.parametrize("host", [of_fabric, of_the_facade])
def test_hosts_refuse_wrappers_of_others(
    host: Any, wrapper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # which Fabric leaves
    net = made().float()
    with pytest.raises(OptionError, match=rf"got {wrapper.__name__}, which wraps the Adam"):
        host(wrapper(torch.optim.Adam(net.parameters())), net)
