"""Optimizers that say how to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from zfun import tree
from zfun.errors import OptionError
from zfun.interop.ds_config._optimizers import Rule, rule_for, rule_of
from zfun.interop.ds_config._values import checked
from zfun.optim import Optimizer

_REMEDIES = {"max_grad_norm": "write gradient_clipping into the configuration"}
# Options of torch's optimizers, whose groups a script may pass on.
_NEVER = {"amsgrad": False, "maximize": False}


class Described(torch.optim.Optimizer):
    """Parameter groups with their options, which an engine of ``initialize`` steps; or itself.

    Args:
        params: parameters, or groups of parameters.
        defaults: of the options.
        only: by option, the value and the one value that the rule has.

    Attributes:
        kind: the type of the optimizer in a configuration.
        is_attached: whether an engine steps.

    Raises:
        OptionError: an option has another value than the rule.
    """

    kind: ClassVar[str]
    is_attached = False

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        only: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        super().__init__(params, defaults)
        found = [(name, value, wanted) for name, (value, wanted) in (only or {}).items()]
        for group in self.param_groups:
            found += [(name, group.get(name, no), no) for name, no in _NEVER.items()]
        for name, value, wanted in found:
            if value != wanted:
                raise OptionError(
                    f"{type(self).__name__} has {name}={wanted!r} only; got {value!r}; "
                    f"{_REMEDIES.get(name, 'leave the option out')}"
                )

    @property
    def rule(self) -> Rule:
        """The optimizer as data; the groups have their own numbers."""
        params = {"lr": float(self.param_groups[0]["lr"])}
        found = rule_of(checked({"optimizer": {"type": self.kind, "params": params}}), "optimizer")
        assert found is not None
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each parameter that has a gradient; inside of an engine do nothing.

        Args:
            closure: computes the loss and the gradients.

        Returns:
            The loss of the closure.
        """
        if self.is_attached:
            return None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                rule = _rule(self, group)
                for param in group["params"]:
                    if param.grad is not None:
                        self._step(rule, param)
        return loss

    def _step(self, rule: Optimizer, param: torch.Tensor) -> None:
        # A state dict of torch holds tensors and numbers, so the state is the leaves of zfun's.
        spec = tree.structure(rule.init(param))
        kept = self.state[param]
        leaves = kept.get("leaves") or tree.leaves(rule.init(param))
        new, after = rule.apply(param.grad, tree.unflatten(spec, leaves), param)
        kept["leaves"] = tree.leaves(after)
        param.copy_(new)


def _rule(optimizer: Described, group: Mapping[str, Any]) -> Optimizer:
    """Return the rule of a parameter group, as a configuration with these options has it."""
    kind, options = optimizer.rule
    if kind == "OneBitAdam":
        raise OptionError(
            f"{type(optimizer).__name__} compresses the gradients of several ranks; got step() "
            "without an engine; pass the optimizer to deepspeed.initialize(), and call "
            "engine.step()"
        )
    own = {name: group.get(name, value) for name, value in options.items()}
    lists = {name: list(x) if isinstance(x, tuple) else x for name, x in own.items()}
    return rule_for(Rule(kind, lists))
