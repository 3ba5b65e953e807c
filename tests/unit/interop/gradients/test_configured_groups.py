"""Parameter groups of the optimizer of a configuration, beside those of the classes of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import BATCH, WIDTH, net, ranks, weights
from zfun.errors import ConfigError, OptionError
from zfun.interop import from_ds_config
from zfun.interop._configured import ConfiguredOptimizer
from zfun.interop.ds_config import Rule, momentum_for, rule_for
from zfun.interop.ds_config._optimizers import cycle_of
from zfun.interop.ds_config.table._optim import TORCH_OPTIMIZERS

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# By type: the options of one group, and those that the script writes into all of them later.
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RMSprop": ({"alpha": 0.3, "weight_decay": 0.5}, {"momentum": 0.7, "eps": 0.1}),
    "NAdam": ({"betas": (0.2, 0.3), "momentum_decay": 0.1}, {"weight_decay": 0.5}),
    "RAdam": ({"betas": (0.2, 0.3), "eps": 0.1}, {"weight_decay": 0.5}),
    "Adamax": ({"betas": (0.2, 0.3), "weight_decay": 0.5}, {"eps": 0.1}),
    "Adadelta": ({"rho": 0.3, "weight_decay": 0.5}, {"eps": 0.1, "rho": 0.5}),
    "ASGD": ({"lambd": 0.5, "weight_decay": 0.5}, {"alpha": 0.3}),
    "Rprop": ({"etas": (0.2, 1.4), "step_sizes": (1e-5, 0.02)}, {"lr": 0.05}),
}
SIZES = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0}


def configured(kind: str, **params: Any) -> dict[str, Any]:
    start = {"momentum": 0.3} if kind == "RMSprop" else {}
    return {"type": kind, "params": {"lr": 0.02, **start, **params}}


def groups_of(model: nn.Module, own: dict[str, Any]) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": wide, **own}, {"params": [p for p in model.parameters() if p.ndim < 2]}]


def x_of(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def engine_of(section: dict[str, Any], own: dict[str, Any], **options: Any) -> Any:
    model, stage = net(), options.pop("stage", 1)
    config = {**SIZES, "optimizer": section, "zero_optimization": {"stage": stage}}
    return deepspeed.initialize(
        model=model, model_parameters=groups_of(model, own), config={**config, **options}
    )[0]


def step(engine: Any, number: int) -> None:
    engine.backward(engine(x_of(number)).square().mean())
    engine.step()


@pytest.mark.parametrize("kind", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_groups_of_a_type_of_torch_have_their_own_numbers(kind: str, stage: int) -> None:
    """Silently, all groups had the numbers of the configuration, and later writes no effect."""
    own, later = OWN[kind]
    section = configured(kind)

    def main(group: zf.Group) -> Any:
        model = net()
        engine, optimizer, *_ = deepspeed.initialize(
            model=model,
            model_parameters=groups_of(model, own),
            config={**SIZES, "optimizer": section, "zero_optimization": {"stage": stage}},
            mpu=ranks(group),
        )
        first = [{n: x for n, x in g.items() if n != "params"} for g in optimizer.param_groups]
        for number in range(6):
            for each in optimizer.param_groups if number == 3 else ():
                each.update(later)
            step(engine, number)
        return weights(engine), first

    model = net()
    torchs = getattr(torch.optim, kind)(groups_of(model, own), **section["params"])
    expected = [{n: x for n, x in g.items() if n != "params"} for g in torchs.param_groups]
    for number in range(6):
        for each in torchs.param_groups if number == 3 else ():
            each.update(later)
        model(x_of(number)).square().mean().backward()
        torchs.step()
        torchs.zero_grad()
    for found, first in zf.simulate(2, main):
        assert first == expected
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), **CLOSE)


def test_the_momentum_of_a_type_of_torch_is_that_of_its_groups() -> None:
    def moments(section: dict[str, Any], **own: Any) -> list[Any]:
        return engine_of(section, own).get_mom()

    assert moments(configured("NAdam", betas=[0.8, 0.9]), betas=(0.5, 0.6)) == [
        (0.5, 0.6),
        (0.8, 0.9),
    ]
    assert moments(configured("RMSprop"), momentum=0.6) == [0.6, 0.3]
    assert moments(configured("Rprop")) == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["NAdam", "Rprop"])
def test_a_constant_of_a_type_of_torch_that_changes_is_refused(kind: str) -> None:
    name = "betas" if kind == "NAdam" else "etas"
    engine = engine_of(configured(kind), {})
    step(engine, 0)
    engine.optimizer.param_groups[0][name] = (0.25, 1.5 if kind == "Rprop" else 0.5)
    with pytest.raises(OptionError, match=f"{kind} has constant {name}"):
        step(engine, 1)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("SGD", "dampening", 0.5),
        ("SGD", "maximize", True),
        ("Adagrad", "maximize", True),
        ("Adam", "amsgrad", True),
        ("AdamW", "bias_correction", False),
        ("Lamb", "eps_inside_sqrt", True),
    ],
)
def test_a_key_of_a_group_that_the_type_does_not_take_is_refused(
    kind: str, key: str, value: Any
) -> None:
    """A step of DeepSpeed reads these; they had no effect, silently."""
    section = {"type": kind, "params": {"lr": 0.1}}
    with pytest.raises(ConfigError, match=rf"parameter group of {kind}.*\n.*{key}: must be"):
        engine_of(section, {key: value})
    engine = engine_of(section, {"name": "wide", key: not value if value != 0.5 else 0.0})
    step(engine, 0)
    engine.optimizer.param_groups[1][key] = value
    with pytest.raises(ConfigError, match=key):
        step(engine, 1)


def test_a_key_that_a_step_of_a_class_reads_is_refused() -> None:
    """The option is one of the constructor, and it chooses the rule."""
    engine = engine_of(configured("Adamax"), {})
    step(engine, 0)
    engine.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(OptionError, match="Adamax has constant maximize"):
        step(engine, 1)


def test_a_cycle_of_constant_betas_is_refused_where_it_is_written() -> None:
    """Silently, the cycle changed the rate alone."""
    bounds = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-1, "cycle_first_step_size": 2}
    for kind in ("RAdam", "NAdam", "Adamax"):
        config: dict[str, Any] = {"optimizer": configured(kind)}
        for chosen in ({}, {"cycle_momentum": True}):
            config["scheduler"] = {"type": "OneCycle", "params": {**bounds, **chosen}}
            with pytest.raises(ConfigError, match=rf"cycle_momentum: torch's {kind} has constant"):
                from_ds_config(config)
        config["scheduler"]["params"] = {**bounds, "cycle_momentum": False}
        assert from_ds_config(config).momentum is None
    for kind in ("RMSprop", "Adadelta", "AdamW", "SGD"):
        config = {
            "optimizer": {"type": kind, "params": {"lr": 0.1}},
            "scheduler": {"type": "OneCycle", "params": bounds},
        }
        assert from_ds_config(config).momentum is not None


@pytest.mark.parametrize(("kind", "name"), [("NAdam", "betas"), ("RMSprop", "momentum")])
def test_a_rule_of_torch_takes_no_decays(kind: str, name: str) -> None:
    cycle = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-1, "cycle_first_step_size": 2}
    momentum = momentum_for(Rule("OneCycle", cycle))
    decays = cycle_of(momentum) if name == "betas" else {"momentum": momentum}
    with pytest.raises(OptionError, match=f"{kind} has constant {name}; got decays="):
        rule_for(Rule(kind, {"lr": 0.1}), decays=decays)
    assert rule_for(Rule("Rprop", {"lr": 0.1}), decays=decays).name == "from_torch"


def test_options_of_an_implementation_change_nothing() -> None:
    """``foreach`` is an option of the class, and of no rule."""
    found = []
    for options in ({}, {"foreach": True}, {"foreach": False}):
        engine = engine_of(configured("RAdam", **options), {})
        step(engine, 0)
        found.append(weights(engine))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


def test_a_configured_optimizer_keeps_its_class_for_strategies() -> None:
    """Lightning asks for it where it clips, and no step runs without an engine."""
    optimizer = ConfiguredOptimizer(net().parameters(), Rule("NAdam", {"lr": 0.1}))
    assert optimizer.torch_class is torch.optim.NAdam
    with pytest.raises(OptionError, match="an engine steps the optimizer of a configuration"):
        optimizer.step()


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_defaults_are_those_of_the_class_that_deepspeed_takes(device: str) -> None:
    """DeepSpeed has other classes for an optimizer in host memory or on a disk."""
    folder = {"nvme_path": "/tmp"} if device == "nvme" else {}
    zero = {"stage": 1, "offload_optimizer": {"device": device, **folder}}

    def options(kind: str, **params: Any) -> Any:
        config = {"optimizer": {"type": kind, "params": params}, "zero_optimization": zero}
        rule = from_ds_config({**SIZES, **config}).rule
        assert rule is not None
        return rule.options

    assert options("Lion")["betas"] == ((0.9, 0.99) if device == "none" else (0.9, 0.999))
    assert options("Lion", betas=[0.5, 0.6])["betas"] == (0.5, 0.6)
    for kind in ("Adam", "AdamW"):
        found = options(kind)
        assert (found["lr"], found["betas"], found["eps"]) == (1e-3, (0.9, 0.999), 1e-8)
        assert found["weight_decay"] == 0
    found = options("Adagrad")
    assert (found["lr"], found["eps"], found["weight_decay"]) == (1e-2, 1e-10, 0)


@pytest.mark.shows(
    "Muon with `gradient_clipping`",
    "different",
    "gradients are clipped at each stage, and then orthogonalised; DeepSpeed's stages 1 and 2 clip "
    "what it steps by",
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_clip_does_not_shorten_the_steps_of_muon(stage: int) -> None:
    """An orthogonalised gradient has one length, whatever the clip."""

    def change(clip: float) -> dict[str, torch.Tensor]:
        section = {"type": "Muon", "params": {"lr": 0.02}}
        engine = engine_of(section, {}, stage=stage, gradient_clipping=clip)
        before = weights(engine)
        step(engine, 0)
        norm = engine.get_global_grad_norm()
        assert norm > 10 * 0.01
        return {name: x - before[name] for name, x in weights(engine).items()}

    clipped, whole = change(0.01), change(0.0)
    for name, x in whole.items():
        torch.testing.assert_close(clipped[name], x, rtol=0.02, atol=1e-5)
        assert x.norm() > 0.01


@pytest.mark.shows(
    "Lion where gradient and momentum are exactly 0",
    "different",
    "stays, because the sign of 0 is 0; DeepSpeed's kernels move it by the rate",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lion_leaves_elements_without_a_gradient(stage: int) -> None:
    model = nn.Linear(4, 2, bias=False)
    config = {
        **SIZES,
        "optimizer": {"type": "Lion", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    before = weights(engine)["weight"]
    engine.backward(engine(torch.tensor([[1.0, 1.0, 0.0, 0.0]])).sum())
    engine.step()
    change = weights(engine)["weight"] - before
    expected = torch.tensor([[-0.5, -0.5, 0.0, 0.0]] * 2)
    torch.testing.assert_close(change, expected)


@pytest.mark.shows(
    "an optimizer with some of the trained parameters, and `gradient_clipping`",
    "different",
    "the norm over the optimizer's own at each stage; DeepSpeed's stage 0 in float32 has that of "
    "the module",
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_is_that_of_the_parameters_of_the_optimizer(stage: int) -> None:
    plain, model = net(), net()
    own = [param for name, param in model.named_parameters() if name.startswith("body")]
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(own, lr=1.0),
        config={**SIZES, "gradient_clipping": 0.1, "zero_optimization": {"stage": stage}},
    )[0]
    before = weights(engine)
    step(engine, 0)
    plain(x_of(0)).square().mean().backward()
    known = [param for name, param in plain.named_parameters() if name.startswith("body")]
    norm = nn.utils.clip_grad_norm_(known, 0.1)
    torch.testing.assert_close(float(engine.get_global_grad_norm()), float(norm))
    after = weights(engine)
    for name, param in plain.named_parameters():
        own_change = param.grad if name.startswith("body") else torch.zeros_like(param)
        torch.testing.assert_close(before[name] - after[name], own_change, **CLOSE)
