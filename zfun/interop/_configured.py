"""Optimizers of configurations, with parameter groups as torch's have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zfun import optim
from zfun.errors import OptionError
from zfun.interop.ds_config import Rule, rule_for
from zfun.optim import Optimizer


class ConfiguredOptimizer(torch.optim.Optimizer):
    """The optimizer of a configuration: parameter groups, which an engine steps.

    Args:
        params: parameters, or groups of parameters.
        rule: of the configuration.

    Attributes:
        rule: as given.
    """

    def __init__(self, params: Iterable[Any], rule: Rule) -> None:
        self.rule = rule
        super().__init__(params, dict(rule.options))

    def step(self, closure: Any = None) -> Any:
        """Refuse a step without an engine."""
        raise OptionError(
            "an engine steps the optimizer of a configuration; got step() without one; train "
            "through zfun.interop"
        )


def rule_of_group(
    rule: Rule, group: Mapping[str, Any]
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """Return the function of zfun that steps a group, and the options as the group has them now.

    Args:
        rule: the type, and the options that a group does not have.
        group: a parameter group, which may have other numbers.
    """
    options = {name: group.get(name, value) for name, value in rule.options.items()}
    found = _made(rule.kind, tuple((name, _hashable(x)) for name, x in options.items()))
    if found.name and not found.parts and hasattr(optim, found.name):
        return getattr(optim, found.name), dict(found.options)
    # An optimizer of several parts, such as Muon beside Adam, whose learning rate alone changes.
    fixed = Rule(rule.kind, options)
    return functools.partial(_with_rate, fixed), {"lr": float(options["lr"])}


@functools.lru_cache(maxsize=256)
def _made(kind: str, options: tuple[tuple[str, Any], ...]) -> Optimizer:
    """Make an optimizer once for these options, because each option is checked."""
    return rule_for(Rule(kind, dict(options)))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _with_rate(rule: Rule, lr: float) -> Optimizer:
    return rule_for(rule, lr=lr)
