"""Names of DeepSpeed that are not here, each with the name to use instead.

A script imports more names than it uses, so an absent name imports as a placeholder: a class that
no object is an instance of, and that raises its remedy when it is used. An absent module gives
placeholders only. A name that DeepSpeed does not have either stays an ``AttributeError``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from zfun.errors import OptionError

_INFERENCE = "train with initialize(), save with engine.save_16bit_model(), and serve the file"
_PIPELINE = "keep the model in one piece and use zero_optimization.stage 3"
_TENSOR_PARALLEL = "shard the parameters with stage 3 instead of cutting layers"
_MOE = (
    "build experts of plain modules; ranks may use different experts, because the order of "
    "collectives does not depend on the experts that a rank uses"
)
_TRANSFORMER = "use a module of plain torch; torch.compile fuses the operations of a layer"
_LAUNCH = "start the script with python -m zfun.interop.deepspeed"
_COMPILE = "call torch.compile on blocks of the model before initialize()"
_SWITCH = "write the options into the configuration that initialize() takes"
_ENGINE = "use the engine that initialize() returns; its optimizer is engine.optimizer"
_QUANTIZE = "use zero_quantized_weights and zero_quantized_gradients, or zf.compression.int8"
_SEQUENCE = "split the sequence inside the model, with zf.collectives.all_to_all"
_DATA = "order the samples with a torch sampler"
_DROP = "drop tokens and layers in the model"
_LOG = "log engine.get_global_grad_norm() and engine.get_lr() with your own logger"
_PROFILE = "use torch.profiler, torch.utils.flop_counter and zf.planner.timeline"
_LOAD = "use engine.load_checkpoint(), which takes any number of ranks and any stage"
_SAVE = "use engine.save_checkpoint(), which publishes a checkpoint by one rename"
_STORE = "use zf.stores.nvme, or offload_optimizer with device nvme"
_GATHER = "read a parameter under zero.GatheredParameters"
_LINEAR = "use torch.nn.Linear; stage 3 gathers one bucket at a time"
_GRADS = "use zf.vjp or zf.value_and_grad, whose gradients are values"
_KERNELS = "nothing is compiled: kernels are Numba and Triton"
_TORCH = "use the function of the same purpose in torch"

# Modules of DeepSpeed without any name here, by the remedy of all their names.
_MODULES: Mapping[str, str] = {
    "compare stages before a run with zf.planner.plan": "autotuning",
    _LOAD: "checkpoint runtime.state_dict_factory",
    _COMPILE: "compile runtime.compiler",
    _QUANTIZE: (
        "compression ops.fp_quantizer ops.quantizer runtime.compression runtime.quantize "
        "runtime.weight_quantizer"
    ),
    "use torch.utils.collect_env": "env_report",
    _INFERENCE: "inference model_implementations module_inject",
    _STORE: "io nvme ops.aio ops.gds runtime.superoffload runtime.swap_tensor runtime.zenflow",
    _LAUNCH: (
        "launcher.constants launcher.launch launcher.launcher_helper launcher.multinode_runner"
    ),
    "freeze the base with requires_grad_(False) and train adapters, as peft does": "linear",
    _MOE: "moe",
    _LOG: "monitor",
    _SAVE: "nebula runtime.checkpoint_engine runtime.model_checkpointing",
    _KERNELS: "ops.compile ops.csrc ops.op_builder",
    "use torch.nn.functional.scaled_dot_product_attention": "ops.deepspeed4science",
    _DROP: "ops.random_ltd runtime.progressive_layer_drop",
    "use torch.nn.attention.flex_attention": "ops.sparse_attention",
    _TRANSFORMER: "ops.transformer",
    _PIPELINE: "pipe runtime.pipe",
    _PROFILE: "profiling",
    "test with isinstance(optimizer, torch.optim.Optimizer)": "runtime.base_optimizer",
    _SWITCH: (
        "runtime.bf16_optimizer runtime.constants runtime.precision_config runtime.zero.utils "
        "utils.config"
    ),
    "use deepspeed.comm": "runtime.comm",
    _DATA: "runtime.data_pipeline",
    _TENSOR_PARALLEL: "runtime.domino runtime.tensor_parallel",
    "use torch.func.hvp on the loss": "runtime.eigenvalue",
    _ENGINE: (
        "runtime.fp16.fused_optimizer runtime.fp16.unfused_optimizer utils.mixed_precision_linkage"
    ),
    "read engine.loss_scale(), and write fp16 into the configuration": "runtime.fp16.loss_scaler",
    "generate with engine.generate(), in the training engine": "runtime.hybrid_engine",
    "use the trainers of trl": "runtime.rlhf",
    "use engine.generate()": "runtime.rollout",
    _SEQUENCE: "runtime.sequence_parallel sequence",
    "gradients are dense; use nn.Embedding(sparse=False)": "runtime.sparse_tensor",
    "use torch.autocast around the model, or bf16 in the configuration": "runtime.torch_autocast",
    "memory is torch's": "runtime.zero.contiguous_memory_allocator",
    "no module needs a mark": "runtime.zero.leaf_module_config",
    _LINEAR: "runtime.zero.linear runtime.zero.tiling",
    "write mics_shard_size into the configuration": "runtime.zero.mics",
    "zfun puts no hooks into the module": "runtime.zero.parameter_offload",
    "read the schedule with zf.planner.explain": "runtime.zero.partitioned_param_coordinator",
    "use torch.profiler, or zf.record for the bytes of each collective": "utils.comms_logging",
    "name parameters with model.named_parameters()": "utils.debug",
    "catch the errors of zfun.errors": "utils.exceptions",
    "start the script with numactl": "utils.numa",
    "pass an mpu to initialize()": "utils.parallel_state",
    "use tensor.pin_memory()": "utils.pin_memory",
    _TORCH: "utils.types",
    "use utils.zero_to_fp32": "utils.zero_to_torch",
}
ABSENT_MODULES: Mapping[str, str] = {
    name: remedy for remedy, names in _MODULES.items() for name in names.split()
}

# By module here, beginning with the package itself as "": each name with the remedy.
ABSENT: Mapping[str, Mapping[str, str]] = {
    "": {
        "init_inference": _INFERENCE,
        "default_inference_config": _INFERENCE,
        "InferenceEngine": _INFERENCE,
        "DeepSpeedInferenceConfig": _INFERENCE,
        "replace_transformer_layer": _INFERENCE,
        "revert_transformer_layer": _INFERENCE,
        "DeepSpeedHybridEngine": "generate with engine.generate(), in the training engine",
        "PipelineEngine": _PIPELINE,
        "PipelineModule": _PIPELINE,
        "tp_model_init": _TENSOR_PARALLEL,
        "set_autotp_mode": _TENSOR_PARALLEL,
        "domino": _TENSOR_PARALLEL,
        "DeepSpeedTransformerLayer": _TRANSFORMER,
        "DeepSpeedTransformerConfig": _TRANSFORMER,
        "DeepSpeedOptimizer": "test with isinstance(optimizer, torch.optim.Optimizer)",
        "DeepSpeedOptimizerCallable": _ENGINE,
        "DeepSpeedSchedulerCallable": _ENGINE,
        "EngineTimers": _PROFILE,
        "add_tuning_arguments": "write the scheduler into the configuration",
        "set_optimizer_flags": "write optimizer.type 'Muon' into the configuration",
        "is_compile_supported": _COMPILE,
    },
    "zero": {
        "TiledLinear": _LINEAR,
        "TiledLinearReturnBias": _LINEAR,
        "MiCS_Init": "use zero.Init, and mics_shard_size in the configuration",
        "MiCS_Optimizer": "write mics_shard_size into the configuration",
        "ZeroParamType": "read param.ds_shape, which partitioned parameters have",
        "AllGatherHandle": _GATHER,
        "AllGatherCoalescedHandle": _GATHER,
        "NoGatherHandle": _GATHER,
        "InsertPostInitMethodToModuleSubClasses": "use zero.Init",
        "free_param": _GATHER,
        "assert_ints_same_as_other_ranks": "use torch.distributed.all_gather_object",
        "get_model_hooks": "zfun puts no hooks into the module",
        "DeepSpeedZeroOptimizer": _ENGINE,
        "DeepSpeedZeroOptimizer_Stage3": _ENGINE,
        "FP16_DeepSpeedZeroOptimizer": _ENGINE,
        "FP16_DeepSpeedZeroOptimizer_Stage3": _ENGINE,
        "DeepSpeedZeRoOffload": "zfun puts no hooks into the module",
    },
    "ops": {
        "ZenFlowCPUAdam": "use DeepSpeedCPUAdam",
        "ZenFlowSelectiveAdamW": "use FusedAdam",
        "OnebitLamb": "use FusedLamb",
        "ZeroOneAdam": "use OnebitAdam",
        "MuonWithAuxAdam": "write optimizer.type 'Muon' into the configuration",
        "Muon": "write optimizer.type 'Muon' into the configuration, or use torch.optim.Muon",
        "MultiTensorApply": _KERNELS,
        "multi_tensor_applier": _KERNELS,
    },
    "runtime": {
        "ZeROOptimizer": _ENGINE,
        "DeepSpeedOptimizer": "test with isinstance(optimizer, torch.optim.Optimizer)",
    },
    "utils": {
        "get_full_hp_param": "use safe_get_full_fp32_param",
        "get_full_hp_grad": "use safe_get_full_grad",
        "CheckOverflow": "read engine.skipped_steps",
        "PartitionedTensor": "use zf.shard",
        "memory_status": "use torch.cuda.memory_summary",
        "get_grad_norm": "use engine.get_global_grad_norm(), or zf.reductions.global_norm",
        "get_weight_norm": "use zf.reductions.global_norm",
        "get_global_norm": "use engine.get_global_grad_norm()",
        "get_global_norm_of_tensors": "use zf.reductions.global_norm",
        "clip_grad_norm_": "write gradient_clipping into the configuration",
        "clip_tensors_by_global_norm": "use zf.optim.clip_by_global_norm",
        "bwc_tensor_model_parallel_rank": "pass an mpu to initialize()",
        "split_params_into_different_moe_groups_for_optimizer": _MOE,
        "configure_moe_param_groups": _MOE,
        "SynchronizedWallClockTimer": _PROFILE,
        "ThroughputTimer": _PROFILE,
        "get_caller_func": _PROFILE,
        "get_numactl_cmd": "start the script with numactl",
    },
    "groups": {
        name: remedy
        for kind, remedy in (
            ("model_parallel", _TENSOR_PARALLEL),
            ("tensor_model_parallel", _TENSOR_PARALLEL),
            ("sequence_parallel", _SEQUENCE),
            ("expert_parallel", _MOE),
            ("expert_data_parallel", _MOE),
            ("zero_param_intra_parallel", "write zero_hpz_partition_size into the configuration"),
        )
        for name in (f"get_{kind}_group", f"_get_{kind}_group", f"_get_{kind}_group_dict")
    },
    "checkpointing": {
        "PROFILE_TIME": _PROFILE,
        "gather_partitioned_activations": "call configure(mpu, partition_activations=True)",
        "partition_activations": "call configure(mpu, partition_activations=True)",
    },
    "config": {
        "DeepSpeedConfigModel": "use a dataclass",
        "ElasticityConfig": "use zfun.interop.solve_batch",
        "HybridEngineConfig": "generate with engine.generate(), in the training engine",
    },
    "comm": {
        "CommsLogger": "use torch.profiler, or zf.record for the bytes of each collective",
        "TorchBackend": "use torch.distributed",
    },
    "engine": {
        "allreduce_gradients": "call backward() and step(), which sum over the ranks",
        "forward_prologue": "call the engine",
        "train_batch": _PIPELINE,
        "eval_batch": _PIPELINE,
        "curriculum_scheduler": _DATA,
        "monitor": _LOG,
        "flops_profiler": "use torch.profiler",
        "random_ltd_scheduler": _DROP,
        "zenflow_step": "call step()",
        "basic_optimizer": "use engine.optimizer",
        "client_optimizer": "use engine.optimizer",
        "client_lr_scheduler": "use engine.lr_scheduler",
    },
}


class _Absent(type):
    """The class of placeholders, whose uses raise."""

    _message: str

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, _Absent):
                base._raise()
        return super().__new__(cls, name, bases, body)

    def _raise(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise OptionError(cls._message)

    __call__ = __enter__ = __exit__ = __iter__ = __len__ = __getitem__ = _raise

    def __getattr__(cls, name: str) -> Any:
        if is_dunder(name):
            raise AttributeError(name)
        cls._raise()


@functools.cache
def placeholder(path: str, remedy: str) -> Any:
    """Return the one placeholder for a name.

    Args:
        path: of the name, without ``deepspeed``.
        remedy: the name to use instead.
    """
    module, _, name = f"deepspeed.{path}".rpartition(".")
    body = {"__module__": module, "_message": _message(f"{module}.{name}", remedy)}
    return _Absent(name, (), body)


def remedy_of(path: str) -> str | None:
    """Return the remedy of a module that is absent; ``None`` for a module that is here."""
    parts = path.split(".")
    starts = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ABSENT_MODULES[start] for start in starts if start in ABSENT_MODULES), None)


def is_dunder(name: str) -> bool:
    """Return whether a name belongs to Python."""
    return name.startswith("__") and name.endswith("__")


def absent(module: str, known: Mapping[str, Any], key: str | None = None) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: submodules, placeholders, or an error.

    Args:
        module: the module, by its path in the package; ``""`` is the package.
        known: the names that are there.
        key: the key of the module in the table; by default its path.
    """
    table = module if key is None else key

    def find(name: str) -> Any:
        if is_dunder(name):
            raise AttributeError(name)
        remedy = ABSENT.get(table, {}).get(name)
        if remedy is not None:
            return placeholder(f"{module}.{name}".lstrip("."), remedy)
        full = f"{known['__name__']}.{name}"
        if "__path__" in known and importlib.util.find_spec(full) is not None:
            return importlib.import_module(full)
        raise refusal(table, name, known)

    return find


def refusal(module: str, name: str, known: Mapping[str, Any]) -> Exception:
    """Return the error of a name that is not there."""
    full = f"deepspeed.{module}.{name}" if module else f"deepspeed.{name}"
    remedy = ABSENT.get(module, {}).get(name)
    if remedy is not None:
        return OptionError(_message(full, remedy))
    near = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see the page 'From DeepSpeed'"
    return AttributeError(_message(full, hint))


def _message(full: str, remedy: str) -> str:
    return (
        f"zfun.interop.deepspeed has the names of DeepSpeed that train; got {full}, which is not "
        f"there; {remedy}"
    )
