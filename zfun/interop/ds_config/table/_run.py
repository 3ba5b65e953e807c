"""The keys outside of ``zero_optimization``, the optimizer and the scheduler."""

from __future__ import annotations

import math

import torch

from zfun.interop.ds_config.table._keys import (
    ANYTHING,
    COUNTS,
    DTYPE_NAME,
    Fill,
    Form,
    Key,
    count,
    filled,
    ignored,
    mapped,
    optional,
    real,
    refused,
    section,
    text,
)
from zfun.options import Kind, each, one_of

_DTYPE = optional(DTYPE_NAME)
_VERSION = Form(
    Kind(lambda x: type(x) in (float, str) and str(x) in ("0.1", "0.2"), ("0.1", "0.2"), "0.2"),
    float,
)
# accelerate writes infinity for "never".
_STEPS = Form(
    count(1).kind | Kind(lambda x: x == math.inf, ("infinity",), "10") | None,
    lambda x: x if x in (None, math.inf) else int(x),
)
_NAMES = Form(each(Kind(lambda x: isinstance(x, str), ("a name",), ""), "a list of names", "[]"))
_PATTERNS = Form(_NAMES.kind | one_of("auto"))


def _same(name: str, words: str = "") -> Fill:
    """Fill from one field; the solver of the batch sizes finds a value that is missing."""
    return filled(name, words=words)._replace(may_miss=True)


def _is(dtype: torch.dtype) -> Fill:
    return filled("dtype", lambda given: given is dtype, f"dtype is {str(dtype)[6:]}")


# fmt: off
_BATCH = (
    mapped("train_batch_size", None, "Recipe.batch", optional(count(1)),
        "equals micro-batch size · accumulation steps · ranks; two of the numbers give the third",
        _same("train_batch_size",
            "train_batch_size, or world_size · micro_batch_size · num_micro_batches")),
    mapped("train_micro_batch_size_per_gpu", None, "Recipe.batch", optional(count(1)),
        fill=_same("micro_batch_size")),
    mapped("gradient_accumulation_steps", None, "zf.zero(num_micro_batches=)", optional(count(1)),
        fill=_same("num_micro_batches")),
    mapped("gradient_clipping", 1.0, "zf.optim.chain(zf.optim.clip_by_global_norm(...), ...)",
        real(0), "0 is no clipping; DeepSpeed before 0.19 had the default 0",
        filled("max_grad_norm", float)),
)

_NO_LOSS_SCALE = (
    "bfloat16 has the range of float32, so zfun takes no loss scale; DeepSpeed refuses it"
)
_FP16 = section("fp16",
    mapped("enabled", False, "zf.zero(precision=zf.Precision(...))",
        why="parameters in float16, master weights and moments in float32",
        fill=_is(torch.float16)),
    mapped("loss_scale", 0.0, "zf.Precision(loss_scale=)", real(0),
        "0 is a dynamic scale, any other number a constant"),
    mapped("initial_scale_power", 16, "zf.optim.dynamic_loss_scale(initial=2**...)", count(0, 127)),
    mapped("loss_scale_window", 1000, "zf.optim.dynamic_loss_scale(window=)", count(1)),
    mapped("hysteresis", 2, "zf.optim.dynamic_loss_scale(hysteresis=)", count(1),
        "at every stage; DeepSpeed at stage 0 ignores it"),
    mapped("consecutive_hysteresis", False, "zf.optim.dynamic_loss_scale(consecutive_hysteresis=)"),
    mapped("min_loss_scale", 1.0, "zf.optim.dynamic_loss_scale(min_scale=)", real(above=0),
        "an overflow at the least scale raises, as in DeepSpeed"),
    ignored("auto_cast", False,
        "by zf.zero, which casts the batch; deepspeed.initialize obeys: positional arguments"),
    ignored("fused_mode", True, "there is one rule for the loss scale"),
    refused("fp16_master_weights_and_grads", False,
        "leave the key out: float16 moments lose small numbers; zfun keeps float32 master weights"),
)
_BF16 = section("bf16",
    mapped("enabled", False, "zf.zero(precision=zf.Precision(...))",
        why="parameters in bfloat16, master weights and moments in float32",
        fill=_is(torch.bfloat16)),
    ignored("immediate_grad_update", True, "gradients are reduced during backward"),
    ignored("check_grad_overflow", True, "a step always checks the gradient's norm"),
    mapped("bf16_master_weights_and_grads", False, "zf.Precision(master=None)",
        why="together with bf16_optimizer_states"),
    mapped("bf16_optimizer_states", False, "zf.Precision(master=None)",
        why="together with bf16_master_weights_and_grads"),
    ignored("loss_scale", 0.0, _NO_LOSS_SCALE, real(0)),
    ignored("initial_scale_power", 16, _NO_LOSS_SCALE, count()),
    ignored("loss_scale_window", 1000, _NO_LOSS_SCALE, count(1)),
    ignored("hysteresis", 2, _NO_LOSS_SCALE, count()),
    ignored("min_loss_scale", 1.0, _NO_LOSS_SCALE, real(0)),
)
_SEQUENCE = "activations between the ranks of a sequence have the dtype of the model"
_SAME_MEAN = "changes the order of two factors, not the mean gradient"
_DTYPES = (
    refused("amp", None, "Apex is not supported, nor does DeepSpeed take it with ZeRO; write "
        '"bf16": {"enabled": true}'),
    *section("torch_autocast",
        mapped("enabled", False, "Recipe.autocast", why="torch.autocast around the loss"),
        mapped("dtype", None, "Recipe.autocast", _DTYPE),
        ignored("lower_precision_safe_modules", None,
            "gradients are sent in float32, because autocast leaves parameters in float32",
            optional(_NAMES)),
    ),
    mapped("communication_data_type", None, "zf.Precision(reduce=)", _DTYPE,
        "by default the dtype of the model, as in DeepSpeed; gathers keep their dtype"),
    mapped("data_types.grad_accum_dtype", None, "zf.Precision(reduce=)", _DTYPE,
        "zfun sends and accumulates in one dtype, so the wider of the two counts"),
    refused("data_types.param_dtype", None, "set the dtype by bf16 or fp16 alone", _DTYPE),
    ignored("data_types.buffer_dtype", None,
        "by zf.zero, where buffers keep the dtypes of the tree that init() gets; "
        "deepspeed.initialize obeys", _DTYPE),
    ignored("data_types.keep_in_fp32_modules", "auto",
        "by zf.zero, as buffer_dtype is; deepspeed.initialize obeys: patterns of the names of "
        "buffers, by default those of transformers", _PATTERNS),
    ignored("seq_parallel_comm_data_type", torch.float32, _SEQUENCE, _DTYPE),
    ignored("seq_parallel_communication_data_type", torch.float32, _SEQUENCE, _DTYPE),
    ignored("prescale_gradients", False, _SAME_MEAN),
    ignored("gradient_predivide_factor", 1.0, _SAME_MEAN, real(above=0)),
)

_ELASTIC = section("elasticity",
    mapped("enabled", False, "solve_batch()"),
    mapped("max_train_batch_size", None, "solve_batch(max_batch)", count(1)),
    mapped("micro_batch_sizes", None, "solve_batch(micro_batches)", COUNTS),
    mapped("min_gpus", 1, "solve_batch(min_ranks=)", count(1)),
    mapped("max_gpus", 10000, "solve_batch(max_ranks=)", count(1)),
    mapped("prefer_larger_batch", True, "solve_batch(prefer_larger=)"),
    mapped("version", 0.2, "solve_batch()", _VERSION, "0.1: without ranks_per_node="),
    mapped("num_gpus_per_node", 1, "solve_batch(ranks_per_node=)", count(1)),
    mapped("model_parallel_size", 1, "solve_batch(model_parallel=)", count(1)),
    mapped("ignore_non_elastic_batch_info", False, "Recipe.batch",
        why="true: elastic sizes count, and the other batch sizes do not"),
    ignored("min_time", 0, "is for a scheduler of jobs", count()),
)

_FILES = "is for DeepSpeed's files"
_CHECKPOINTS = (
    *section("activation_checkpointing",
        mapped("cpu_checkpointing", False, "Recipe.remat: zf.remat(store=zf.stores.host())"),
        ignored("partition_activations", False,
            "pass shard_over=group of the model-parallel ranks to zf.remat; without such ranks "
            "there is nothing to divide"),
        ignored("contiguous_memory_optimization", False,
            "zf.remat keeps the inputs of blocks as they are"),
        ignored("number_checkpoints", None, "each zf.remat in the loss is one checkpoint",
            optional(count(1))),
        ignored("synchronize_checkpoint_boundary", False, "blocks need no synchronisation"),
        ignored("profile", False, "use zf.planner.profile"),
    ),
    *section("checkpoint",
        ignored("tag_validation", "Warn", _FILES, text("Ignore", "Warn", "Fail")),
        ignored("load_universal", False, _FILES),
        ignored("use_node_local_storage", False, _FILES),
        ignored("parallel_write", None, _FILES),
        ignored("writer", None, _FILES),
    ),
)

_IN_MODULE = "is an argument of deepspeed.pipe.PipelineModule; DeepSpeed ignores the key"
_PIPELINE = section("pipeline",
    mapped("activation_checkpoint_interval", 0, "PipelineModule(activation_checkpoint_interval=)",
        count(), "for a PipelineModule that deepspeed.initialize gets"),
    ignored("stages", "auto", _IN_MODULE, ANYTHING),
    ignored("partition", "best", _IN_MODULE, ANYTHING),
    ignored("seed_layers", False, _IN_MODULE),
    ignored("pipe_partitioned", True, "activations go whole"),
    ignored("grad_partitioned", True, "cotangents go whole"),
    ignored("use_reentrant", True, "blocks are recomputed in one way"),
)

_OF_PLAN = "zf.interop.transformers.tp_plan(model), or your plan, says how matrices are cut"
_AXES = (
    mapped("sequence_parallel_size", 1, "Recipe.sequence", count(1),
        "the group of recipe.zero() has this many ranks for each batch; other adapters refuse it"),
    *section("tensor_parallel",
        mapped("autotp_size", 0, "Recipe.tensor", count(),
            "the loss of recipe.zero() is of zf.tensor_parallel(); other adapters refuse it"),
        ignored("tp_overlap_comm", False, "changes how a step runs, not its result"),
        ignored("tp.tp_size", 1, "autotp_size counts, in DeepSpeed too", count(1)),
        ignored("tp.tp_grain_size", 1, _OF_PLAN, count(1)),
        ignored("preset_model", None, _OF_PLAN, ANYTHING),
        ignored("partition_config", None, _OF_PLAN, ANYTHING),
    ),
)

_LOG = "log the StepInfo that step() returns"
_PROFILE = "use zf.planner.profile"
_OTHERS = (
    ignored("steps_per_print", None, _LOG, _STEPS),
    ignored("wall_clock_breakdown", False, _PROFILE),
    ignored("memory_breakdown", False, "use zf.planner.live_bytes"),
    ignored("dump_state", False, "print the recipe"),
    ignored("log_level", None, _LOG, ANYTHING),
    ignored("vocabulary_size", None, "DeepSpeed only warns about it", optional(count(1))),
    ignored("dataloader_drop_last", False,
        "by zf.zero, which has no loader; the one of deepspeed.initialize obeys"),
    *(ignored(name, None, _LOG) for name in ("tensorboard", "wandb", "csv_monitor", "comet")),
    ignored("flops_profiler", None, _PROFILE),
    ignored("timers", None, _PROFILE),
    ignored("comms_logger", None, "use zf.record(group), which counts every message"),
    ignored("autotuning", None, "use zf.planner.explain and zf.planner.live_bytes"),
    ignored("compile", None, "use torch.compile inside of the loss"),
    ignored("nebula", None, _FILES),
    ignored("datastates", None, _FILES),
    ignored("zero_allow_untested_optimizer", False, "zfun probes every optimizer"),
    ignored("zero_force_ds_cpu_optimizer", True, "every optimizer runs on an offloaded state"),
    ignored("graph_harvesting", False, "changes how a step runs, not its result"),
    ignored("managed_gradient_accumulation", True,
        "by zf.zero, where num_micro_batches sets the boundary; deepspeed.initialize obeys"),
    ignored("use_data_before_expert_parallelism", False, "the mesh of ranks is yours"),
    refused("disable_allgather", False, "leave the key out: a step ends with new parameters"),
    refused("sparse_gradients", False,
        "leave the key out, and make embeddings with sparse=False: gradients are dense"),
    refused("gradient_allreduce_op", "mean",
        "leave the key out, and multiply the loss by the number of ranks", text("mean", "sum")),
    refused("expert_parallel", None,
        "leave the section out, and cut the experts by zf.parallel.expert_parallel(loss, axis)"),
    *(
        refused(name, None, f"leave the section out: zfun has no {words}")
        for name, words in (
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

RUN: tuple[Key, ...] = (
    *_BATCH, *_FP16, *_BF16, *_DTYPES, *_ELASTIC, *_CHECKPOINTS, *_PIPELINE, *_AXES, *_OTHERS
)
