"""Optimizers of torch as pure ones, with the numbers of the parameter groups in the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zfun import optim
from zfun.errors import OptionError
from zfun.interop._torch_rules import Rule, rule_of
from zfun.optim import Optimizer

__all__ = ["ParamGroups"]

_NO_GROUP = "no group"


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
            label: optim.inject_hyperparams(make)(**options)
            for label, (make, options) in self._made().items()
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
            for label, (_, options) in self._made().items()
            for name, value in options.items()
            if (key := name if is_one else f"{label}.{name}") in known
        }
        return optim.set_hyperparams(state, values)

    def _is_one_group(self) -> bool:
        return len(set(self.labels.values())) == 1

    def _made(self) -> dict[str, Rule]:
        """Return for each group with trained parameters the maker of the rule and the arguments."""
        used = set(self.labels.values())
        return {
            str(index): rule_of(self._cls, group)
            for index, group in enumerate(self.optimizer.param_groups)
            if str(index) in used
        }
