"""The optimizer and the schedule of a configuration, as data and as functions.

A :class:`Rule` is a type with options. ``Recipe.optimizer`` is one optimizer for all leaves. An
adapter with parameter groups makes one optimizer for each group instead::

    rule_for(recipe.rule, lr=recipe.rate_of(group["lr"]), weight_decay=group["weight_decay"])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zfun import optim
from zfun.errors import OptionError
from zfun.interop.ds_config._mistakes import error_of
from zfun.interop.ds_config._rules import contradictions
from zfun.interop.ds_config._values import Checked
from zfun.interop.ds_config.table import torch_options
from zfun.interop.ds_config.table._optim import SCHEDULERS, TORCH_OPTIMIZERS
from zfun.optim import Optimizer, Schedule

# torch's default, which DeepSpeed passes on where torch_adam is true.
_DECAYED_BY_TORCH = 0.01
# DeepSpeed's rate of the Adam beside Muon, where lr is not written.
_BESIDE_MUON = 3e-4
# DeepSpeed's default for Lion with offload_optimizer, whose class is another one.
_OF_CPU_LION = (0.9, 0.999)
# The rates of a parameter group; all but the first are those of Muon.
RATES = ("lr", "muon_lr", "adam_lr", "base_lr")
# Schedules that write one rate into every group, whatever the group had.
_ABSOLUTE = frozenset(SCHEDULERS) - {"WarmupCosineLR"}


class Rule(NamedTuple):
    """An optimizer or a schedule of a configuration, as data.

    Attributes:
        kind: the type in the table's spelling, such as ``"AdamW"`` or ``"WarmupLR"``.
        options: the values of ``params`` by name, defaults of DeepSpeed included.

    Example:
        >>> from zfun.interop import from_ds_config
        >>> from_ds_config({"optimizer": {"type": "sgd", "params": {"lr": 0.5}}}).rule.kind
        'SGD'
    """

    kind: str
    options: Mapping[str, Any]

    @property
    def is_absolute(self) -> bool:
        """Whether this is a schedule that writes one rate into every group."""
        is_own = self.kind.startswith("Warmup") and self.options.get("warmup_max_lr") is None
        return self.kind in _ABSOLUTE and not is_own


@dataclass(frozen=True)
class AbsoluteRate:
    """A schedule that writes one rate into every group."""

    schedule: Schedule

    def __call__(self, step: int) -> float:
        return self.schedule(step)


def rule_of(found: Checked, section: str) -> Rule | None:
    """Return the optimizer or the scheduler of a checked configuration; ``None`` without one."""
    kind = found.kind(section)
    if kind is None:
        return None
    options = found.options(section) | (found.extra if section == "optimizer" else {})
    if options.pop("torch_adam", False) and "optimizer.params.weight_decay" not in found.given:
        options["weight_decay"] = _DECAYED_BY_TORCH if options.get("adam_w_mode", True) else 0.0
    is_known = lambda path: path in found.given or path in found.values.sources
    if kind == "Muon" and options["adam_lr"] is None:
        options["adam_lr"] = None if is_known("optimizer.params.lr") else _BESIDE_MUON
    is_offloaded = found.values["zero_optimization.offload_optimizer.device"] in ("cpu", "nvme")
    if kind == "Lion" and is_offloaded and not is_known("optimizer.params.betas"):
        options["betas"] = _OF_CPU_LION
    return Rule(kind, options)


def rates_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the rates of a parameter group."""
    return RATES if "muon_lr" in group else RATES[:1]


def own_rates(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of the two parts of Muon."""
    own = {name: options[name] for name in ("muon_lr", "adam_lr")}
    return {name: options["lr"] if rate is None else rate for name, rate in own.items()}


def rule_for(
    rule: Rule,
    *,
    lr: float | Schedule | None = None,
    decays: Mapping[str, Any] | None = None,
    **options: Any,
) -> Optimizer:
    """Make the optimizer of one parameter group.

    Args:
        rule: the type, in any case, and the options of all groups.
        lr: the learning rate, a number or a function of the steps taken; the rule's by default.
        decays: ``b1`` and ``b2``, or ``momentum``, as numbers or functions of the steps taken;
            ``cycle_of`` makes them of a schedule's momentum.
        options: the group's own, by the names in ``optimizer.params``, such as ``weight_decay``.

    Returns:
        The optimizer, without clipping.

    Raises:
        ConfigError: an option is wrong or does not exist; the message lists all mistakes.
        OptionError: a class of torch does not take the options.

    Example:
        >>> adam = Rule("adam", {"lr": 0.1, "adam_w_mode": False})
        >>> dict(rule_for(adam, lr=0.2, weight_decay=0.5).options)["weight_decay"]
        0.5
    """
    params = {**rule.options, **options, **({} if lr is None or callable(lr) else {"lr": lr})}
    found = Checked({"optimizer": {"type": rule.kind, "params": params}})
    if found.mistakes:
        raise error_of(found.mistakes, f"a parameter group of {rule.kind}")
    whole = rule_of(found, "optimizer")
    assert whole is not None
    base = whole.options["lr"]

    def rate_of(own: float) -> float | Schedule:
        if not callable(lr):
            return own
        if own == base or not base or isinstance(lr, AbsoluteRate):
            return lr
        return lambda step: own / base * lr(step)

    return made(whole, rate_of, decays or {})


def schedule_for(rule: Rule, *, lr: float | None = None) -> Schedule:
    """Make the learning rate of one parameter group.

    Args:
        rule: the type, in any case, and the options of the scheduler.
        lr: the learning rate that the group has without a schedule, where known.

    Returns:
        A function of the steps taken, which refuses lists of several numbers. DeepSpeed's counter
        is 0 at the second step, so warm-ups are one step late.

    Raises:
        ConfigError: an option is wrong or does not exist; the message lists all mistakes.
        OptionError: the schedule needs ``lr``.

    Example:
        >>> rise = Rule("warmuplr", {"warmup_num_steps": 4, "warmup_type": "linear"})
        >>> [schedule_for(rise, lr=1.0)(step) for step in range(6)]
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    """
    rule = completed(rule)
    if is_by_group(rule):
        return functools.partial(_alone, schedule_for, rule, lr=lr)
    schedule = _late(_by_step(rule.kind, rule.options, lr), rule.options)
    return AbsoluteRate(schedule) if rule.is_absolute else schedule


def is_by_group(rule: Rule) -> bool:
    """Whether the options of a schedule have lists with one number for each parameter group."""
    return any(isinstance(value, (list, tuple)) for value in rule.options.values())


def of_group(rule: Rule, index: int, count: int) -> Rule:
    """Return the schedule of one parameter group: entry ``index`` of each list.

    Raises:
        OptionError: a list has not ``count`` entries.

    Example:
        >>> rates = Rule("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": [0.1, 0.2]})
        >>> of_group(rates, 1, 2).options
        {'warmup_min_lr': 0.0, 'warmup_max_lr': 0.2}
    """
    own = {}
    for name, value in rule.options.items():
        is_list = isinstance(value, (list, tuple))
        if is_list and len(value) != count:
            raise OptionError(
                f"a list of {rule.kind} has a number for each parameter group; got "
                f"scheduler.params.{name} {list(value)} for {count} group{'s' * (count > 1)}; "
                f"write one number, or a list of {count}"
            )
        own[name] = value[index] if is_list else value
    return rule._replace(options=own)


def _alone(make: Callable[..., Any], rule: Rule, step: int, **options: Any) -> float:
    """Return the number of a step; the optimizer has no groups, and so takes no lists."""
    return make(of_group(rule, 0, 1), **options)(step)


def momentum_for(rule: Rule) -> Schedule | None:
    """Make the momentum that OneCycle changes beside the learning rate, by the steps taken.

    The result is ``None`` where the scheduler changes no momentum.

    Example:
        >>> cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
        >>> momentum = momentum_for(Rule("OneCycle", cycle))
        >>> [round(momentum(step), 3) for step in range(3)]
        [0.8, 0.85, 0.8]
    """
    kind, s = rule = completed(rule)
    if kind != "OneCycle" or not s["cycle_momentum"]:
        return None
    if is_by_group(rule):
        return functools.partial(_alone, momentum_for, rule)
    bounds = (s["cycle_min_mom"], s["cycle_max_mom"])
    cycle = optim.one_cycle_momentum(*bounds, **_cycle(s), decay_rate=s["decay_mom_rate"])
    late, begins = _late(cycle, s), s["last_batch_iteration"] == -1
    # As DeepSpeed, whose constructor writes the least momentum, and the first step the rest.
    return lambda step: float(s["cycle_min_mom"]) if begins and not step else late(step)


def cycle_of(momentum: Schedule | None) -> dict[str, Any]:
    """Return the decays of an optimizer with betas; OneCycle sets the second to a constant."""
    return {} if momentum is None else {"b1": momentum, "b2": 0.99}


def made(
    rule: Rule, rate_of: Callable[[float], float | Schedule], decays: Mapping[str, Any]
) -> Optimizer:
    """Return the optimizer of a rule with all options.

    ``rate_of`` makes a rate of a learning rate in the options, and ``decays`` has ``b1`` and
    ``b2``, or ``momentum``, where a schedule changes them.
    """
    kind, o = rule
    rate = rate_of(o["lr"])
    if kind in TORCH_OPTIMIZERS:
        own = {"betas" if name in ("b1", "b2") else name for name in decays}
        if constant := sorted(own & torch_options(kind)):
            raise OptionError(
                f"torch.optim.{kind} has constant {constant[0]}; got decays= of {[*decays]}; give "
                f"{constant[0]} as an option, and leave decays out"
            )
        return _from_torch(kind, rate, {name: x for name, x in o.items() if name != "lr"})
    decay = {"weight_decay": o["weight_decay"]}
    if kind == "SGD":
        momentum = decays.get("momentum", o["momentum"])
        return optim.sgd(rate, momentum=momentum, nesterov=o["nesterov"], **decay)
    if kind == "Adagrad":
        return optim.adagrad(rate, rate_decay=o["lr_decay"], eps=o["eps"], **decay)
    betas = dict(zip(("b1", "b2"), o["betas"], strict=True))
    betas |= {name: decays[name] for name in betas if name in decays}
    if kind == "Lion":
        return optim.lion(rate, **betas, **decay)
    options = {**betas, "eps": o["eps"], **decay}
    if kind == "OneBitAdam":
        steps = o["freeze_step"]
        return optim.onebit_adam(rate, freeze_step=steps, bias_correction=False, **options)
    if kind == "Lamb":
        bounds = {"min_ratio": o["min_coeff"], "max_ratio": o["max_coeff"]}
        return optim.lamb(rate, **options, **bounds)
    if kind == "Muon":
        own = own_rates(o)
        return optim.muon(
            rate_of(own["muon_lr"]),
            optim.adamw(rate_of(own["adam_lr"]), **options),
            matrices=_is_hidden_matrix,
            momentum=o["momentum"],
            nesterov=o["nesterov"],
            **decay,
        )
    return (optim.adamw if o.get("adam_w_mode", True) else optim.adam)(rate, **options)


def _from_torch(kind: str, rate: float | Schedule, options: Mapping[str, Any]) -> Optimizer:
    try:
        return optim.from_torch(getattr(torch.optim, kind), lr=rate, **options)
    except (TypeError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f"torch.optim.{kind} must take the parameters; got {dict(options)} ({error}); see the "
            "page of the class"
        ) from error


def _is_hidden_matrix(path: str, leaf: Any) -> bool:
    """DeepSpeed's choice: matrices that are neither embeddings nor the head."""
    name = path.lower()
    return leaf.ndim == 2 and not any(word in name for word in ("embed", "lm_head"))


def completed(rule: Rule) -> Rule:
    """Return a schedule with all options, or raise ``ConfigError`` with all mistakes."""
    found = Checked({"scheduler": {"type": rule.kind, "params": dict(rule.options)}})
    mistakes = [*found.mistakes, *contradictions(found)]
    if mistakes:
        raise error_of(mistakes, f"the schedule {rule.kind}")
    whole = rule_of(found, "scheduler")
    assert whole is not None
    return whole


def _late(schedule: Schedule, s: Mapping[str, Any]) -> Schedule:
    """Start after the step that the options name."""
    offset = s["last_batch_iteration"] + 1
    return schedule if offset == 0 else lambda step: schedule(step + offset)


def _by_step(kind: str, s: Mapping[str, Any], rate: float | None) -> Schedule:
    if kind == "LRRangeTest":
        start, steps, rise = (
            s[f"lr_range_test_{name}"] for name in ("min_lr", "step_size", "step_rate")
        )
        return optim.lr_range_test(start, steps, rise, staircase=s["lr_range_test_staircase"])
    if kind == "OneCycle":
        bounds = s["cycle_min_lr"], s["cycle_max_lr"]
        return optim.one_cycle(*bounds, **_cycle(s), decay_rate=s["decay_lr_rate"])
    warmup, shape = max(2, s["warmup_num_steps"]), s["warmup_type"]
    if kind == "WarmupCosineLR":
        return _cosine(s, _known(rate, "optimizer.params.lr"), warmup, shape)
    low, high = s["warmup_min_lr"], s["warmup_max_lr"]
    high = _known(rate, "warmup_max_lr") if high is None else high
    rise = optim.warmup(high, warmup, start=low, shape=shape)
    if kind == "WarmupLR":
        return lambda step: rise(step - 1)
    total = s["total_num_steps"]
    # A run that ends in the warm-up has no fall, and the rate drops at once.
    both = (
        optim.warmup_linear(high, warmup, total, low, start=low, shape=shape)
        if warmup < total
        else optim.join([rise, optim.constant(low)], [warmup])
    )
    return lambda step: both(step - 1)


def _cosine(s: Mapping[str, Any], rate: float, warmup: int, shape: str) -> Schedule:
    total, end = s["total_num_steps"], rate * s["cos_min_ratio"]
    rise = optim.warmup(rate, warmup, start=rate * s["warmup_min_ratio"], shape=shape)
    fall = optim.warmup_cosine(rate, warmup, total, end) if warmup < total else optim.constant(end)

    def schedule(step: int) -> float:
        # The fall counts from this step, and the warm-up from the step before.
        if step == 0:
            return 0.0
        return rise(step - 1) if step <= warmup else fall(step)

    return schedule


def _cycle(s: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_up": s["cycle_first_step_size"],
        "num_down": s["cycle_second_step_size"],
        "stairs_up": s["cycle_first_stair_count"],
        "stairs_down": s["cycle_second_stair_count"],
        "decay_steps": s["decay_step_size"],
    }


def _known(rate: float | None, name: str) -> float:
    if rate is None:
        raise OptionError(
            "the schedule needs the learning rate of the optimizer; got none; write "
            f"{name}, or pass learning_rate="
        )
    return rate
