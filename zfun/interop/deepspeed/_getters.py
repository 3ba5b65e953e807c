"""The methods of DeepSpeed's engine that return a value of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zfun.interop.ds_config._values import Values

_Z = "zero_optimization"

# By method: the path of the key.
GETTERS: Mapping[str, str] = {
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "zero_allgather_bucket_size": f"{_Z}.allgather_bucket_size",
    "zero_allgather_partitions": f"{_Z}.allgather_partitions",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_contiguous_gradients": f"{_Z}.contiguous_gradients",
    "zero_elastic_checkpoint": f"{_Z}.elastic_checkpoint",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_gather_16bit_weights_on_model_save": f"{_Z}.stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": f"{_Z}.zero_hpz_partition_size",
    "zero_ignore_unused_parameters": f"{_Z}.ignore_unused_parameters",
    "zero_load_from_fp32_weights": f"{_Z}.load_from_fp32_weights",
    "zero_max_live_parameters": f"{_Z}.stage3_max_live_parameters",
    "zero_max_reuse_distance": f"{_Z}.stage3_max_reuse_distance",
    "zero_model_persistence_threshold": f"{_Z}.stage3_model_persistence_threshold",
    "zero_overlap_comm": f"{_Z}.overlap_comm",
    "zero_param_persistence_threshold": f"{_Z}.stage3_param_persistence_threshold",
    "zero_prefetch_bucket_size": f"{_Z}.stage3_prefetch_bucket_size",
    "zero_quantized_gradients": f"{_Z}.zero_quantized_gradients",
    "zero_quantized_weights": f"{_Z}.zero_quantized_weights",
    "zero_reduce_bucket_size": f"{_Z}.reduce_bucket_size",
    "zero_reduce_scatter": f"{_Z}.reduce_scatter",
    "zero_round_robin_gradients": f"{_Z}.round_robin_gradients",
    "zero_sub_group_size": f"{_Z}.sub_group_size",
}
# By method: the section.
_SECTIONS = {
    "optimizer_params": "optimizer.params",
    "scheduler_params": "scheduler.params",
    "zero_offload_optimizer": f"{_Z}.offload_optimizer",
    "zero_offload_param": f"{_Z}.offload_param",
}
_TYPES = {"optimizer_name": "optimizer.type", "scheduler_name": "scheduler.type"}


def value_of(name: str, values: Values, given: Mapping[str, Any]) -> Any:
    """Return the value that a method of DeepSpeed's engine returns.

    Args:
        name: of the method.
        values: the value of each key.
        given: the values as written, by path.

    Raises:
        KeyError: there is no such method.
    """
    if name in _TYPES:
        return given.get(_TYPES[name])
    section = _SECTIONS.get(name)
    if section is None:
        return values[GETTERS[name]]
    found = {
        path.removeprefix(f"{section}."): value
        for path, value in given.items()
        if path.startswith(f"{section}.")
    }
    return found or None
