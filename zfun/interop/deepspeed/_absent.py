"""Names of DeepSpeed that are not here, each with the name to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from zfun.errors import OptionError

__all__ = ["ABSENT", "absent", "refusal"]

_INFERENCE = "train with initialize(), save with engine.save_16bit_model(), and serve the file"
_PIPELINE = "keep the model in one piece and use zero_optimization.stage 3"
_TENSOR_PARALLEL = "shard the parameters with stage 3 instead of cutting layers"
_MOE = (
    "build experts of plain modules; ranks may use different experts, because the order of "
    "collectives does not depend on the experts that a rank uses"
)
_TRANSFORMER = "use a module of plain torch; torch.compile fuses the operations of a layer"
_TORCHRUN = "start the script with torchrun, one process for each device"
_CONFIG = "use zfun.interop.from_ds_config(config), which lists what became of each key"
_SWITCH = "write the options into the configuration that initialize() takes"

# By module, beginning with the package itself as "": each name with the remedy.
ABSENT: Mapping[str, Mapping[str, str]] = {
    "": {
        "init_inference": _INFERENCE,
        "default_inference_config": _INFERENCE,
        "InferenceEngine": _INFERENCE,
        "DeepSpeedInferenceConfig": _INFERENCE,
        "inference": _INFERENCE,
        "model_implementations": _INFERENCE,
        "module_inject": _INFERENCE,
        "replace_transformer_layer": _INFERENCE,
        "revert_transformer_layer": _INFERENCE,
        "DeepSpeedHybridEngine": "generate with engine.generate(), in the training engine",
        "PipelineEngine": _PIPELINE,
        "PipelineModule": _PIPELINE,
        "domino": _TENSOR_PARALLEL,
        "tp_model_init": _TENSOR_PARALLEL,
        "set_autotp_mode": _TENSOR_PARALLEL,
        "sequence": "split the sequence inside the model, with zf.collectives.all_to_all",
        "DeepSpeedTransformerLayer": _TRANSFORMER,
        "DeepSpeedTransformerConfig": _TRANSFORMER,
        "DeepSpeedConfig": _CONFIG,
        "DeepSpeedConfigError": "catch zfun.errors.ConfigError, which lists all mistakes",
        "DeepSpeedOptimizer": "test with isinstance(optimizer, torch.optim.Optimizer)",
        "DeepSpeedDataLoader": "pass training_data to initialize(), or use a torch DataLoader",
        "OnDevice": "build the module under torch.device('meta') or zero.Init()",
        "add_tuning_arguments": "write the scheduler into the configuration",
        "set_optimizer_flags": "write optimizer.type 'Muon' into the configuration",
        "is_compile_supported": "call torch.compile on blocks of the model before initialize()",
        "compile": "call torch.compile on blocks of the model before initialize()",
        "autotuning": "compare stages before a run with zf.planner.plan",
        "compression": "use zero_quantized_weights and zero_quantized_gradients of the config",
        "elasticity": "use zfun.interop.solve_batch, or the section elasticity of the config",
        "launcher": _TORCHRUN,
        "runner": _TORCHRUN,
        "linear": "freeze the base with requires_grad_(False) and train adapters, as peft does",
        "monitor": "log engine.get_global_grad_norm() and engine.get_lr() with your own logger",
        "nebula": "use engine.save_checkpoint(), which publishes a checkpoint by one rename",
        "profiling": "use torch.profiler and zf.planner.timeline",
        "checkpoint": "use engine.load_checkpoint(), which takes any number of ranks and any stage",
        "git_version_info": "use __version__",
        "env_report": "use torch.utils.collect_env",
    },
    "zero": {
        "TiledLinear": "use torch.nn.Linear; stage 3 gathers one bucket at a time",
        "TiledLinearReturnBias": "use torch.nn.Linear; stage 3 gathers one bucket at a time",
        "MiCS_Init": "use zero.Init, and mics_shard_size in the configuration",
        "MiCS_Optimizer": "write mics_shard_size into the configuration",
        "DeepSpeedZeroConfig": _CONFIG,
        "ZeroParamType": "read param.ds_shape, which partitioned parameters have",
        "get_model_hooks": "zfun puts no hooks into the module",
    },
    "ops": {
        "op_builder": "nothing is compiled: kernels are Numba and Triton",
        "transformer": _TRANSFORMER,
        "sparse_attention": "use torch.nn.attention.flex_attention",
        "aio": "use zf.stores.nvme, or offload_optimizer with device nvme",
        "fp_quantizer": "use zf.compression.int8",
        "quantizer": "use zf.compression.int8",
        "random_ltd": "drop tokens in the model",
        "deepspeed4science": "use torch.nn.functional.scaled_dot_product_attention",
        "muon": "write optimizer.type 'Muon' into the configuration",
    },
    "ops.adam": {
        "ZenFlowCPUAdam": "use DeepSpeedCPUAdam",
        "ZenFlowSelectiveAdamW": "use FusedAdam",
        "OnebitAdam": "write optimizer.type 'OneBitAdam' into the configuration",
    },
    "ops.lamb": {"OnebitLamb": "use FusedLamb"},
    "runtime": {
        "pipe": _PIPELINE,
        "config": _CONFIG,
        "fp16": _SWITCH,
        "bf16_optimizer": _SWITCH,
        "hybrid_engine": "generate with engine.generate(), in the training engine",
        "data_pipeline": "order the samples with a torch sampler",
        "sparse_tensor": "gradients are dense; use nn.Embedding(sparse=False)",
        "eigenvalue": "use torch.func.hvp on the loss",
        "progressive_layer_drop": "skip layers in the model",
        "utils": "use zf.reductions.global_norm and zf.optim.clip_by_global_norm",
    },
    "utils": {
        "OnDevice": "build the module under torch.device('meta') or zero.Init()",
        "nvtx": "use torch.profiler.record_function",
        "groups": "use zf.split(group, inner=...) for a mesh of two axes",
        "timer": "use time.perf_counter, or torch.profiler",
        "tensor_fragment": "import the functions from utils",
        "safe_get_local_fp32_param": "use safe_get_full_fp32_param",
        "safe_get_local_grad": "use zf.vjp or zf.value_and_grad, whose gradients are values",
        "safe_get_full_grad": "use zf.vjp or zf.value_and_grad, whose gradients are values",
        "safe_get_local_optimizer_state": "read engine.state.opt_state",
        "safe_get_full_optimizer_state": "read engine.state.opt_state, with zf.unshard",
        "safe_set_local_fp32_param": "use safe_set_full_fp32_param",
        "safe_set_full_grad": "change gradients in the loss, or with zf.optim.chain",
        "safe_set_full_optimizer_state": "change engine.state with zf.redistribute",
        "get_full_hp_param": "use safe_get_full_fp32_param",
        "get_full_hp_grad": "use zf.vjp or zf.value_and_grad, whose gradients are values",
        "unset_z3_leaf_modules": "leaf modules need no mark, so there is none to remove",
    },
    "checkpointing": {
        "CheckpointFunction": "use checkpoint(function, *args)",
        "CudaRNGStatesTracker": "pass a torch.Generator to the function",
        "get_cuda_rng_tracker": "pass a torch.Generator to the function; checkpoint() restores it",
        "get_rng_tracker": "pass a torch.Generator to the function; checkpoint() restores it",
    },
    "comm": {
        "inference_all_reduce": "use all_reduce",
        "configure": "use torch.profiler, or zf.record for the bytes of each collective",
        "log_summary": "use torch.profiler, or zf.record for the bytes of each collective",
        "initialize_mesh_device": "use torch.distributed.init_device_mesh",
    },
    "moe": {
        "sharded_moe": _MOE,
        "experts": _MOE,
        "MoE": _MOE,
        "split_params_into_different_moe_groups_for_optimizer": _MOE,
    },
    "pipe": dict.fromkeys(
        ("PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology"), _PIPELINE
    ),
    "engine": {
        "compile": "call torch.compile on blocks of the model before initialize()",
        "allreduce_gradients": "call backward() and step(), which sum over the ranks",
        "forward_prologue": "call the engine",
        "set_train_batch_size": "call initialize() again with the new sizes, and load_checkpoint()",
        "set_train_micro_batch_size": (
            "pass batches of any size; write the new size into the configuration of the next run"
        ),
        "train_batch": _PIPELINE,
        "eval_batch": _PIPELINE,
        "offload_states": "write offload_optimizer and offload_param into the configuration",
        "reload_states": "write offload_optimizer and offload_param into the configuration",
        "load_universal_checkpoint": "call load_checkpoint(), which takes any number of ranks",
        "coalesce_grad_reduction": "call backward(), which sends buckets",
        "curriculum_scheduler": "order the samples with a torch sampler",
        "monitor": "log engine.get_global_grad_norm() and engine.get_lr() with your own logger",
        "flops_profiler": "use torch.profiler",
        "random_ltd_scheduler": "drop tokens in the model",
        "zenflow_step": "call step()",
        "basic_optimizer": "use engine.optimizer",
        "client_optimizer": "use engine.optimizer",
        "client_lr_scheduler": "use engine.lr_scheduler",
    },
}


def absent(module: str, known: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, which refuses names with their remedy.

    An ``AttributeError`` would lose the remedy, because ``from module import name`` replaces the
    message of an ``AttributeError`` by its own. So a name of the table raises ``OptionError``, and
    a name that DeepSpeed does not have either raises ``AttributeError``.

    Args:
        module: the module, by its path in the package; ``""`` is the package.
        known: the names that are there.
    """

    def refuse(name: str) -> Any:
        raise refusal(module, name, known)

    return refuse


def refusal(module: str, name: str, known: Mapping[str, Any]) -> Exception:
    """Return the error of a name that is not there."""
    full = f"deepspeed.{module}.{name}" if module else f"deepspeed.{name}"
    remedy = ABSENT.get(module, {}).get(name)
    if remedy is not None:
        return OptionError(
            f"zfun.interop.deepspeed has the names of DeepSpeed that train; got {full}, which is "
            f"not there; {remedy}"
        )
    near = difflib.get_close_matches(name, [one for one in known if not one.startswith("_")], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see the page 'From DeepSpeed'"
    return AttributeError(
        f"zfun.interop.deepspeed has the names of DeepSpeed that train; got {full}, which is not "
        f"there; {hint}"
    )
