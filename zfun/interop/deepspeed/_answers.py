"""The methods of DeepSpeed's engine that return a value, as tables of functions of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from zfun.errors import OptionError
from zfun.interop.ds_config import Batch

_Z = "zero_optimization"
_SAME = "gradient_predivide_factor memory_breakdown steps_per_print wall_clock_breakdown"
_OF_ZERO = (
    "allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint "
    "ignore_unused_parameters load_from_fp32_weights overlap_comm reduce_bucket_size "
    "reduce_scatter round_robin_gradients sub_group_size"
)
_OF_STAGE_3 = (
    "gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance "
    "model_persistence_threshold param_persistence_threshold prefetch_bucket_size"
)
# By method: the path of the key whose value it returns.
GETTERS: Mapping[str, str] = {
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    **{name: name for name in _SAME.split()},
    **{f"zero_{name}": f"{_Z}.{name}" for name in _OF_ZERO.split()},
    **{f"zero_{name}": f"{_Z}.stage3_{name}" for name in _OF_STAGE_3.split()},
    **{
        name: f"{_Z}.{name}"
        for name in (
            "zero_hpz_partition_size",
            "zero_quantized_gradients",
            "zero_quantized_weights",
        )
    },
}
# By method: the section whose values it returns, or the key that it returns as written.
_SECTIONS = {
    "optimizer_params": "optimizer.params",
    "scheduler_params": "scheduler.params",
    "zero_offload_optimizer": f"{_Z}.offload_optimizer",
    "zero_offload_param": f"{_Z}.offload_param",
}


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


def _types(engine: Any) -> list[str]:
    optimizer = getattr(engine.optimizer, "optimizer", None)
    return [type(optimizer).__name__ for _ in _of_groups(engine, "lr")]


def _section(engine: Any, section: str) -> dict[str, Any] | None:
    start, given = f"{section}.", engine._settings.given
    values = {path[len(start) :]: x for path, x in given.items() if path.startswith(start)}
    return values or None


def _given(path: str, default: Any) -> Callable[[Any], Any]:
    return lambda engine: engine._settings.given.get(path, default)


def _optimizer_name(engine: Any) -> str | None:
    # DeepSpeed has the names of its own in lower case.
    name = engine._settings.given.get("optimizer.type")
    return None if name is None else name.lower()


def _tags(engine: Any) -> str:
    return engine._settings.given.get("checkpoint.tag_validation", "Warn").lower()


def _offloads_to_cpu(engine: Any) -> bool:
    return engine._settings.given.get(f"{_Z}.offload_optimizer.device") == "cpu"


# By attribute, with the remedy for another value.
_VALUES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
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
_METHODS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_NEVER.split(), lambda e: False),
    "checkpoint_tag_validation_enabled": lambda e: _tags(e) != "ignore",
    "checkpoint_tag_validation_fail": lambda e: _tags(e) == "fail",
    "dataloader_drop_last": _given("dataloader_drop_last", False),
    "dump_state": _given("dump_state", False),
    "dynamic_loss_scale": lambda e: not e._settings.values["fp16.loss_scale"],
    "flops_profiler_enabled": _given("flops_profiler.enabled", False),
    "fp16_master_weights_and_gradients": _given("fp16.fp16_master_weights_and_grads", False),
    "get_batch_info": lambda e: batch_of(e)[:3],
    "get_data_parallel_rank": lambda e: e._group.rank,
    "get_global_grad_norm": lambda e: e._grad_norm,
    "get_lr": rates_of,
    "get_mom": lambda e: _of_groups(e, "betas", "momentum"),
    "get_sequence_parallel_group": lambda e: None,
    "get_sequence_parallel_rank": lambda e: 0,
    "get_sequence_parallel_world_size": lambda e: 1,
    "get_type": _types,
    "gradient_accumulation_steps": lambda e: e._settings.recipe.num_micro_batches,
    "gradient_clipping": lambda e: e._settings.recipe.max_grad_norm,
    "initial_dynamic_scale": lambda e: 2.0 ** e._settings.values["fp16.initial_scale_power"],
    "loss_scale": lambda e: float(e._settings.values["fp16.loss_scale"]),
    "optimizer_name": _optimizer_name,
    "postscale_gradients": lambda e: not e._settings.given.get("prescale_gradients", False),
    "scheduler_name": _given("scheduler.type", None),
    "train_batch_size": lambda e: batch_of(e).train,
    "train_micro_batch_size_per_gpu": lambda e: batch_of(e).micro,
    "use_node_local_storage": _given("checkpoint.use_node_local_storage", False),
    "zero_cpu_offload": _offloads_to_cpu,
    "zero_optimization": lambda e: e._settings.recipe.stage > 0,
    "zero_optimization_partition_gradients": lambda e: e._settings.recipe.stage >= 2,
    "zero_optimization_partition_weights": lambda e: e._settings.recipe.stage == 3,
    "zero_optimization_stage": lambda e: e._settings.recipe.stage,
    "zero_partial_offload": _given(f"{_Z}.offload_optimizer.ratio", 1.0),
}


def methods() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield the methods by name."""
    yield from _METHODS.items()
    for name, path in GETTERS.items():
        yield name, lambda engine, path=path: engine._settings.values[path]
    for name, path in _SECTIONS.items():
        yield name, lambda engine, path=path: _section(engine, path)


def write(cls: type) -> None:
    """Write the methods and the values of the tables into a class."""
    for name, value in methods():
        setattr(cls, name, _method(cls, name, value))
    for name, (value, remedy) in _VALUES.items():
        setattr(cls, name, property(value, _setter(name, value, remedy)))


def _setter(name: str, value: Callable[[Any], Any], remedy: str) -> Callable[[Any, Any], None]:
    def refuse(self: Any, new: Any) -> None:
        if new != value(self):
            raise OptionError(
                f"engine.{name} is {value(self)} for the whole run; got {new!r}; {remedy}"
            )

    return refuse


def _method(cls: type, name: str, value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return value(self)

    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    method.__doc__ = "Return the value of DeepSpeed's method of this name."
    return method
