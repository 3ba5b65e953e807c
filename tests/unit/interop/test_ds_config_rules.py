"""Configurations of DeepSpeed as data: names, rules of parameter groups, late values, spellings."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests.interop.ds_configs import AUTO, FILES, auto_of
from tests.unit.interop.test_ds_config import batches, loss_fn, params
from zfun.errors import ConfigError, OptionError
from zfun.interop import AutoValues, from_ds_config
from zfun.interop import deepspeed as ds
from zfun.interop.ds_config import Rule, is_config, kind_of, momentum_for, rule_for, schedule_for

ZERO = "zero_optimization"
# By type, options that are no defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1, "betas": [0.8, 0.9]},
    "Adam": {"weight_decay": 0.1, "adam_w_mode": False},
    "Lamb": {"max_coeff": 5.0},
    "Lion": {"betas": [0.5, 0.6]},
    "Adagrad": {"lr_decay": 0.1},
    "SGD": {"momentum": 0.9},
    "OneBitAdam": {"freeze_step": 7},
    "Muon": {"momentum": 0.5},
    "RMSprop": {"alpha": 0.5},
    "NAdam": {"momentum_decay": 0.1},
}
NEEDED = {
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 20},
    "WarmupCosineLR": {"total_num_steps": 20},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
    "LRRangeTest": {},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("spell", [str.lower, str.upper])
@pytest.mark.shows(
    "`optimizer.type`, `scheduler.type`", "right", "in any case; one meaning in all adapters"
)
def test_an_optimizer_has_one_meaning_in_any_case(kind: str, spell: Any) -> None:
    def made(name: str) -> Any:
        optimizer = {"type": name, "params": {"lr": 0.1, **OPTIONS[kind]}}
        rule = from_ds_config({"optimizer": optimizer, "gradient_clipping": 0}).optimizer
        assert rule is not None
        return rule.description()

    assert made(spell(kind)) == made(kind)
    assert rule_for(Rule(spell(kind), OPTIONS[kind])).description() == (
        rule_for(Rule(kind, OPTIONS[kind])).description()
    )
    assert kind_of("optimizer", spell(kind)) == kind


@pytest.mark.parametrize("kind", NEEDED)
def test_a_schedule_has_one_meaning_in_any_case(kind: str) -> None:
    def rates(name: str) -> list[float]:
        schedule = schedule_for(Rule(name, {**NEEDED[kind]}), lr=0.5)
        return [schedule(step) for step in (0, 1, 5, 30)]

    assert rates(kind.lower()) == rates(kind.upper()) == rates(kind)
    assert rates(kind)[2] != rates(kind)[0]


def trained_by(rule: zf.optim.Optimizer, count: int = 5) -> dict[str, Tensor]:
    values = params()
    state = rule.init(values)
    for batch in batches(count, 1):
        leaves = {name: leaf.requires_grad_() for name, leaf in values.items()}
        grads = torch.autograd.grad(loss_fn(leaves, batch[0]), list(leaves.values()))
        values = {name: leaf.detach() for name, leaf in leaves.items()}
        values, state = rule.apply(dict(zip(values, grads, strict=True)), state, values)
    return values


def trained_by_torch(make: Any, rates: Any = None, count: int = 5) -> dict[str, Tensor]:
    leaves = {name: leaf.requires_grad_() for name, leaf in params().items()}
    optimizer = make(leaves)
    for step, batch in enumerate(batches(count, 1)):
        for index, group in enumerate(optimizer.param_groups if rates else ()):
            group["lr"] = rates(index, step)
        optimizer.zero_grad()
        loss_fn(leaves, batch[0]).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, leaf in expected.items():
        assert not torch.equal(leaf, params()[name])
        torch.testing.assert_close(found[name], leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "Adam", "ADAM"])
def test_adam_without_decoupled_decay_is_torchs_adam(kind: str) -> None:
    options = {"lr": 0.05, "weight_decay": 0.5, "adam_w_mode": False}
    expected = trained_by_torch(
        lambda leaves: torch.optim.Adam(leaves.values(), lr=0.05, weight_decay=0.5)
    )
    assert_close(trained_by(rule_for(Rule(kind, options))), expected)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    oracle = torch.nn.Linear(4, 1)
    oracle.load_state_dict(model.state_dict())
    plain = torch.optim.Adam(oracle.parameters(), lr=0.05, weight_decay=0.5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": kind, "params": options},
    }
    engine, *_ = ds.initialize(model=model, config=config)
    for step in range(4):
        batch = torch.full((2, 4), step + 1.0)
        engine.backward(engine(batch).square().mean())
        engine.step()
        plain.zero_grad()
        oracle(batch).square().mean().backward()
        plain.step()
    torch.testing.assert_close(engine.module_state_dict()["weight"], oracle.weight.detach())


def test_groups_have_rates_and_decays_of_their_own() -> None:
    config = {
        "optimizer": {"type": "adamw", "params": {"lr": 0.05, "betas": [0.8, 0.9]}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear"},
        },
    }
    recipe = from_ds_config(config)
    assert recipe.rule is not None
    assert recipe.rule.options["betas"] == (0.8, 0.9)
    groups = {"slow": (0.01, 0.3), "fast": (0.08, 0.0)}
    rules = {
        name: rule_for(recipe.rule, lr=recipe.rate_of(lr), weight_decay=decay)
        for name, (lr, decay) in groups.items()
    }
    found = trained_by(
        zf.optim.by_label(rules, lambda path, leaf: "slow" if path == "embed" else "fast"), 6
    )

    def make(leaves: dict[str, Tensor]) -> torch.optim.Optimizer:
        slow = [leaves["embed"]]
        fast = [leaf for name, leaf in leaves.items() if name != "embed"]
        pairs = zip((slow, fast), groups.values(), strict=True)
        return torch.optim.AdamW(
            [{"params": leaves, "weight_decay": decay} for leaves, (_, decay) in pairs],
            betas=(0.8, 0.9),
        )

    def rate(index: int, step: int) -> float:
        k, end = step - 1, 1e-4
        fall = (1 + math.cos(math.pi * min(1.0, (k - 2 + 1) / 4))) / 2
        ratio = 0.0 if k < 0 else k / 2 if k < 2 else end + (1 - end) * fall
        return list(groups.values())[index][0] * ratio

    assert_close(found, trained_by_torch(make, rate, 6))


def test_a_rule_refuses_options_by_name() -> None:
    with pytest.raises(ConfigError, match=r"eps: is no key of Lion(?s:.*)lr: must be a finite"):
        rule_for(Rule("Lion", {"lr": "high"}), eps=1e-8)
    with pytest.raises(ConfigError, match="names an optimizer of zfun"):
        rule_for(Rule("Lyon", {}))
    with pytest.raises(ConfigError, match="total_num_steps: the schedule needs the key"):
        schedule_for(Rule("WarmupDecayLR", {}), lr=1.0)
    with pytest.raises(OptionError, match="needs the learning rate"):
        schedule_for(Rule("WarmupCosineLR", {"total_num_steps": 3}))


def test_a_cycle_has_a_momentum_for_each_group() -> None:
    cycle = Rule("onecycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2})
    momentum = momentum_for(cycle)
    assert momentum is not None
    assert [round(momentum(step), 3) for step in range(4)] == [0.8, 0.85, 0.8, 0.85]
    assert momentum_for(Rule("WarmupLR", {})) is None
    rule = rule_for(Rule("Adam", {}), decays={"b1": momentum, "b2": 0.99})
    assert dict(rule.options)["b1"] is momentum
    recipe = from_ds_config({"scheduler": {"type": "OneCycle", "params": cycle.options}})
    assert recipe.momentum is not None
    assert recipe.momentum(2) == momentum(2)


@pytest.mark.parametrize(
    ("kind", "values", "muon", "adam"),
    [
        (None, {}, 0.25, 0.125),
        ("WarmupCosineLR", {"total_num_steps": 10**6}, 0.25, 0.125),
        ("WarmupLR", {}, 0.25, 0.125),
        ("WarmupLR", {"warmup_max_lr": 0.0625}, 0.0625, 0.0625),
        ("WarmupDecayLR", {"warmup_max_lr": 0.0625, "total_num_steps": 10**9}, 0.0625, 0.0625),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.03, "lr_range_test_step_rate": 0}, 0.03, 0.03),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.01}, 0.01, 0.01),
    ],
)
def test_a_schedule_of_one_rate_is_that_of_both_parts_of_muon(
    kind: str | None, values: dict[str, Any], muon: float, adam: float
) -> None:
    optimizer = {"type": "muon", "params": {"lr": 0.5, "muon_lr": 0.25, "adam_lr": 0.125}}
    config: dict[str, Any] = {"optimizer": optimizer, "gradient_clipping": 0}
    if kind is not None:
        warmup = {"warmup_num_steps": 2} if kind.startswith("Warmup") else {}
        config["scheduler"] = {"type": kind, "params": {**warmup, **values}}
    recipe = from_ds_config(config)

    def rates(rule: zf.optim.Optimizer | None) -> list[float]:
        assert rule is not None
        options = {name: part for part in rule.parts for name, _ in part.options}
        assert {"momentum", "b1"} <= options.keys()
        found = [dict(options[name].options) for name in ("momentum", "b1")]
        assert not any(callable(x["b1"]) for x in found if "b1" in x)
        rates = [x["learning_rate"] for x in found]
        return [x(3) if callable(x) else x for x in rates]

    assert rates(recipe.optimizer) == pytest.approx([muon, adam])
    assert recipe.rule is not None
    own = 0.5 if recipe.scheduler is None else recipe.rate_of(0.5)
    assert rates(rule_for(recipe.rule, lr=own)) == pytest.approx([muon, adam])


@pytest.mark.parametrize(
    ("params", "muon", "adam"),
    [
        ({}, 0.02, 3e-4),
        ({"muon_lr": 0.1}, 0.1, 3e-4),
        ({"lr": 0.5}, 0.5, 0.5),
        ({"lr": 0.5, "adam_lr": 0.1}, 0.5, 0.1),
    ],
)
def test_muon_has_the_defaults_of_deepspeed(
    params: dict[str, Any], muon: float, adam: float
) -> None:
    """Those of ``MuonWithAuxAdam``, whose Adam is not that of other optimizers."""
    rule = rule_for(Rule("Muon", params))
    found = {name: x for part in rule.parts for name, x in part.options}
    options = [dict(part.options) for part in rule.parts]
    by_part = {("momentum" in x): x["learning_rate"] for x in options if "learning_rate" in x}
    assert by_part == {True: muon, False: adam}
    assert (found["b1"], found["b2"], found["eps"]) == (0.9, 0.95, 1e-10)


def test_values_that_are_known_late_leave_the_schedule_out() -> None:
    autos = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(autos, "auto"),
        },
        ZERO: {"stage": 2},
    }
    early = dataclasses.replace(AUTO, num_steps=None, num_warmup=None)
    with pytest.raises(ConfigError, match=r"pass num_warmup=(?s:.*)pass num_steps="):
        from_ds_config(config, auto=early)
    recipe = from_ds_config(config, auto=early, late=("num_steps", "num_warmup"))
    assert (recipe.stage, recipe.late) == (2, ("num_steps", "num_warmup"))
    assert recipe.rule is not None
    assert recipe.rule.options["lr"] == 0.05
    assert recipe.optimizer is recipe.learning_rate is None
    assert "waits for num_steps=" in str(recipe)
    with pytest.raises(OptionError, match="waits for num_steps and num_warmup"):
        zf.simulate(2, lambda group: recipe.zero(loss_fn, group))
    whole = from_ds_config(config, auto=AUTO, late=("num_steps", "num_warmup"))
    assert whole.late == ()
    assert callable(whole.learning_rate)
    assert whole.learning_rate(4) == 0.05
    with pytest.raises(OptionError, match="late of from_ds_config"):
        from_ds_config(config, late=("hidden_size",))


def test_a_value_of_the_run_fills_every_type_and_adams_numbers_stay_adams() -> None:
    auto = AutoValues(learning_rate=0.25, betas=(0.7, 0.8), eps=1e-3)
    for kind in ("Lion", "sgd", "Adagrad", "Muon", "RMSprop"):
        recipe = from_ds_config({"optimizer": {"type": kind, "params": {"lr": "auto"}}}, auto=auto)
        assert recipe.learning_rate == 0.25

    def options(kind: str, **values: Any) -> Any:
        config = {"optimizer": {"type": kind, "params": values}}
        rule = from_ds_config(config, auto=auto).rule
        assert rule is not None
        return rule.options

    assert options("Lion")["betas"] == (0.9, 0.99)
    assert options("Lion", betas=[0.5, 0.6])["betas"] == (0.5, 0.6)
    assert options("Lion", betas="auto")["betas"] == options("Adam")["betas"] == (0.7, 0.8)
    assert (options("Adagrad")["eps"], options("Adam")["eps"]) == (1e-10, 1e-3)


def test_an_optimizer_of_the_caller_has_the_numbers_of_the_run() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    }
    auto = AutoValues(learning_rate=0.125, weight_decay=0.0)
    with pytest.raises(ConfigError, match="2 mistakes"):
        from_ds_config(config, auto=auto)
    recipe = from_ds_config(config, auto=auto, optimizer=zf.optim.sgd)
    assert callable(recipe.learning_rate)
    assert recipe.learning_rate(9) == 0.125
    assert recipe.rule is None


@pytest.mark.parametrize(
    ("optimizer", "config", "rates"),
    [
        (True, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, [3e-4]),
        (False, {"optimizer": {"type": "AdamW", "torch_adam": True}}, [1e-3]),
        (
            True,
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}},
            [0.0],
        ),
        (
            False,
            {
                "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"warmup_max_lr": 1e-3, "total_num_steps": 9},
                },
            },
            [0.0],
        ),
    ],
)
def test_an_engine_takes_an_optimizer_beside_a_configuration(
    optimizer: bool, config: dict[str, Any], rates: list[float]
) -> None:
    model = torch.nn.Linear(2, 1)
    given = torch.optim.SGD(model.parameters(), lr=3e-4) if optimizer else None
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": 1, **config}
    engine, *_ = ds.initialize(model=model, optimizer=given, config=config)
    assert engine.get_lr() == rates


@pytest.mark.shows(
    "unknown keys at the top level of a configuration, and beside `params`",
    "right",
    "a notice; in other sections they are mistakes",
)
def test_unknown_keys_of_the_top_level_are_kept_with_a_notice() -> None:
    recipe = from_ds_config({"my_experiment": {"lr": 3}, ZERO: {"stage": 1}})
    assert any(one.startswith("my_experiment: is no key") for one in recipe.notices)
    # Written by TRL's prepare_deepspeed; DeepSpeed ignores both.
    paths = {f"{ZERO}.stage3_prefetch_bucket_size": 230.4, f"{ZERO}.stage": 3}
    recipe = from_ds_config({ZERO: {"stage": 1}, **paths})
    assert recipe.stage == 1
    for path in paths:
        assert any(one.startswith(f"{path}: is no key") for one in recipe.notices)
    for config, words in (
        ({"gradient_cliping": 1}, "did you mean 'gradient_clipping'"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"overlap_comm": True}, "it belongs into zero_optimization"),
        ({ZERO: {"my_experiment": 1}}, f"{ZERO}.my_experiment: is no key"),
        ({ZERO: {"offload_param.device": "cpu"}}, "not a path"),
    ):
        with pytest.raises(ConfigError, match=words):
            from_ds_config(config)


@pytest.mark.parametrize(
    ("section", "key", "value", "why"),
    [
        # As the configurations of VideoMAE, BEiT and LaBraM.
        ("optimizer", "adam_w_mode", False, "inside of params only"),
        ("optimizer", "torch_adam", True, "inside of params only"),
        ("optimizer", "lr", 5.0, "inside of params only"),
        ("optimizer", "foo", {"a": 1}, "is no key"),
        ("optimizer", "max_lr", None, "is no key"),
        ("optimizer", "gradient_clipping", 0.5, "is no key"),
        ("scheduler", "warmup_num_steps", 7, "inside of params only"),
        ("scheduler", "last_epoch", -1, "is no key"),
    ],
)
def test_unknown_keys_beside_params_are_ignored_with_a_notice(
    section: str, key: str, value: Any, why: str
) -> None:
    config: dict[str, Any] = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.25, "adam_w_mode": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    plain = from_ds_config(config)
    config[section][key] = value
    recipe = from_ds_config(config)
    assert (recipe.rule, recipe.scheduler) == (plain.rule, plain.scheduler)
    assert recipe.max_grad_norm == plain.max_grad_norm
    new = set(recipe.notices) - set(plain.notices)
    assert [one for one in new if why in one and one.startswith(f"{section}.{key}: ")] == [*new]


@pytest.mark.parametrize("key", ["param", "Params", "typ", "params.lr"])
def test_a_misspelt_key_beside_params_is_a_mistake(key: str) -> None:
    config = {"optimizer": {"type": "Adam", key: {"lr": 0.25}}}
    with pytest.raises(ConfigError, match=rf"optimizer\.{key}: is no key"):
        from_ds_config(config)


@pytest.mark.parametrize(
    "config",
    [
        {"steps_per_print": math.inf},
        {"zero_allow_untested_optimizer": 1},
        {"wall_clock_breakdown": 0},
        {"gradient_allreduce_op": "Mean"},
        {"pipeline": {"stages": "auto"}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"hybrid_engine": {"enabled": False}},
        {"compile": {"deepcompile": False}},
        {"comms_logger": {"enabled": True}},
        {"torch_autocast": None},
        {"torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
        {"checkpoint": {"writer": {"type": "FAST"}}},
    ],
    ids=str,
)
def test_these_are_no_mistakes(config: dict[str, Any]) -> None:
    recipe = from_ds_config(config)
    given = [one.verdict for one in recipe.entries if one.verdict != "default"]
    assert set(given) <= {"ignored", "off", "mapped"}
    assert given or config == {"torch_autocast": None}


@pytest.mark.parametrize(
    "name", ["bf16", "BFLOAT16", "bfloat16", "torch.bfloat16", torch.bfloat16], ids=str
)
def test_a_dtype_has_many_spellings(name: Any) -> None:
    recipe = from_ds_config({"communication_data_type": name})
    assert recipe.precision.reduce is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tensor_parallel": {"autotp": 2}}, "did you mean 'autotp_size'"),
        ({"torch_autocast": {"enabled": True}}, 'write "dtype": "bfloat16"'),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "fp16": {"enabled": True}},
            "autocast keeps parameters in float32",
        ),
        ({"torch_autocast": {"enabled": True, "dtyp": "bf16"}}, "did you mean 'dtype'"),
        ({"communication_data_type": "fp8"}, "must be 'fp32', 'fp16', 'bf16'"),
        ({ZERO: {"cpu_offload": "cpu"}}, "cpu_offload: must be true or false"),
        ({"steps_per_print": -math.inf}, "must be an integer of at least 1, infinity"),
    ],
    ids=str,
)
def test_these_are_mistakes(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_ds_config(config)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_autocast_is_torchs_around_the_loss(stage: int) -> None:
    config = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0,
        ZERO: {"stage": stage},
    }
    recipe = from_ds_config(config, auto=AutoValues(dtype=torch.bfloat16))
    assert (recipe.autocast, recipe.precision) == (torch.bfloat16, zf.Precision())

    def main(group: zf.Group) -> list[float]:
        zero = recipe.zero(loss_fn, group)
        state, losses = zero.init(params()), []
        for batch in batches(4):
            state, info = zero.step(state, batch[group.rank])
            losses.append(info.loss.item())
        return losses

    plain = {name: leaf.requires_grad_() for name, leaf in params().items()}
    optimizer = torch.optim.SGD(plain.values(), lr=0.5)
    expected = []
    for step in batches(4):
        optimizer.zero_grad()
        losses = []
        for batch in step:
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(loss_fn(plain, batch))
            (losses[-1] / len(step)).backward()
        optimizer.step()
        expected.append(torch.stack(losses).mean().item())
    found = zf.simulate(2, main)[0]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] != pytest.approx(found[0], rel=1e-2)


def test_autocast_in_float16_has_a_loss_scale_also_in_an_engine() -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "half"}}
    assert isinstance(from_ds_config(config).precision.loss_scale, zf.optim.LossScale)
    model = torch.nn.Linear(2, 1)
    config |= {"optimizer": {"type": "SGD"}, "train_batch_size": 2}
    engine, *_ = ds.initialize(model=model, config=config)
    out = engine(torch.ones(2, 2))
    assert out.dtype is torch.float16
    assert engine.cur_scale == 2.0**16
    before, gradient = model.weight.detach().clone(), 0.02 * out.detach().float().sum()
    # Small, because the scaled gradient is in float16.
    engine.backward(0.01 * out.float().square().sum())
    engine.step()
    change = before - model.weight.detach()
    expected = engine.get_lr()[0] * gradient.expand(1, 2)
    torch.testing.assert_close(change, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_a_dict_and_base64_are_one_configuration(path: Path) -> None:
    recipe = from_ds_config(path, auto=auto_of(path))
    text = path.read_bytes()
    encoded = base64.urlsafe_b64encode(text).decode()
    assert str(from_ds_config(encoded, auto=auto_of(path))) == str(recipe)
    lines = [line.partition("//")[0] for line in text.decode().splitlines()]
    keys = json.loads("\n".join(lines))
    assert str(from_ds_config(keys, auto=auto_of(path))) == str(recipe)
    assert is_config(keys)
    assert is_config(encoded)


def test_a_dict_of_options_of_zero_is_no_configuration() -> None:
    assert not is_config({"stage": 3, "precision": None})
    assert not is_config({"stage": 3, "optimizer": zf.optim.sgd(0.1)})
    assert not is_config(3)
    assert is_config({"train_batch_size": 8})
    assert is_config({"bfloat16": {"enabled": True}})


def test_text_that_is_no_path_and_no_base64_is_refused() -> None:
    for text in ("no such file", "a" * 5000, base64.b64encode(b"[1]").decode()):
        with pytest.raises(OptionError, match="cannot be read"):
            from_ds_config(text)
    with pytest.raises(OptionError, match=r"must be a dict or a path; got 'null.x00byte'"):
        from_ds_config("null\0byte")


def test_a_file_without_quotes_needs_hjson(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "config.hjson"
    path.write_text("{\n  # a comment\n  zero_optimization: {stage: 2}\n}\n")
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match="install the package hjson"):
        from_ds_config(path)
    calls = []

    def loads(text: str, object_pairs_hook: Any) -> Any:
        calls.append(text)
        pairs = [("stage", 2)] if len(calls) == 1 else [("stage", 2), ("stage", 3)]
        return object_pairs_hook([(ZERO, object_pairs_hook(pairs))])

    monkeypatch.setitem(sys.modules, "hjson", SimpleNamespace(loads=loads))
    assert from_ds_config(path).stage == 2
    assert calls == [path.read_text()]
    with pytest.raises(ConfigError, match="stage: a key stands once"):
        from_ds_config(path)
