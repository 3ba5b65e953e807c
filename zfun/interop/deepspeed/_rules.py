"""Optimizers with parameter groups as pure optimizers.

A script, or a torch scheduler, writes ``lr`` into a parameter group between steps. The rule of a
group reads the learning rate from the group at each step, so the group stays the one place of the
number, as in torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zfun import optim
from zfun.errors import OptionError
from zfun.interop.deepspeed.ops._described import Described
from zfun.interop.ds_config._auto import AutoValues
from zfun.interop.ds_config._mistakes import error_of
from zfun.interop.ds_config._optimizers import optimizer_of
from zfun.interop.ds_config._values import Values, values_of
from zfun.interop.ds_config._walk import Walked, walk
from zfun.interop.ds_config.table._optim import TORCH_OPTIMIZERS
from zfun.optim import Optimizer

__all__ = ["Configured", "Live", "configured", "names_of", "rule_of"]

_O = "optimizer.params"
# With this key, a weight decay that is left out has torch's default.
_TORCH_ADAM = f"{_O}.torch_adam"
# Options of torch's classes that choose an implementation, and not a rule.
_HOW = frozenset(["foreach", "fused", "capturable", "differentiable"])


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Live:
    """A number of a parameter group, read at each step.

    Attributes:
        group: the parameter group.
        name: the name of the number.
        place: the place in a pair; ``None`` for a number alone.
    """

    group: Mapping[str, Any]
    name: str
    place: int | None = None

    def __call__(self, step: int) -> float:
        """Return the number now, whatever the step."""
        value = self.group[self.name]
        return float(value if self.place is None else value[self.place])

    def __repr__(self) -> str:
        return f"{self.name!r} of a parameter group"


class Configured(Described):
    """The optimizer of a configuration.

    Args:
        params: parameters, or groups of parameters.
        kind: the type, in the table's spelling.
        defaults: the values of ``optimizer.params``.
    """

    def __init__(self, params: Iterable[Any], kind: str, defaults: dict[str, Any]) -> None:
        self.of_kind = kind
        super().__init__(params, defaults)


def configured(walked: Walked, values: Values, params: Iterable[Any]) -> Configured | None:
    """Return the optimizer of a configuration; ``None`` if the configuration has none.

    Args:
        walked: the configuration.
        values: the values of all keys.
        params: parameters, or groups of parameters, whose options win.
    """
    kind = walked.kind("optimizer")
    if kind is None:
        return None
    own = {
        path.removeprefix(f"{_O}."): values[path]
        for path in walked.given
        if path.startswith(f"{_O}.") and path in walked.keys
    }
    for option in ("betas", "eps", "weight_decay", "momentum"):
        path = f"{_O}.{option}"
        if path in walked.keys and not (_TORCH_ADAM in walked.keys and values[_TORCH_ADAM]):
            own.setdefault(option, values[path])
    return Configured(params, kind, {**walked.extra, **own, "lr": float(values[f"{_O}.lr"])})


def names_of(module: nn.Module) -> dict[int, str]:
    """Return the names of parameters by identity; of tied parameters the first name."""
    return {id(param): name for name, param in module.named_parameters()}


def rule_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Optimizer:
    """Return the pure optimizer of all parameter groups.

    Args:
        optimizer: of torch, of ``ops``, or of a configuration.
        names: of the parameters by identity.

    Raises:
        OptionError: a parameter is not in the module.
        NotElementwiseError: the class needs whole tensors.
    """
    groups = optimizer.param_groups
    rules = {str(index): _rule_of_group(optimizer, group) for index, group in enumerate(groups)}
    labels: dict[str, str] = {}
    for index, group in enumerate(groups):
        for param in group["params"]:
            name = names.get(id(param))
            if name is None:
                raise OptionError(
                    "an optimizer for initialize() has parameters of the model; got one of shape "
                    f"{tuple(param.shape)} in group {index} that the model does not have; make "
                    "the optimizer of model.parameters()"
                )
            labels[name] = str(index)
    if len(rules) == 1:
        return rules["0"]
    # A leaf without a group is frozen, and has no step.
    return optim.by_label(rules, lambda path, leaf: labels.get(path, "0"))


def _rule_of_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Optimizer:
    rate = Live(group, "lr")
    kind, options = _kind_of(optimizer, group)
    decays = _cycled(group)
    if kind is None:
        if decays:
            raise OptionError(
                f"{type(optimizer).__name__} has constant decays; got a scheduler that cycles the "
                "momentum; pass cycle_momentum=False to the scheduler"
            )
        return optim.from_torch(type(optimizer), lr=rate, **options)
    params = {**options, "lr": float(group["lr"])}
    walked = walk({"optimizer": {"type": kind, "params": params}})
    values, mistakes = values_of(walked, AutoValues())
    found = [*walked.mistakes, *mistakes]
    if found:
        raise error_of(found, f"a parameter group of {type(optimizer).__name__}")
    return optimizer_of(kind, values, walked.given, walked.extra, rate, decays)


def _cycled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decays of a group that a scheduler changes."""
    # Schedulers that cycle the momentum leave this mark in a group.
    if "max_momentum" not in group:
        return {}
    if "betas" in group:
        return {"b1": Live(group, "betas", 0), "b2": float(group["betas"][1])}
    return {"momentum": Live(group, "momentum")} if group.get("momentum") else {}


def _kind_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Return the type in a configuration, or ``None``, and the options of a group."""
    if isinstance(optimizer, Described):
        kind = optimizer.of_kind if isinstance(optimizer, Configured) else optimizer.kind
        known = {path.removeprefix(f"{_O}.") for path in walk({"optimizer": {"type": kind}}).keys}
        if kind in TORCH_OPTIMIZERS:
            # Schedulers of torch add numbers of their own to a group.
            known |= {
                *optimizer.defaults,
                *inspect.signature(getattr(torch.optim, kind)).parameters,
            }
        return kind, {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name in known and name != "params"
        }
    make = type(optimizer)
    if not group.get("amsgrad") and not group.get("maximize"):
        if make in (torch.optim.Adam, torch.optim.AdamW):
            is_decoupled = group.get("decoupled_weight_decay", make is torch.optim.AdamW)
            return "Adam", {
                "betas": list(group["betas"]),
                "eps": group["eps"],
                "weight_decay": group["weight_decay"],
                "adam_w_mode": bool(is_decoupled),
            }
        if make is torch.optim.SGD and not group["dampening"]:
            names = ("momentum", "nesterov", "weight_decay")
            return "SGD", {name: group[name] for name in names}
    known = set(inspect.signature(make).parameters) - {"params", "lr"} - _HOW
    return None, {name: value for name, value in group.items() if name in known}
