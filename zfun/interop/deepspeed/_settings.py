"""The arguments of ``initialize``: the configuration, the optimizer and the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zfun import optim
from zfun.errors import OptionError
from zfun.interop._configured import ConfiguredOptimizer
from zfun.interop.deepspeed._scales import Scaling
from zfun.interop.deepspeed.ops import Described
from zfun.interop.deepspeed.runtime.lr_schedules import scheduler_of
from zfun.interop.ds_config import AutoValues, Recipe, from_ds_config
from zfun.interop.ds_config._read import read
from zfun.interop.ds_config._values import Checked, Values
from zfun.interop.engine import ParamGroups, named_leaves

_Config = Mapping[str, Any] | str | Path


@dataclass(frozen=True, slots=True)
class Settings:
    """The parts that an engine is made of.

    Attributes:
        recipe: the options of ``zf.zero``.
        values: the value of each key.
        given: the values as written, by path.
        optimizer: with the parameter groups; ``None`` for a model that is not trained.
        groups: the groups as a pure optimizer; ``None`` without an optimizer.
        scheduler: steps with the engine; ``None`` if there is none.
        config: as written.
        scaling: the rule of the loss scale of fp16; ``None`` without one.
    """

    recipe: Recipe
    values: Values
    given: Mapping[str, Any]
    optimizer: torch.optim.Optimizer | None
    groups: ParamGroups | None
    scheduler: Any
    config: Mapping[str, Any]
    scaling: Scaling | None = None


class Configured(ConfiguredOptimizer):
    """The optimizer of a configuration, which the engine steps."""

    def step(self, closure: Any = None) -> None:
        """Do nothing, because ``engine.step()`` steps."""


def config_of(args: Any, config: _Config | None, config_params: _Config | None) -> _Config:
    """Return the one configuration of the arguments or of the command line."""
    found = config if config is not None else config_params
    of_args = getattr(args, "deepspeed_config", None)
    if found is not None and of_args is not None:
        raise OptionError(
            "initialize() takes one configuration; got config= and args.deepspeed_config; leave "
            "one of the two out"
        )
    found = of_args if found is None else found
    if found is None:
        raise OptionError(
            "initialize() takes a configuration; got none; pass config='ds_config.json', a dict, "
            "or args with deepspeed_config"
        )
    return found


def settings_of(
    module: nn.Module,
    config: _Config,
    world_size: int,
    *,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    lr_scheduler: Any,
    auto: AutoValues,
) -> Settings:
    """Read a configuration for a module, and the arguments of ``initialize`` beside it.

    Raises:
        ConfigError: the configuration has mistakes; the message lists all of them.
        OptionError: a scheduler without an optimizer, or an optimizer of other parameters.
    """
    keys, name = read(config)
    trained: Any = (p for p in module.parameters() if p.requires_grad)
    params: list[Any] = list(trained if model_parameters is None else model_parameters)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(params)
    known = _known(module, world_size, optimizer, auto)
    # All mistakes are reported before anything is made. An optimizer of the script wins.
    recipe = from_ds_config(config, auto=known, optimizer=None if optimizer is None else optim.sgd)
    found = Checked(keys, known, has_optimizer=optimizer is not None)
    made = optimizer
    if made is None and recipe.rule is not None:
        made = Configured(params, recipe.rule)
    if made is None:
        if lr_scheduler is not None or recipe.scheduler is not None:
            raise OptionError(
                f"a scheduler changes an optimizer; got none, and {name} has no section "
                "optimizer; pass optimizer=, such as torch.optim.AdamW(model.parameters(), "
                "lr=3e-4), or leave the scheduler out for a model that is not trained"
            )
        return Settings(recipe, found.values, found.given, None, None, None, keys)
    scheduler = _scheduler(recipe, made, lr_scheduler)
    groups = ParamGroups(made, named_leaves(module))
    if isinstance(made, Described):
        made.is_attached = True
    scaling = Scaling(found.values) if found.values["fp16.enabled"] else None
    return Settings(recipe, found.values, found.given, made, groups, scheduler, keys, scaling)


def _known(module: nn.Module, world_size: int, optimizer: Any, auto: AutoValues) -> AutoValues:
    """Fill the values that need no telling."""
    found: dict[str, Any] = {"world_size": world_size}
    shape = getattr(module, "config", None)
    hidden = getattr(shape, "hidden_size", None)
    if isinstance(hidden, int):
        found["hidden_size"] = hidden
    if optimizer is not None and auto.learning_rate is None:
        found["learning_rate"] = float(optimizer.param_groups[0]["lr"])
    given = {field.name: getattr(auto, field.name) for field in fields(auto)}
    return AutoValues(**{**found, **{k: v for k, v in given.items() if v is not None}})


def _scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, given: Any) -> Any:
    if given is not None:
        is_maker = callable(given) and not hasattr(given, "step")
        return given(optimizer) if is_maker else given
    return None if recipe.scheduler is None else scheduler_of(recipe.scheduler, optimizer)
