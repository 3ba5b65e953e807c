"""Optimizers by the names of DeepSpeed's kernels.

``initialize`` takes one as it takes an optimizer of torch. Alone, or under a strategy of Lightning,
an optimizer steps by the same rule of ``zfun.optim``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from zfun import tree
from zfun.errors import OptionError
from zfun.interop import _configured
from zfun.interop.deepspeed._absent import absent
from zfun.interop.ds_config import Key, Rule
from zfun.interop.ds_config._optimizers import rule_of
from zfun.interop.ds_config._values import Checked
from zfun.interop.ds_config.table import keys_of
from zfun.optim import Optimizer

# Options of DeepSpeed's classes that the table of configurations lacks for some kinds.
_MORE: Mapping[str, Any] = {
    "adamw_mode": True,
    "deepspeed": None,
    "set_grad_none": True,
    "fp32_optimizer_states": True,
}
# False in parameter groups of torch too, which a script may pass on.
_NEVER = dict.fromkeys(("amsgrad", "eps_inside_sqrt", "maximize"), False)


class Described(torch.optim.Optimizer):
    """Parameter groups with their options, which an engine of ``initialize`` steps; or itself.

    Attributes:
        kind: the type of the optimizer in a configuration.
        order: the arguments, as DeepSpeed orders them.
        own: defaults that are not those of a configuration.
        keys: the options of a configuration.
        is_attached: whether an engine steps.

    Raises:
        OptionError: an option has another value than the rule.
    """

    kind: ClassVar[str]
    order: ClassVar[str]
    own: ClassVar[Mapping[str, Any]] = {}
    keys: ClassVar[Mapping[str, Key]] = {}
    is_attached = False
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        start, found = "optimizer.params.", keys_of(cls.kind, None)
        cls.keys = {path[len(start) :]: x for path, x in found.items() if path.startswith(start)}
        params, *names = cls.order.split()
        configured = {name: key.default for name, key in cls.keys.items()}
        defaults = {**_MORE, **_NEVER, **configured, **cls.own}
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        options = [inspect.Parameter(name, either, default=defaults[name]) for name in names]
        cls.__signature__ = inspect.Signature([inspect.Parameter(params, either), *options])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        (_, params), *rest = bound.arguments.items()
        options = {name.replace("adamw_mode", "adam_w_mode"): value for name, value in rest}
        verdicts = {name: key.verdict for name, key in self.keys.items()}
        defaults = {name: x for name, x in options.items() if verdicts.get(name) == "mapped"}
        if "betas" in defaults:
            defaults["betas"] = tuple(defaults["betas"])
        super().__init__(params, defaults)
        only = _NEVER | {n: key.default for n, key in self.keys.items() if key.verdict == "refused"}
        for name, wanted in only.items():
            for group in (options, *self.param_groups):
                if (value := group.get(name, wanted)) != wanted:
                    remedy = self.keys[name].why if name in self.keys else "leave the option out"
                    raise OptionError(
                        f"{type(self).__name__} has {name}={wanted!r} only; got {value!r}; {remedy}"
                    )

    @property
    def rule(self) -> Rule:
        """The optimizer as data; the groups have their own numbers."""
        params = {"lr": float(self.param_groups[0]["lr"])}
        rule = rule_of(Checked({"optimizer": {"type": self.kind, "params": params}}), "optimizer")
        assert rule is not None
        return rule

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters with a gradient and return the loss; in an engine do nothing."""
        if self.is_attached:
            return None
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                rule = self._rule(group)
                for param in group["params"]:
                    if param.grad is not None:
                        self._step(rule, param)
        return loss

    def _rule(self, group: Mapping[str, Any]) -> Optimizer:
        """Return the rule of a group, as a configuration with these options has it."""
        if self.kind == "OneBitAdam":
            raise OptionError(
                f"{type(self).__name__} compresses the gradients of several ranks; got step() "
                "without an engine; pass the optimizer to deepspeed.initialize(), and call "
                "engine.step()"
            )
        make, options = _configured.rule_of(self, group)
        return make(**options)

    def _step(self, rule: Optimizer, param: torch.Tensor) -> None:
        # A state dict of torch holds tensors and numbers, so the state is the leaves of zfun's.
        spec = tree.structure(rule.init(param))
        state = self.state[param]
        leaves = state.get("leaves") or tree.leaves(rule.init(param))
        new, after = rule.apply(param.grad, tree.unflatten(spec, leaves), param)
        state["leaves"] = tree.leaves(after)
        param.copy_(new)


class FusedAdam(Described):
    """Adam, or AdamW with ``adam_w_mode``; see :func:`zfun.optim.adamw`.

    Raises:
        OptionError: ``bias_correction=False`` or ``amsgrad=True``.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> optimizer = FusedAdam(layer.parameters(), lr=0.25)
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> optimizer.step()
        >>> layer.weight.item()
        0.75
    """

    kind = "Adam"
    order = "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none"


class DeepSpeedCPUAdam(FusedAdam):
    """:class:`FusedAdam` with other arguments; ``offload_optimizer`` chooses the place."""

    order = (
        "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode "
        "fp32_optimizer_states"
    )


class OnebitAdam(Described):
    """1-bit Adam; see :func:`zfun.optim.onebit_adam`. It steps inside of an engine only."""

    kind = "OneBitAdam"
    order = (
        "params deepspeed lr freeze_step bias_correction betas eps eps_inside_sqrt weight_decay "
        "max_grad_norm amsgrad cuda_aware comm_backend_name"
    )


class FusedLamb(Described):
    """LAMB; see :func:`zfun.optim.lamb`.

    Raises:
        OptionError: an option that the rule does not have.
    """

    kind = "Lamb"
    order = (
        "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff "
        "min_coeff amsgrad"
    )


class FusedLion(Described):
    """Lion; see :func:`zfun.optim.lion`."""

    kind = "Lion"
    order = "params lr betas weight_decay set_grad_none"


class DeepSpeedCPULion(FusedLion):
    """:class:`FusedLion` with other arguments."""

    order = "model_params lr betas weight_decay fp32_optimizer_states"
    own: ClassVar = {"betas": (0.9, 0.999)}


class DeepSpeedCPUAdagrad(Described):
    """Adagrad; see :func:`zfun.optim.adagrad`."""

    kind = "Adagrad"
    order = "model_params lr eps weight_decay amsgrad fp32_optimizer_states"


__getattr__ = absent("ops", globals())
