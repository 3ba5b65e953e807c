"""Optimizers of torch as rules of ``zf.optim``, group by group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import optim
from zfun.errors import NotElementwiseError
from zfun.optim import Optimizer

Rule: TypeAlias = tuple[Callable[..., Optimizer], dict[str, Any]]
"""A function that makes an optimizer, and the options."""

# Options that choose an implementation of torch, and not a result.
_IMPLEMENTATIONS = frozenset(["foreach", "fused", "capturable", "differentiable"])


def rule_of(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> Rule:
    """Return the function of zfun that makes an optimizer, and the options of a group.

    Args:
        cls: of the optimizer.
        group: one of the parameter groups.

    Raises:
        NotElementwiseError: the class needs whole tensors.
    """
    group = {name: _number(value) for name, value in group.items()}
    native = _NATIVE.get(cls)
    rule = None if native is None else native(group)
    if rule is not None:
        return rule
    if cls is torch.optim.LBFGS:
        raise NotElementwiseError(
            "sharded optimizers work element by element; torch.optim.LBFGS searches along a line, "
            "and calls the loss again; use another optimizer"
        )
    known = set(inspect.signature(cls).parameters) - {"params"} - _IMPLEMENTATIONS
    options = {name: value for name, value in group.items() if name in known}
    return functools.partial(optim.from_torch, cls), options


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _adam(make: Callable[..., Optimizer], decays: bool, group: Mapping[str, Any]) -> Rule | None:
    if group.get("amsgrad") or group.get("maximize"):
        return None
    if group.get("decoupled_weight_decay", decays) != decays:
        make = optim.adamw if group["decoupled_weight_decay"] else optim.adam
    b1, b2 = map(_number, group["betas"])
    return make, {
        "learning_rate": group["lr"],
        "b1": b1,
        "b2": b2,
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }


def _sgd(group: Mapping[str, Any]) -> Rule | None:
    if group.get("dampening") or group.get("maximize"):
        return None
    return optim.sgd, {
        "learning_rate": group["lr"],
        "momentum": group["momentum"],
        "nesterov": group["nesterov"],
        "weight_decay": group["weight_decay"],
    }


def _adagrad(group: Mapping[str, Any]) -> Rule | None:
    if group.get("initial_accumulator_value") or group.get("maximize"):
        return None
    return optim.adagrad, {
        "learning_rate": group["lr"],
        "rate_decay": group["lr_decay"],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }


_NATIVE: dict[type, Callable[[Mapping[str, Any]], Rule | None]] = {
    torch.optim.Adam: functools.partial(_adam, optim.adam, False),
    torch.optim.AdamW: functools.partial(_adam, optim.adamw, True),
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
}
