"""The keys outside of ``zero_optimization``, the optimizer and the scheduler."""

from __future__ import annotations

import torch

from zfun.interop.ds_config.table._keys import (
    ANYTHING,
    COUNTS,
    DTYPE_NAME,
    FLAG,
    SECTION,
    VERSION,
    Fill,
    Key,
    count,
    ignored,
    mapped,
    optional,
    real,
    refused,
    text,
)

__all__ = ["RUN"]


def _same(name: str, words: str = "") -> Fill:
    """Fill from one field; the solver of the batch sizes finds a value that is missing."""
    return Fill((name,), lambda value: value, words or name, when_absent=True, may_miss=True)


_BATCH = (
    mapped(
        "train_batch_size",
        optional(count(1)),
        None,
        "Recipe.batch",
        "equals micro-batch size · accumulation steps · ranks; two of the numbers give the third",
        _same(
            "train_batch_size",
            "train_batch_size, or world_size · micro_batch_size · num_micro_batches",
        ),
    ),
    mapped(
        "train_micro_batch_size_per_gpu",
        optional(count(1)),
        None,
        "Recipe.batch",
        fill=_same("micro_batch_size"),
    ),
    mapped(
        "gradient_accumulation_steps",
        optional(count(1)),
        None,
        "zf.zero(num_micro_batches=)",
        fill=_same("num_micro_batches"),
    ),
    mapped(
        "gradient_clipping",
        real(0),
        1.0,
        "zf.optim.chain(zf.optim.clip_by_global_norm(...), ...)",
        "0 is no clipping; DeepSpeed before 0.19 had the default 0",
        Fill(("max_grad_norm",), float, "max_grad_norm", when_absent=True),
    ),
)

_LOSS_SCALE = "bfloat16 has the range of float32, so zfun takes no loss scale; DeepSpeed refuses it"

_PRECISION = (
    mapped(
        "fp16.enabled",
        FLAG,
        False,
        "zf.zero(precision=zf.Precision(...))",
        "parameters in float16, master weights and moments in float32",
        Fill(
            ("dtype",), lambda dtype: dtype is torch.float16, "dtype is float16", when_absent=True
        ),
    ),
    mapped(
        "fp16.loss_scale",
        real(0),
        0.0,
        "zf.Precision(loss_scale=)",
        "0 is a dynamic scale, any other number a constant",
    ),
    mapped(
        "fp16.initial_scale_power", count(0, 127), 16, "zf.optim.dynamic_loss_scale(initial=2**...)"
    ),
    mapped("fp16.loss_scale_window", count(1), 1000, "zf.optim.dynamic_loss_scale(window=)"),
    mapped(
        "fp16.hysteresis",
        count(1),
        2,
        "zf.optim.dynamic_loss_scale(hysteresis=)",
        "at every stage; DeepSpeed at stage 0 ignores it",
    ),
    mapped(
        "fp16.consecutive_hysteresis",
        FLAG,
        False,
        "zf.optim.dynamic_loss_scale(consecutive_hysteresis=)",
    ),
    mapped(
        "fp16.min_loss_scale",
        real(above=0),
        1.0,
        "zf.optim.dynamic_loss_scale(min_scale=)",
        "an overflow at the least scale raises, as in DeepSpeed",
    ),
    ignored("fp16.auto_cast", FLAG, False, "cast the batch in the loss"),
    ignored("fp16.fused_mode", FLAG, True, "there is one rule for the loss scale"),
    refused(
        "fp16.fp16_master_weights_and_grads",
        FLAG,
        False,
        "leave the key out: float16 moments lose small numbers; zfun keeps float32 master weights",
    ),
    mapped(
        "bf16.enabled",
        FLAG,
        False,
        "zf.zero(precision=zf.Precision(...))",
        "parameters in bfloat16, master weights and moments in float32",
        Fill(
            ("dtype",), lambda dtype: dtype is torch.bfloat16, "dtype is bfloat16", when_absent=True
        ),
    ),
    ignored("bf16.immediate_grad_update", FLAG, True, "gradients are reduced during backward"),
    ignored("bf16.check_grad_overflow", FLAG, True, "a step always checks the gradient's norm"),
    mapped(
        "bf16.bf16_master_weights_and_grads",
        FLAG,
        False,
        "zf.Precision(master=None)",
        "together with bf16_optimizer_states",
    ),
    mapped(
        "bf16.bf16_optimizer_states",
        FLAG,
        False,
        "zf.Precision(master=None)",
        "together with bf16_master_weights_and_grads",
    ),
    ignored("bf16.loss_scale", real(0), 0.0, _LOSS_SCALE),
    ignored("bf16.initial_scale_power", count(0), 16, _LOSS_SCALE),
    ignored("bf16.loss_scale_window", count(1), 1000, _LOSS_SCALE),
    ignored("bf16.hysteresis", count(0), 2, _LOSS_SCALE),
    ignored("bf16.min_loss_scale", real(0), 1.0, _LOSS_SCALE),
    refused(
        "amp",
        SECTION,
        None,
        "Apex is not supported, nor does DeepSpeed take it with ZeRO; write "
        '"bf16": {"enabled": true}',
    ),
    refused(
        "torch_autocast", SECTION, None, "use torch.autocast inside of the loss, and no section"
    ),
    mapped(
        "communication_data_type",
        optional(DTYPE_NAME),
        None,
        "zf.Precision(reduce=)",
        "by default the dtype of the model, as in DeepSpeed; gathers keep their dtype",
    ),
    mapped(
        "data_types.grad_accum_dtype",
        optional(DTYPE_NAME),
        None,
        "zf.Precision(reduce=)",
        "zfun sends and accumulates in one dtype, so the wider of the two counts",
    ),
    refused(
        "data_types.param_dtype", optional(DTYPE_NAME), None, "set the dtype by bf16 or fp16 alone"
    ),
    ignored(
        "data_types.buffer_dtype",
        optional(DTYPE_NAME),
        None,
        "buffers keep the dtypes of the tree that init() gets",
    ),
    ignored(
        "seq_parallel_comm_data_type",
        optional(DTYPE_NAME),
        torch.float32,
        "sequence parallelism is a function of a group in your loss",
    ),
    ignored(
        "seq_parallel_communication_data_type",
        optional(DTYPE_NAME),
        torch.float32,
        "sequence parallelism is a function of a group in your loss",
    ),
    ignored(
        "prescale_gradients", FLAG, False, "changes the order of two factors, not the mean gradient"
    ),
    ignored(
        "gradient_predivide_factor",
        real(above=0),
        1.0,
        "changes the order of two factors, not the mean gradient",
    ),
)

_ELASTIC = (
    mapped("elasticity.enabled", FLAG, False, "solve_batch()"),
    mapped("elasticity.max_train_batch_size", count(1), None, "solve_batch(max_batch)"),
    mapped("elasticity.micro_batch_sizes", COUNTS, None, "solve_batch(micro_batches)"),
    mapped("elasticity.min_gpus", count(1), 1, "solve_batch(min_ranks=)"),
    mapped("elasticity.max_gpus", count(1), 10000, "solve_batch(max_ranks=)"),
    mapped("elasticity.prefer_larger_batch", FLAG, True, "solve_batch(prefer_larger=)"),
    mapped("elasticity.version", VERSION, 0.2, "solve_batch(version=)"),
    mapped("elasticity.num_gpus_per_node", count(1), 1, "solve_batch(ranks_per_node=)"),
    mapped("elasticity.model_parallel_size", count(1), 1, "solve_batch(model_parallel=)"),
    mapped(
        "elasticity.ignore_non_elastic_batch_info",
        FLAG,
        False,
        "Recipe.batch",
        "true: elastic sizes count, and the other batch sizes do not",
    ),
    ignored("elasticity.min_time", count(0), 0, "is for a scheduler of jobs"),
)

_CHECKPOINTS = (
    mapped(
        "activation_checkpointing.cpu_checkpointing",
        FLAG,
        False,
        "Recipe.remat: zf.remat(store=zf.stores.host())",
    ),
    ignored(
        "activation_checkpointing.partition_activations",
        FLAG,
        False,
        "pass shard_over=group of the model-parallel ranks to zf.remat; without such ranks there "
        "is nothing to divide",
    ),
    ignored(
        "activation_checkpointing.contiguous_memory_optimization",
        FLAG,
        False,
        "zf.remat keeps the inputs of blocks as they are",
    ),
    ignored(
        "activation_checkpointing.number_checkpoints",
        optional(count(1)),
        None,
        "each zf.remat in the loss is one checkpoint",
    ),
    ignored(
        "activation_checkpointing.synchronize_checkpoint_boundary",
        FLAG,
        False,
        "blocks need no synchronisation",
    ),
    ignored("activation_checkpointing.profile", FLAG, False, "use zf.planner.profile"),
    ignored(
        "checkpoint.tag_validation",
        text("Ignore", "Warn", "Fail"),
        "Warn",
        "is for DeepSpeed's files",
    ),
    ignored("checkpoint.load_universal", FLAG, False, "is for DeepSpeed's files"),
    ignored("checkpoint.use_node_local_storage", FLAG, False, "is for DeepSpeed's files"),
    ignored("checkpoint.parallel_write", SECTION, None, "is for DeepSpeed's files"),
)

_LOG = "log the StepInfo that step() returns"
_SAME_RESULT = "changes how a step runs, not its result"

_OTHERS = (
    ignored("steps_per_print", optional(count(1)), None, _LOG),
    ignored("wall_clock_breakdown", FLAG, False, "use zf.planner.profile"),
    ignored("memory_breakdown", FLAG, False, "use zf.planner.live_bytes"),
    ignored("dump_state", FLAG, False, "print the recipe"),
    ignored("log_level", ANYTHING, None, _LOG),
    ignored("vocabulary_size", optional(count(1)), None, "DeepSpeed only warns about it"),
    ignored("dataloader_drop_last", FLAG, False, "the loader of batches is yours"),
    ignored("tensorboard", SECTION, None, _LOG),
    ignored("wandb", SECTION, None, _LOG),
    ignored("csv_monitor", SECTION, None, _LOG),
    ignored("comet", SECTION, None, _LOG),
    ignored("flops_profiler", SECTION, None, "use zf.planner.profile"),
    ignored("timers", SECTION, None, "use zf.planner.profile"),
    ignored("comms_logger", SECTION, None, "use zf.record(group), which counts every message"),
    ignored("autotuning", SECTION, None, "use zf.planner.explain and zf.planner.live_bytes"),
    ignored("compile", SECTION, None, "use torch.compile inside of the loss"),
    ignored("nebula", SECTION, None, "is for DeepSpeed's files"),
    ignored("datastates", SECTION, None, "is for DeepSpeed's files"),
    ignored("zero_allow_untested_optimizer", FLAG, False, "zfun probes every optimizer"),
    ignored(
        "zero_force_ds_cpu_optimizer", FLAG, True, "every optimizer runs on an offloaded state"
    ),
    ignored("graph_harvesting", FLAG, False, _SAME_RESULT),
    ignored("managed_gradient_accumulation", FLAG, True, "num_micro_batches sets the boundary"),
    ignored("use_data_before_expert_parallelism", FLAG, False, "the mesh of ranks is yours"),
    refused("disable_allgather", FLAG, False, "leave the key out: a step ends with new parameters"),
    refused(
        "sparse_gradients",
        FLAG,
        False,
        "leave the key out, and make embeddings with sparse=False: gradients are dense",
    ),
    refused(
        "gradient_allreduce_op",
        text("mean", "sum"),
        "mean",
        "leave the key out, and multiply the loss by the number of ranks",
    ),
    refused(
        "sequence_parallel_size",
        count(1),
        1,
        "leave the key out: sequence parallelism is a function of a group in your loss",
    ),
    *(
        refused(name, SECTION, None, f"leave the section out: zfun has no {words}")
        for name, words in (
            ("tensor_parallel", "tensor parallelism of its own; write it in the loss, over a mesh"),
            ("expert_parallel", "expert parallelism of its own; write it in the loss, over a mesh"),
            ("pipeline", "pipeline of stages"),
            ("sparse_attention", "attention of its own; call the kernel in the loss"),
            ("compression_training", "pruning or quantisation-aware training"),
            ("quantize_training", "quantisation-aware training"),
            ("weight_quantization", "quantised weights"),
            ("progressive_layer_drop", "layer drop of its own; drop layers in the loss"),
            ("eigenvalue", "eigenvalues of layers"),
            ("curriculum_learning", "data pipeline; order the batches yourself"),
            ("data_efficiency", "data pipeline; choose the batches yourself"),
            ("hybrid_engine", "second engine for inference"),
        )
    ),
)

RUN: tuple[Key, ...] = (*_BATCH, *_PRECISION, *_ELASTIC, *_CHECKPOINTS, *_OTHERS)
