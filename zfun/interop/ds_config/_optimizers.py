"""The optimizer and the schedule of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zfun import optim
from zfun.errors import OptionError
from zfun.interop.ds_config._values import Values
from zfun.interop.ds_config.table._optim import TORCH_OPTIMIZERS
from zfun.optim import Optimizer, Schedule

__all__ = ["momentum_of", "optimizer_of", "schedule_of"]

_O = "optimizer.params"
_S = "scheduler.params"
_DECAYED_BY_TORCH = 0.01


def optimizer_of(
    kind: str,
    v: Values,
    given: Mapping[str, Any],
    extra: Mapping[str, Any],
    rate: float | Schedule,
    decays: Mapping[str, Any],
) -> Optimizer:
    """Return the optimizer of a type.

    Args:
        kind: the type.
        v: the values of all keys.
        given: the values as written, by path.
        extra: parameters for a class of ``torch.optim``.
        rate: the learning rate.
        decays: ``b1`` and ``b2``, or ``momentum``, where a schedule changes them.
    """
    if kind in TORCH_OPTIMIZERS:
        return _from_torch(kind, rate, extra)
    decay = {"weight_decay": v[f"{_O}.weight_decay"]}
    if kind == "SGD":
        momentum = decays.get("momentum", v[f"{_O}.momentum"])
        return optim.sgd(rate, momentum=momentum, nesterov=v[f"{_O}.nesterov"], **decay)
    if kind == "Adagrad":
        options = {"rate_decay": v[f"{_O}.lr_decay"], "eps": v[f"{_O}.eps"]}
        return optim.adagrad(rate, **options, **decay)
    first, second = v[f"{_O}.betas"]
    betas: dict[str, Any] = {"b1": first, "b2": second}
    betas |= {name: decays[name] for name in betas if name in decays}
    if kind == "Lion":
        return optim.lion(rate, **betas, **decay)
    options = {**betas, "eps": v[f"{_O}.eps"], **decay}
    if kind == "OneBitAdam":
        steps = v[f"{_O}.freeze_step"]
        return optim.onebit_adam(rate, freeze_step=steps, bias_correction=False, **options)
    if kind == "Lamb":
        bounds = {"min_ratio": v[f"{_O}.min_coeff"], "max_ratio": v[f"{_O}.max_coeff"]}
        return optim.lamb(rate, **options, **bounds)
    if kind == "Muon":
        return optim.muon(
            _part(rate, v[f"{_O}.lr"], v[f"{_O}.muon_lr"], given),
            optim.adamw(_part(rate, v[f"{_O}.lr"], v[f"{_O}.adam_lr"], given), **options),
            matrices=_is_hidden_matrix,
            momentum=v[f"{_O}.momentum"],
            nesterov=v[f"{_O}.nesterov"],
            **decay,
        )
    if kind == "Adam" and not v[f"{_O}.adam_w_mode"]:
        return optim.adam(rate, **options)
    if v[f"{_O}.torch_adam"] and f"{_O}.weight_decay" not in given:
        options["weight_decay"] = _DECAYED_BY_TORCH
    return optim.adamw(rate, **options)


def _from_torch(kind: str, rate: float | Schedule, extra: Mapping[str, Any]) -> Optimizer:
    try:
        return optim.from_torch(getattr(torch.optim, kind), lr=rate, **extra)
    except (TypeError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(
            f"torch.optim.{kind} must take the parameters; got {dict(extra)} ({error}); see the "
            "page of the class"
        ) from error


def _part(
    rate: float | Schedule, base: float, own: float | None, given: Mapping[str, Any]
) -> float | Schedule:
    """Return the rate of a part of Muon that has a learning rate of its own.

    DeepSpeed's cosine multiplies this rate, and the other schedules replace it.
    """
    if own is None or own == base:
        return rate
    if not callable(rate):
        return own
    if str(given.get("scheduler.type")).lower() != "warmupcosinelr" or not base:
        return rate
    return lambda step: own / base * rate(step)


def _is_hidden_matrix(path: str, leaf: Any) -> bool:
    """DeepSpeed's choice: matrices that are neither embeddings nor the head."""
    name = path.lower()
    return leaf.ndim == 2 and not any(word in name for word in ("embed", "lm_head"))


def schedule_of(kind: str, v: Values, rate: float | None) -> Schedule:
    """Return the schedule of a type, by steps taken.

    DeepSpeed's counter is 0 at the second step, so warm-ups are one step late.

    Args:
        kind: the type.
        v: the values of all keys.
        rate: the learning rate of the optimizer, where known.
    """
    schedule = _by_step(kind, v, rate)
    offset = v[f"{_S}.last_batch_iteration"] + 1
    return schedule if offset == 0 else lambda step: schedule(step + offset)


def _by_step(kind: str, v: Values, rate: float | None) -> Schedule:
    if kind == "LRRangeTest":
        name = f"{_S}.lr_range_test"
        return optim.lr_range_test(
            v[f"{name}_min_lr"],
            v[f"{name}_step_size"],
            v[f"{name}_step_rate"],
            staircase=v[f"{name}_staircase"],
        )
    if kind == "OneCycle":
        return optim.one_cycle(
            v[f"{_S}.cycle_min_lr"],
            v[f"{_S}.cycle_max_lr"],
            **_cycle(v),
            decay_rate=v[f"{_S}.decay_lr_rate"],
        )
    warmup = max(2, v[f"{_S}.warmup_num_steps"])
    shape = v[f"{_S}.warmup_type"]
    if kind == "WarmupCosineLR":
        return _cosine(v, _known(rate, "optimizer.params.lr"), warmup, shape)
    low = v[f"{_S}.warmup_min_lr"]
    high = v[f"{_S}.warmup_max_lr"]
    high = _known(rate, "warmup_max_lr") if high is None else high
    rise = optim.warmup(high, warmup, start=low, shape=shape)
    if kind == "WarmupLR":
        return lambda step: rise(step - 1)
    total = v[f"{_S}.total_num_steps"]
    # A run that ends in the warm-up has no fall, and the rate drops at once.
    both = (
        optim.warmup_linear(high, warmup, total, low, start=low, shape=shape)
        if warmup < total
        else optim.join([rise, optim.constant(low)], [warmup])
    )
    return lambda step: both(step - 1)


def _cosine(v: Values, rate: float, warmup: int, shape: str) -> Schedule:
    total = v[f"{_S}.total_num_steps"]
    rise = optim.warmup(rate, warmup, start=rate * v[f"{_S}.warmup_min_ratio"], shape=shape)
    end = rate * v[f"{_S}.cos_min_ratio"]
    fall = optim.warmup_cosine(rate, warmup, total, end) if warmup < total else optim.constant(end)

    def schedule(step: int) -> float:
        # The fall counts from this step, and the warm-up from the step before.
        if step == 0:
            return 0.0
        return rise(step - 1) if step <= warmup else fall(step)

    return schedule


def momentum_of(kind: str, v: Values) -> Schedule | None:
    """Return the momentum of OneCycle, or ``None``."""
    if kind != "OneCycle" or not v[f"{_S}.cycle_momentum"]:
        return None
    schedule = optim.one_cycle_momentum(
        v[f"{_S}.cycle_min_mom"],
        v[f"{_S}.cycle_max_mom"],
        **_cycle(v),
        decay_rate=v[f"{_S}.decay_mom_rate"],
    )
    offset = v[f"{_S}.last_batch_iteration"] + 1
    return schedule if offset == 0 else lambda step: schedule(step + offset)


def _cycle(v: Values) -> dict[str, Any]:
    return {
        "num_up": v[f"{_S}.cycle_first_step_size"],
        "num_down": v[f"{_S}.cycle_second_step_size"],
        "stairs_up": v[f"{_S}.cycle_first_stair_count"],
        "stairs_down": v[f"{_S}.cycle_second_stair_count"],
        "decay_steps": v[f"{_S}.decay_step_size"],
    }


def _known(rate: float | None, name: str) -> float:
    if rate is None:
        raise OptionError(
            "the schedule needs the learning rate of the optimizer; got none; write "
            f"{name}, or pass learning_rate="
        )
    return rate
