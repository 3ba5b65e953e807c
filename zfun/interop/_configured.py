"""Parameter groups of torch optimizers, and of configurations, as rules of ``zf.optim``."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zfun import optim
from zfun.collectives import Group
from zfun.errors import NotElementwiseError, OptionError
from zfun.interop import ds_config
from zfun.interop.ds_config._optimizers import own_rates
from zfun.interop.ds_config._recipe import options_of
from zfun.interop.ds_config.table import params_of
from zfun.interop.ds_config.table._optim import TORCH_OPTIMIZERS

Rule: TypeAlias = tuple[Callable[..., optim.Optimizer], dict[str, Any]]
"""A function that makes an optimizer, and the options."""

# By class of torch: our function, torch's names of the options, and options that we do not have.
_NATIVE: dict[type, tuple[str, str, str]] = {
    torch.optim.Adam: ("adam", "lr b1 b2 eps weight_decay", "amsgrad maximize"),
    torch.optim.AdamW: ("adamw", "lr b1 b2 eps weight_decay", "amsgrad maximize"),
    torch.optim.SGD: ("sgd", "lr momentum nesterov weight_decay", "dampening maximize"),
    torch.optim.Adagrad: (
        "adagrad",
        "lr lr_decay eps weight_decay",
        "initial_accumulator_value maximize",
    ),
}
_OWN_NAMES = {"lr": "learning_rate", "lr_decay": "rate_decay"}
# Options that choose an implementation of torch, and not a result.
_IMPLEMENTATIONS = frozenset(["foreach", "fused", "capturable", "differentiable"])
_PLAIN = (bool, int, float, str, tuple, list)
# The rate with which an optimizer is looked at.
_RATE = 0.01
_BOOKKEEPING = {"params", "param_groups", "defaults", "state", *optim.of_torch.FLAGS}
_FUNCTIONS = types.FunctionType, types.MethodType
# The packages whose optimizers wrap the one of the script.
_HOSTS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


class ConfiguredOptimizer(torch.optim.Optimizer):
    """The optimizer of a configuration: parameter groups, which an engine steps."""

    def __init__(self, params: Iterable[Any], rule: ds_config.Rule) -> None:
        self.rule = rule
        # As in DeepSpeed, the groups of a type of torch are those of the class.
        is_torchs = rule.kind in TORCH_OPTIMIZERS
        self.torch_class = getattr(torch.optim, rule.kind) if is_torchs else type(self)
        super().__init__(params, _numbers_of(rule))

    def step(self, closure: Any = None) -> Any:
        """Refuse a step without an engine."""
        raise OptionError(
            "an engine steps the optimizer of a configuration; got step() without one; train "
            "through zfun.interop"
        )


def zero_options(recipe: ds_config.Recipe, group: Group) -> dict[str, Any]:
    """Return the options of ``zf.zero`` that a configuration makes for an engine.

    Raises:
        OptionError: the configuration has ranks that share matrices or sequences.
    """
    for key, size in {
        "tensor_parallel.autotp_size": recipe.tensor,
        "sequence_parallel_size": recipe.sequence,
    }.items():
        if size > 1:
            raise OptionError(
                "an engine of a module has data parallel ranks, because the loss and the data are "
                f"the script's; got {key} {size}; leave it out, as stage 3 shards every matrix, or "
                "train a loss of zf.tensor_parallel() or zf.parallel.token_mean() with "
                "recipe.zero() of zf.interop.from_ds_config()"
            )
    return options_of(recipe, group)


def rule_of(optimizer: Any, group: Mapping[str, Any]) -> Rule:
    """Return the rule of a group of an optimizer of torch, or of a configuration."""
    if "max_momentum" in group and group.get("betas", (0,))[0] >= 1:
        raise OptionError(
            f"the first of betas stays below 1; got {float(group['betas'][0])}, the momentum to "
            "which OneCycle has grown; write a smaller scheduler.params.decay_mom_rate, a larger "
            "decay_step_size, or cycle_momentum false"
        )
    configured = getattr(optimizer, "rule", None)
    if isinstance(configured, ds_config.Rule) and configured.kind not in TORCH_OPTIMIZERS:
        return _configured_rule(configured, group)
    return _torch_rule(optimizer, class_of(optimizer), group)


def class_of(optimizer: Any) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer, which an adapter may have put a subclass before."""
    return getattr(optimizer, "torch_class", type(optimizer))


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer in a wrapper of a host library, or refuse one in another wrapper."""
    while type(optimizer).__module__.partition(".")[0] in _HOSTS:
        optimizer = optimizer.optimizer
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            raise OptionError(
                f"an engine steps one optimizer by its class; got {type(optimizer).__name__}, "
                f"which wraps the {type(value).__name__} of its attribute {name!r}; pass that one, "
                "and do between the steps what the wrapper does"
            )
    return optimizer


def check_made_anew(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Refuse an optimizer that the options of a group do not make again."""
    cls, (make, options) = class_of(optimizer), rule_of(optimizer, group)
    if getattr(make, "func", None) is not optim.from_torch:
        return
    _check_reads(optimizer)
    optim.from_torch(cls, **options)  # refuses a class or options with which no step runs
    if "lr" in options:
        options["lr"] = _RATE  # at a rate of 0 nothing is seen
    made: Any = cls([torch.nn.Parameter(torch.zeros(1))], **options)
    own, new = {**vars(optimizer), **options}, {**vars(made), **made.param_groups[0]}
    if any(
        isinstance(new[name], _PLAIN) and not _is_same(new[name], own[name])
        for name in new.keys() & own.keys() - _BOOKKEEPING
    ):
        optimizer.torch_class = cls = _restored(cls, vars(optimizer))
    others = {name: x for name, x in group.items() if name not in {"params", *options}}
    if read := optim.of_torch.keys_that_steps_read(cls, options, others):
        raise OptionError(
            "an engine makes the optimizer anew in each step, from the options of its group; got a "
            f"group with {read[0]!r}, which a step of {cls.__name__} reads, and the constructor "
            "does not take; make it an option of the constructor"
        )


def _check_reads(optimizer: Any) -> None:
    """Refuse an optimizer whose code has parameters by another way than its groups."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found = [
        f"its attribute {name!r}"
        for name, x in vars(optimizer).items()
        if name not in _BOOKKEEPING and not isinstance(x, _FUNCTIONS)
        # Hooks may have parameters, and so has the engine.
        if not name.startswith(("_optimizer_", "_zfun_", "zfun_")) and _has(x, own)
    ]
    for cls in class_of(optimizer).__mro__:
        functions = (pair for pair in vars(cls).items() if isinstance(pair[1], _FUNCTIONS))
        found += [f"a closure of {name}()" for name, x in functions if _has(x, own, 8)]
    if found:
        raise OptionError(
            "an engine steps shards, so an optimizer takes parameters from its groups alone; got "
            f"{class_of(optimizer).__name__} with parameters in {found[0]}; loop over "
            "self.param_groups, or do it in a hook of optimizer.register_step_pre_hook()"
        )


def _has(value: Any, ids: set[int], depth: int = 4) -> bool:
    """Whether a value is, or has, one of some parameters."""
    if id(value) in ids or isinstance(value, torch.nn.Module):
        return id(value) in ids or any(id(x) in ids for x in value.parameters())
    if depth == 0 or isinstance(value, (Tensor, type, *_PLAIN[:4])):
        return False
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set)):
        parts = value
    elif isinstance(value, _FUNCTIONS):
        # A decorator keeps the function in a closure too.
        cells = getattr(value, "__closure__", None) or ()
        parts = [x.cell_contents for x in cells if x != types.CellType()]  # that is empty
    else:
        parts = vars(value).values() if hasattr(value, "__dict__") else ()
    return any(_has(x, ids, depth - 1) for x in parts)


def _restored(
    cls: type[torch.optim.Optimizer], attributes: Mapping[str, Any]
) -> type[torch.optim.Optimizer]:
    """Return a class whose optimizers have plain attributes as they are, and options as given.

    A constructor may keep the first rate, or change an option by another one.
    """
    kept = {
        name: x
        for name, x in attributes.items()
        if isinstance(x, _PLAIN) and name not in _BOOKKEEPING
    }

    @functools.wraps(cls.__init__)
    def init(self: Any, params: Any, **options: Any) -> None:
        cls.__init__(self, params, **options)
        vars(self).update(kept)
        for group in self.param_groups:
            group.update({name: x for name, x in options.items() if name in group})

    return type(cls.__name__, (cls,), {"__init__": init})


def flags_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group that choose the rule, such as ``maximize``."""
    others = {name for _, _, names in _NATIVE.values() for name in names.split()}
    return {
        name: group.get(name, value)
        for name, value in optimizer.defaults.items()
        if (isinstance(value, bool) or name in others) and name not in _IMPLEMENTATIONS
    }


def _torch_rule(optimizer: Any, cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> Rule:
    group = {name: _number(value) for name, value in group.items()}
    native, names, others = _NATIVE.get(cls, ("", "", ""))
    if native and not any(group.get(name) for name in others.split()):
        if "betas" in group:
            group["b1"], group["b2"] = map(_number, group["betas"])
            is_decoupled = group.get("decoupled_weight_decay", native == "adamw")
            native = "adamw" if is_decoupled else "adam"
        return getattr(optim, native), {_OWN_NAMES.get(x, x): group[x] for x in names.split()}
    if cls is torch.optim.LBFGS:
        raise NotElementwiseError(
            "sharded optimizers work element by element; torch.optim.LBFGS searches along a line, "
            "and calls the loss again; use another optimizer"
        )
    if cls is torch.optim.Muon:
        names = [*inspect.signature(optim.of_torch.torch_muon).parameters]
        return optim.of_torch.torch_muon, {name: group[name] for name in names}
    known = set(inspect.signature(cls).parameters) - {"params"} - _IMPLEMENTATIONS
    # Some classes keep options as attributes.
    kept = {name: x for name, x in vars(optimizer).items() if isinstance(x, _PLAIN)}
    options = {name: value for name, value in {**kept, **group}.items() if name in known}
    return functools.partial(optim.from_torch, cls), options


def _is_same(value: Any, other: Any) -> bool:
    """Whether two plain values are equal; a list may be a tuple."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(map(_number, value)) == list(map(_number, other))
    return value == other or value != value  # NaN


def _number(value: Any) -> Any:
    is_array = isinstance(value, (Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1
    return value.item() if is_array else value


def _configured_rule(rule: ds_config.Rule, group: Mapping[str, Any]) -> Rule:
    """Return the rule of a configuration, with the numbers that a group has now."""
    if rule.kind == "Muon":
        return _muon_rule(rule, group)
    options = {name: group.get(name, value) for name, value in rule.options.items()}
    # A key that the type does not take is refused with its remedy.
    options |= {name: x for name, x in group.items() if name in params_of(rule.kind)}
    items = ((name, tuple(x) if isinstance(x, list) else x) for name, x in options.items())
    made = _made(rule.kind, tuple(items))
    return getattr(optim, made.name), dict(made.options)


def _numbers_of(rule: ds_config.Rule) -> dict[str, Any]:
    """Return the numbers of a group; the rates of Muon's parts are those where lr is base_lr."""
    options = dict(rule.options)
    if rule.kind in TORCH_OPTIMIZERS:
        made = getattr(torch.optim, rule.kind)([torch.nn.Parameter(torch.zeros(1))], **options)
        return {name: tuple(x) if isinstance(x, list) else x for name, x in made.defaults.items()}
    if rule.kind == "Muon":
        options |= {**own_rates(options), "base_lr": options["lr"]}
    return options


def _muon_rule(rule: ds_config.Rule, group: Mapping[str, Any]) -> Rule:
    # Groups of earlier files have None for a rate that is lr, and no base.
    own = {
        name: value if group.get(name) is None else group[name]
        for name, value in _numbers_of(rule).items()
    }
    own["b1"], own["b2"] = own.pop("betas")
    return _muon, {name: _number(value) for name, value in own.items()}


def _muon(**options: Any) -> optim.Optimizer:
    """Make Muon beside Adam, whose own rates follow ``lr`` from its base."""
    lr, base, betas = options["lr"], options.pop("base_lr"), (options.pop("b1"), options.pop("b2"))
    for name in ("muon_lr", "adam_lr"):
        own = options[name]
        if lr != base and (base or own == base):
            options[name] = lr if own == base else own / base * lr
    return ds_config.rule_for(ds_config.Rule("Muon", {**options, "betas": betas}))


@functools.lru_cache(maxsize=256)
def _made(kind: str, options: tuple[tuple[str, Any], ...]) -> optim.Optimizer:
    """Make an optimizer once for these options, because each option is checked."""
    return ds_config.rule_for(ds_config.Rule(kind, dict(options)))
