"""Optimizers of torch as pure ones, with the numbers of the parameter groups in the state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import optim
from zfun.errors import OptionError
from zfun.optim import Optimizer

__all__ = ["ParamGroups"]

_NO_GROUP = "no group"
# Options of torch that choose an implementation, and no arithmetic.
_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable")


class _Rule(NamedTuple):
    """A rule of ``zf.optim`` for a class of torch.

    Attributes:
        make: the rule.
        options: the arguments of the rule, from a parameter group.
        zero: options of torch that the rule does not have, and that must be 0 or False.
    """

    make: Callable[..., Optimizer]
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    zero: tuple[str, ...]


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
    b1, b2 = map(float, group["betas"])
    return {**_common(group), "b1": b1, "b2": b2, "eps": float(group["eps"])}


def _sgd(group: Mapping[str, Any]) -> dict[str, Any]:
    own = {"momentum": float(group["momentum"]), "nesterov": bool(group["nesterov"])}
    return {**_common(group), **own}


def _adagrad(group: Mapping[str, Any]) -> dict[str, Any]:
    own = {"rate_decay": float(group["lr_decay"]), "eps": float(group["eps"])}
    return {**_common(group), **own}


def _common(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"learning_rate": float(group["lr"]), "weight_decay": float(group["weight_decay"])}


_RULES: dict[type[torch.optim.Optimizer], _Rule] = {
    torch.optim.AdamW: _Rule(optim.adamw, _adam, ("amsgrad", "maximize")),
    torch.optim.Adam: _Rule(optim.adam, _adam, ("amsgrad", "maximize", "decoupled_weight_decay")),
    torch.optim.SGD: _Rule(optim.sgd, _sgd, ("dampening", "maximize")),
    torch.optim.Adagrad: _Rule(optim.adagrad, _adagrad, ("initial_accumulator_value", "maximize")),
}


class ParamGroups:
    """The parameter groups of an optimizer of torch, which schedulers and callbacks change.

    Args:
        optimizer: of torch, or a wrapper with ``param_groups``; no step of the optimizer is used.
        params: the parameters by name. A parameter that requires a gradient and is in no group
            counts for the norm of the gradient, as in torch, and keeps its value.

    Attributes:
        optimizer: as given.
        labels: the index of the group of each parameter that requires a gradient, by name.
    """

    def __init__(self, optimizer: Any, params: Mapping[str, Tensor]) -> None:
        self.optimizer = optimizer
        self._cls = type(getattr(optimizer, "optimizer", optimizer))
        groups = {
            id(p): str(index)
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self.labels = {
            name: groups.get(id(p), _NO_GROUP) for name, p in params.items() if p.requires_grad
        }
        if not set(self.labels.values()) - {_NO_GROUP}:
            raise OptionError(
                "a Trainer trains at least one parameter; the optimizer has none that requires a "
                "gradient; set requires_grad, or pass an optimizer of the model's own parameters"
            )

    def pure(self) -> Optimizer:
        """Return the optimizer as a pure one, by label if there are several groups."""
        rules = {
            label: optim.inject_hyperparams(make)(*args, **options)
            for label, (make, args, options) in self._made().items()
        }
        if self._is_one_group():
            return next(iter(rules.values()))
        labels = self.labels
        return optim.by_label(
            {**rules, _NO_GROUP: optim.scale(0.0)}, lambda path, leaf: labels[path]
        )

    def set_in(self, state: Any) -> Any:
        """Return a state with the numbers that the groups have now."""
        is_one, known = self._is_one_group(), optim.hyperparams(state)
        values = {
            key: value
            for label, (_, _, options) in self._made().items()
            for name, value in options.items()
            if (key := name if is_one else f"{label}.{name}") in known
        }
        return optim.set_hyperparams(state, values)

    def _is_one_group(self) -> bool:
        return len(set(self.labels.values())) == 1

    def _made(self) -> dict[str, tuple[Callable[..., Optimizer], tuple[Any, ...], dict[str, Any]]]:
        """Return for each group with trained parameters the maker of the rule and the arguments."""
        used = set(self.labels.values())
        return {
            str(index): self._arguments(group)
            for index, group in enumerate(self.optimizer.param_groups)
            if str(index) in used
        }

    def _arguments(
        self, group: Mapping[str, Any]
    ) -> tuple[Callable[..., Optimizer], tuple[Any, ...], dict[str, Any]]:
        rule = _RULES.get(self._cls)
        if rule is not None and not any(group.get(name) for name in rule.zero):
            return rule.make, (), rule.options(group)
        known = inspect.signature(self._cls).parameters
        options = {
            name: float(value) if name == "lr" else value
            for name, value in group.items()
            if name in known and name not in _IMPLEMENTATION
        }
        return optim.from_torch, (self._cls,), options
