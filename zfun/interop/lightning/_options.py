"""The arguments of Lightning's DeepSpeedStrategy as a configuration of DeepSpeed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zfun.errors import OptionError
from zfun.interop.ds_config import AutoValues, Recipe, from_ds_config
from zfun.interop.ds_config._read import read

# The second name is the one that scripts for DeepSpeed set.
CONFIG_VARIABLES = ("ZFUN_CONFIG_PATH", "PL_DEEPSPEED_CONFIG_PATH")

DEFAULTS: Mapping[str, Any] = {
    "zero_optimization": True,
    "stage": 2,
    "remote_device": None,
    "offload_optimizer": False,
    "offload_parameters": False,
    "offload_params_device": "cpu",
    "nvme_path": "/local_nvme",
    "params_buffer_count": 5,
    "params_buffer_size": 100_000_000,
    "max_in_cpu": 1_000_000_000,
    "offload_optimizer_device": "cpu",
    "optimizer_buffer_count": 4,
    "block_size": 1048576,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "thread_count": 1,
    "pin_memory": False,
    "sub_group_size": 1_000_000_000_000,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "zero_allow_untested_optimizer": True,
    "logging_batch_size_per_gpu": "auto",
    "logging_level": 30,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "synchronize_checkpoint_boundary": False,
    "load_full_weights": False,
    "exclude_frozen_parameters": False,
}
"""The arguments of the strategy beside those of Lightning itself, and their defaults."""

_ZERO = (
    "sub_group_size",
    "contiguous_gradients",
    "overlap_comm",
    "allgather_partitions",
    "reduce_scatter",
    "allgather_bucket_size",
    "reduce_bucket_size",
)
_ACTIVATIONS = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "synchronize_checkpoint_boundary",
)
_AIO = ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count")
_DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
}
_REMOTE = (None, "cpu", "nvme", "meta")


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all arguments.

    Raises:
        OptionError: an argument that the strategy does not have, or that does not go with another.
    """
    for name in given:
        if name not in DEFAULTS:
            near = difflib.get_close_matches(name, DEFAULTS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise OptionError(
                "ZfunStrategy takes the arguments of Lightning's DeepSpeedStrategy; got "
                f"{name!r}; {remedy}"
            )
    values = {**DEFAULTS, **given}
    if values["remote_device"] not in _REMOTE:
        raise OptionError(
            "remote_device is None, 'cpu', 'nvme' or 'meta'; got "
            f"{values['remote_device']!r}; pass 'meta' to make parameters one module at a time"
        )
    return values


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of DeepSpeed that the arguments describe."""
    config: dict[str, Any] = {
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": values["zero_allow_untested_optimizer"],
    }
    if any(values[name] for name in _ACTIVATIONS):
        config["activation_checkpointing"] = {name: values[name] for name in _ACTIVATIONS}
    if not values["zero_optimization"]:
        return {**config, "zero_optimization": {"stage": 0}}
    zero = {"stage": values["stage"], **{name: values[name] for name in _ZERO}}
    uses_nvme = False
    if values["offload_optimizer"]:
        zero["offload_optimizer"] = _place(values, "offload_optimizer_device")
        uses_nvme = values["offload_optimizer_device"] == "nvme"
        if uses_nvme:
            zero["offload_optimizer"]["buffer_count"] = values["optimizer_buffer_count"]
    if values["offload_parameters"]:
        zero["offload_param"] = _place(values, "offload_params_device")
        if values["offload_params_device"] == "nvme":
            uses_nvme = True
            zero["offload_param"] |= {
                "buffer_count": values["params_buffer_count"],
                "buffer_size": values["params_buffer_size"],
                "max_in_cpu": values["max_in_cpu"],
            }
    if uses_nvme:
        config["aio"] = {name: values[name] for name in _AIO}
    return {**config, "zero_optimization": zero}


def _place(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    place = {"device": values[device], "pin_memory": values["pin_memory"]}
    return place | ({"nvme_path": values["nvme_path"]} if values[device] == "nvme" else {})


def given_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any] | None:
    """Return the configuration of the caller, or of the environment, as a dict."""
    if config is None:
        found = (os.environ.get(name) for name in CONFIG_VARIABLES)
        config = next((path for path in found if path), None)
    return None if config is None else dict(read(config)[0])


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of parameters in the loss for a ``precision`` of Lightning.

    Raises:
        OptionError: a precision that zfun does not have.
    """
    if precision not in _DTYPES:
        raise OptionError(
            f"ZfunStrategy computes with precision {', '.join(map(repr, _DTYPES))}; got "
            f"{precision!r}; pass one of these to Trainer(precision=...)"
        )
    return _DTYPES[precision]


def recipe_of(
    config: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    precision: str,
    world_size: int,
    accumulate: int,
    clip_norm: float | None,
) -> Recipe:
    """Return the options of ``zf.zero`` for a configuration and what the trainer knows.

    Raises:
        ConfigError: the configuration has mistakes; the message lists all of them.
        OptionError: the configuration sets what ``Trainer`` sets.
    """
    if config.get("gradient_accumulation_steps", "auto") not in ("auto", accumulate):
        raise OptionError(
            "Lightning accumulates gradients; got gradient_accumulation_steps="
            f"{config['gradient_accumulation_steps']!r} in the configuration; write "
            "Trainer(accumulate_grad_batches=...), or accumulate in the loop of Fabric"
        )
    dtype = dtype_of(precision)
    whole = dict(config)
    whole.pop("gradient_accumulation_steps", None)
    # Batch sizes only describe the data of Lightning.
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        whole.pop(name, None)
    if clip_norm is not None or whole.get("gradient_clipping") == "auto":
        whole["gradient_clipping"] = clip_norm or 0.0
    whole.setdefault("gradient_clipping", 0.0)
    sections = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    for one, section in sections.items():
        if dtype is one:
            whole.setdefault(section, {"enabled": True})
    if dtype is torch.float16 and config.get("fp16") is None:
        whole["fp16"] = {
            "enabled": True,
            **{
                name: values[name]
                for name in (
                    "loss_scale",
                    "initial_scale_power",
                    "loss_scale_window",
                    "hysteresis",
                    "min_loss_scale",
                )
            },
        }
    recipe = from_ds_config(whole, auto=AutoValues(world_size=world_size, dtype=dtype))
    if recipe.autocast is not None:
        raise OptionError(
            "Lightning's Trainer chooses the dtypes; got torch_autocast in the configuration; pass "
            "precision='bf16-mixed' to the Trainer, and leave the section out"
        )
    return recipe
