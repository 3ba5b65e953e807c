"""The arguments of Lightning's DeepSpeedStrategy as a configuration of DeepSpeed."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from zfun.errors import OptionError
from zfun.interop.ds_config import KEYS, AutoValues, Recipe, from_ds_config
from zfun.interop.ds_config._read import read
from zfun.recipes import Precision

# The second name is the one that scripts for DeepSpeed set.
_CONFIG_VARIABLES = ("ZFUN_CONFIG_PATH", "PL_DEEPSPEED_CONFIG_PATH")
_REDUCE = "communication_data_type"
_OWN = ("parallel_devices", "cluster_environment", "process_group_backend", "timeout")
# The arguments of the strategy beside those of Lightning itself, and their defaults.
_DEFAULTS: dict[str, Any] = {
    # Lightning 2.5.0 does not have this one yet.
    "exclude_frozen_parameters": False,
    **{
        name: parameter.default
        for name, parameter in inspect.signature(DeepSpeedStrategy).parameters.items()
        if name not in inspect.signature(DDPStrategy).parameters and name != "config"
    },
}
# Lightning's function from arguments to a configuration, and its parameters.
_configured: Any = DeepSpeedStrategy._create_default_config
_OF_CONFIG = list(inspect.signature(_configured).parameters)[1:-1]
_PATHS = frozenset(key.path for key in KEYS)
_DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
}


def divided(given: Mapping[str, Any], *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments that Lightning's own strategy takes, and the values of all others."""
    own = {name: value for name, value in given.items() if name in (*_OWN, *more)}
    given = {name: value for name, value in given.items() if name not in own}
    for name in given:
        if name not in _DEFAULTS:
            near = difflib.get_close_matches(name, _DEFAULTS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise OptionError(
                "ZfunStrategy takes the arguments of Lightning's DeepSpeedStrategy; got "
                f"{name!r}; {remedy}"
            )
    values = {**_DEFAULTS, **given}
    if values["remote_device"] not in (None, "cpu", "nvme", "meta"):
        raise OptionError(
            "remote_device is None, 'cpu', 'nvme' or 'meta'; got "
            f"{values['remote_device']!r}; pass 'meta' to make parameters one module at a time"
        )
    return own, values


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of DeepSpeed that the arguments describe."""
    own = {name: values[name] for name in _OF_CONFIG}
    config = _configured(None, **own, **_section(values, "zero_optimization"))
    # The account of the options has no lines of sections that are off.
    if not any(config["activation_checkpointing"].values()):
        del config["activation_checkpointing"]
    if "nvme" not in (values["offload_optimizer_device"], values["offload_params_device"]):
        del config["aio"]
    return {"gradient_clipping": 0.0, **config}


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments that are keys of a section too."""
    return {key: value for key, value in values.items() if f"{name}.{key}" in _PATHS}


def given_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """Return the configuration of the caller, or of the environment, as a dict."""
    if config is None:
        config = next((path for name in _CONFIG_VARIABLES if (path := os.environ.get(name))), None)
    return None if config is None else dict(read(config)[0])


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype in which a ``precision`` of Lightning computes."""
    if precision not in _DTYPES:
        raise OptionError(
            f"ZfunStrategy computes with precision {', '.join(map(repr, _DTYPES))}; got "
            f"{precision!r}; pass one of these to Trainer(precision=...)"
        )
    return _DTYPES[precision]


def recipe_of(
    config: Mapping[str, Any] | None,
    values: Mapping[str, Any],
    *,
    precision: str,
    world_size: int,
    accumulate: int,
    clip_norm: float | None,
) -> Recipe:
    """Return the options of ``zf.zero`` for a configuration and what the trainer knows."""
    dtype, is_own = dtype_of(precision), config is not None
    config = config_of(values) if config is None else config
    if config.get("gradient_accumulation_steps", "auto") not in ("auto", accumulate):
        raise OptionError(
            "Lightning accumulates gradients; got gradient_accumulation_steps="
            f"{config['gradient_accumulation_steps']!r} in the configuration; write "
            "Trainer(accumulate_grad_batches=...), or accumulate in the loop of Fabric"
        )
    # Batch sizes only describe the data of Lightning.
    batch = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    whole = {name: value for name, value in config.items() if name not in batch}
    if clip_norm is not None or whole.get("gradient_clipping", "auto") == "auto":
        whole["gradient_clipping"] = clip_norm or 0.0
    if dtype is not torch.float32 and not is_own:
        # As in Lightning without a strategy, micro-batches are summed in float32.
        whole[_REDUCE] = "fp32"
    if dtype is torch.bfloat16:
        whole.setdefault("bf16", {"enabled": True})
    if dtype is torch.float16 and config.get("fp16") is None:
        whole["fp16"] = {"enabled": True, **_section(values, "fp16")}
    recipe = from_ds_config(whole, auto=AutoValues(world_size=world_size, dtype=dtype))
    if recipe.autocast is not None:
        raise OptionError(
            "Lightning's Trainer chooses the dtypes; got torch_autocast in the configuration; pass "
            "precision='bf16-mixed' to the Trainer, and leave the section out"
        )
    if precision.endswith("-mixed"):
        return _under_autocast(recipe, reduces=_REDUCE in config)
    return recipe


def _under_autocast(recipe: Recipe, *, reduces: bool) -> Recipe:
    """Keep parameters in float32, as plain Lightning does in a mixed precision.

    ``reduces`` says whether the configuration has a dtype of its own for sums over the ranks.
    """
    why = "a mixed precision of Lightning keeps parameters in float32"
    entries = tuple(
        entry._replace(becomes="torch.autocast around the steps", why=why)
        if entry.path in ("bf16.enabled", "fp16.enabled") and entry.verdict == "mapped"
        else entry
        for entry in recipe.entries
    )
    own = recipe.precision
    reduce = own.reduce if reduces else None
    precision = Precision(reduce=reduce, loss_scale=own.loss_scale)
    return replace(recipe, precision=precision, entries=entries)
