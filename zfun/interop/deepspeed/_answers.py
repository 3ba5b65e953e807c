"""The methods of DeepSpeed's engine that return a value, as tables of functions of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from zfun.errors import OptionError
from zfun.interop.ds_config import Batch

_Z = "zero_optimization"
_SAME = (
    "gradient_predivide_factor managed_gradient_accumulation memory_breakdown steps_per_print "
    "wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
)
_OF_ZERO = (
    "allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint "
    "ignore_unused_parameters load_from_fp32_weights overlap_comm reduce_bucket_size "
    "reduce_scatter round_robin_gradients sub_group_size"
)
_OF_STAGE_3 = (
    "gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance "
    "model_persistence_threshold param_persistence_threshold prefetch_bucket_size"
)
_Answer: TypeAlias = Callable[[Any], Any]


def batch_of(engine: Any) -> Batch:
    if engine._settings.recipe.batch is None:
        raise OptionError(
            "the sizes of a batch come from the configuration; got one without any; write "
            "train_micro_batch_size_per_gpu"
        )
    return engine._settings.recipe.batch


def _of_groups(engine: Any, *names: str) -> list[Any]:
    """Return the first of these numbers that each parameter group has, or 0."""
    groups = () if engine.optimizer is None else engine.optimizer.param_groups
    return [next((group[x] for x in names if x in group), 0.0) for group in groups]


def rates_of(engine: Any) -> list[float]:
    return [float(rate) for rate in _of_groups(engine, "lr")]


def _value(path: str) -> _Answer:
    """Answer with the value of a key, by default DeepSpeed's."""
    return lambda engine: engine._settings.values[path]


def _given(path: str, default: Any = None) -> _Answer:
    """Answer with a value as written."""
    return lambda engine: engine._settings.given.get(path, default)


def _section(section: str) -> _Answer:
    """Answer with the values of a section as written; ``None`` without any."""
    start = f"{section}."

    def answer(engine: Any) -> dict[str, Any] | None:
        given = engine._settings.given
        return {p[len(start) :]: x for p, x in given.items() if p.startswith(start)} or None

    return answer


def _optimizer_name(engine: Any) -> str | None:
    # DeepSpeed has the names of its own in lower case.
    name = engine._settings.given.get("optimizer.type")
    return None if name is None else name.lower()


def _tags(engine: Any) -> str:
    return engine._settings.given.get("checkpoint.tag_validation", "Warn").lower()


# By attribute, with the remedy for another value.
_VALUES: Mapping[str, tuple[_Answer, str]] = {
    "communication_data_type": (
        lambda e: e._settings.recipe.precision.reduce or torch.float32,
        "write communication_data_type into the configuration",
    ),
    "cur_scale": (lambda e: e._core.loss_scale, "write fp16.loss_scale into the configuration"),
    "enable_backward_allreduce": (lambda e: True, "use engine.no_sync()"),
    "gradient_average": (lambda e: True, "multiply the loss by engine.dp_world_size for a sum"),
    "has_moe_layers": (lambda e: False, "use zfun.experts"),
    "mp_world_size": (lambda e: 1, "train a loss of zf.tensor_parallel()"),
}
# Methods that ask for what a configuration cannot have.
_NEVER = (
    "autotuning_enabled curriculum_learning_enabled data_efficiency_enabled data_sampling_enabled "
    "random_ltd_enabled zero_legacy_stage1"
)
# By method. Ranks have no part of a sequence each, and norms are those before clipping.
_METHODS: Mapping[str, _Answer] = {
    **dict.fromkeys(_NEVER.split(), lambda e: False),
    **{name: _value(name) for name in _SAME.split()},
    **{f"zero_{name}": _value(f"{_Z}.{name}") for name in _OF_ZERO.split()},
    **{f"zero_{name}": _value(f"{_Z}.stage3_{name}") for name in _OF_STAGE_3.split()},
    "bf16_master_weights_and_gradients": _value("bf16.bf16_master_weights_and_grads"),
    "bfloat16_enabled": _value("bf16.enabled"),
    "checkpoint_tag_validation_enabled": lambda e: _tags(e) != "ignore",
    "checkpoint_tag_validation_fail": lambda e: _tags(e) == "fail",
    "dataloader_drop_last": _given("dataloader_drop_last", False),
    "dump_state": _given("dump_state", False),
    "dynamic_loss_scale": lambda e: not e._settings.values["fp16.loss_scale"],
    "flops_profiler_enabled": _given("flops_profiler.enabled", False),
    "fp16_auto_cast": _value("fp16.auto_cast"),
    "fp16_enabled": _value("fp16.enabled"),
    "fp16_master_weights_and_gradients": _given("fp16.fp16_master_weights_and_grads", False),
    "get_batch_info": lambda e: batch_of(e)[:3],
    "get_data_parallel_rank": lambda e: e._group.rank,
    "get_global_grad_norm": lambda e: e._grad_norm,
    "get_lr": rates_of,
    "get_mom": lambda e: _of_groups(e, "betas", "momentum"),
    "get_sequence_parallel_group": lambda e: None,
    "get_sequence_parallel_rank": lambda e: 0,
    "get_sequence_parallel_world_size": lambda e: 1,
    "get_type": lambda e: (
        [type(getattr(e.optimizer, "optimizer", None)).__name__] * len(rates_of(e))
    ),
    "gradient_accumulation_steps": lambda e: e._settings.recipe.num_micro_batches,
    "gradient_clipping": lambda e: e._settings.recipe.max_grad_norm,
    "initial_dynamic_scale": lambda e: 2.0 ** e._settings.values["fp16.initial_scale_power"],
    "loss_scale": lambda e: float(e._settings.values["fp16.loss_scale"]),
    "optimizer_name": _optimizer_name,
    "optimizer_params": _section("optimizer.params"),
    "postscale_gradients": lambda e: not e._settings.given.get("prescale_gradients", False),
    "scheduler_name": _given("scheduler.type"),
    "scheduler_params": _section("scheduler.params"),
    "train_batch_size": lambda e: batch_of(e).train,
    "train_micro_batch_size_per_gpu": lambda e: batch_of(e).micro,
    "use_node_local_storage": _given("checkpoint.use_node_local_storage", False),
    "zero_cpu_offload": lambda e: e._settings.given.get(f"{_Z}.offload_optimizer.device") == "cpu",
    "zero_hpz_partition_size": _value(f"{_Z}.zero_hpz_partition_size"),
    "zero_offload_optimizer": _section(f"{_Z}.offload_optimizer"),
    "zero_offload_param": _section(f"{_Z}.offload_param"),
    "zero_optimization": lambda e: e._settings.recipe.stage > 0,
    "zero_optimization_partition_gradients": lambda e: e._settings.recipe.stage >= 2,
    "zero_optimization_partition_weights": lambda e: e._settings.recipe.stage == 3,
    "zero_optimization_stage": lambda e: e._settings.recipe.stage,
    "zero_partial_offload": _given(f"{_Z}.offload_optimizer.ratio", 1.0),
    "zero_quantized_gradients": _value(f"{_Z}.zero_quantized_gradients"),
    "zero_quantized_weights": _value(f"{_Z}.zero_quantized_weights"),
}


def write(cls: type) -> None:
    """Write the methods and the values of the tables into a class."""
    for name, value in _METHODS.items():
        setattr(cls, name, _method(cls, name, value))
    for name, (value, remedy) in _VALUES.items():
        setattr(cls, name, property(value, _setter(name, value, remedy)))


def _setter(name: str, value: _Answer, remedy: str) -> Callable[[Any, Any], None]:
    def refuse(self: Any, new: Any) -> None:
        if new != value(self):
            raise OptionError(
                f"engine.{name} is {value(self)} for the whole run; got {new!r}; {remedy}"
            )

    return refuse


def _method(cls: type, name: str, value: _Answer) -> _Answer:
    def method(self: Any) -> Any:
        return value(self)

    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    method.__doc__ = "Return the value of DeepSpeed's method of this name."
    return method
