"""The strings and numbers that modules of DeepSpeed have as constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

# By module and by the beginning of names: NAME is its own name in lower case, or the text after a
# colon, and NAME_DEFAULT is the value after "=", as Python writes it.
_TABLE: Mapping[str, Mapping[str, str]] = {
    "runtime.constants": {
        "": (
            "TRAIN_BATCH_SIZE=None OPTIMIZER OPTIMIZER_PARAMS:params TYPE LEGACY_FUSION=False "
            "SCHEDULER SCHEDULER_PARAMS:params MAX_GRAD_NORM ZERO_ALLOW_UNTESTED_OPTIMIZER=False "
            "ZERO_FORCE_DS_CPU_OPTIMIZER=True STEPS_PER_PRINT=None "
            "TRAIN_MICRO_BATCH_SIZE_PER_GPU=None GRADIENT_ACCUMULATION_STEPS=None "
            "MANAGED_GRADIENT_ACCUMULATION=True BFLOAT16:bf16 BFLOAT16_OLD:bfloat16 "
            "CHECK_OVERFLOW BFLOAT16_MASTER_WEIGHTS_AND_GRADS:bf16_master_weights_and_grads=False "
            "BFLOAT16_OPTIMIZER_STATES:bf16_optimizer_states=False DDP_BFLOAT16:ddp_bf16 FP16 "
            "FP16_MASTER_WEIGHTS_AND_GRADS=False TORCH_AUTOCAST GRADIENT_CLIPPING=1.0 "
            "COMMUNICATION_DATA_TYPE=None SEQ_PARALLEL_COMMUNICATION_DATA_TYPE='fp32' "
            "PRESCALE_GRADIENTS=False GRADIENT_PREDIVIDE_FACTOR=1.0 GRADIENT_ALLREDUCE_OP='mean' "
            "DISABLE_ALLGATHER=False DUMP_STATE=False DISABLE_PYTHON_GC=False "
            "VOCABULARY_SIZE=None WALL_CLOCK_BREAKDOWN=False MEMORY_BREAKDOWN=False CHECKPOINT "
            "LOAD_UNIVERSAL_CHECKPOINT:load_universal=False "
            "USE_NODE_LOCAL_STORAGE_CHECKPOINT:use_node_local_storage=False "
            "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE:pipeline_stage=False DATA_TYPES "
            "GRAD_ACCUM_DTYPE=None PARAM_DTYPE=None BUFFER_DTYPE=None KEEP_IN_FP32_MODULES='auto' "
            "DATALOADER_DROP_LAST=False PIPE_REPLICATED:ds_pipe_replicated DATA_PARALLEL_GROUP "
            "GLOBAL_RANK LOG_LEVEL=None "
            "USE_DATA_BEFORE_EXPERT_PARALLEL:use_data_before_expert_parallelism=False"
        ),
        "ROUTE_": "TRAIN EVAL PREDICT ENCODE",
        "BFLOAT16_": "ENABLED=False IMMEDIATE_GRAD_UPDATE=True",
        "FP16_": (
            "ENABLED=False LOSS_SCALE=0 AUTO_CAST=False INITIAL_SCALE_POWER=16 "
            "LOSS_SCALE_WINDOW=1000 HYSTERESIS=2 CONSECUTIVE_HYSTERESIS=False MIN_LOSS_SCALE=1"
        ),
        "TORCH_AUTOCAST_": "ENABLED=False DTYPE LOWER_PRECISION_SAFE_MODULES",
        "GRADIENT_ALLREDUCE_OP_": "MEAN SUM",
        "CHECKPOINT_": "TAG_VALIDATION='WARN' PARALLEL_WRITE",
    },
    "runtime.config": {
        "": "EXPERT_PARALLEL TORCH_ADAM_PARAM:torch_adam ADAM_W_MODE=True ZERO_OPTIMIZATION",
    },
    "runtime.precision_config": {"": "BFLOAT16:bf16 BFLOAT16_OLD:bfloat16 FP16"},
    "runtime.lr_schedules": {
        "": (
            "LR_SCHEDULE LR_RANGE_TEST:LRRangeTest ONE_CYCLE:OneCycle WARMUP_LR:WarmupLR "
            "WARMUP_DECAY_LR:WarmupDecayLR WARMUP_COSINE_LR:WarmupCosineLR EDGE_VALUE MID_VALUE "
            "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
            "LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT "
            "CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR "
            "CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR "
            "WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE:log "
            "WARMUP_LINEAR_RATE:linear WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS"
        ),
    },
    "runtime.activation_checkpointing.config": {
        "": "ACT_CHKPT:activation_checkpointing",
        "ACT_CHKPT_": (
            "PARTITION_ACTIVATIONS=False NUMBER_CHECKPOINTS=None PROFILE=False "
            "CONTIGUOUS_MEMORY_OPTIMIZATION=False SYNCHRONIZE_CHECKPOINT_BOUNDARY=False "
            "CPU_CHECKPOINTING=False"
        ),
    },
    "runtime.swap_tensor.constants": {
        "": "AIO",
        "AIO_": (
            "BLOCK_SIZE=1048576 QUEUE_DEPTH=8 INTRA_OP_PARALLELISM=1 SINGLE_SUBMIT=False "
            "OVERLAP_EVENTS=True USE_GDS=False"
        ),
    },
    "utils.config": {"": "TIMERS", "TIMERS_": "THROUGHPUT"},
    "profiling.constants": {
        "": "FLOPS_PROFILER",
        "FLOPS_PROFILER_": (
            "ENABLED=False RECOMPUTE_FWD_FACTOR=0.0 PROFILE_STEP=1 MODULE_DEPTH=-1 TOP_MODULES=1 "
            "DETAILED=True OUTPUT_FILE=None"
        ),
    },
    "comm.constants": {
        "": (
            "NCCL_BACKEND:nccl CCL_BACKEND:ccl MPI_BACKEND:mpi GLOO_BACKEND:gloo SCCL_BACKEND:sccl "
            "HCCL_BACKEND:hccl DEFAULT_AML_MASTER_PORT:54965 COMMS_LOGGER "
            "DEFAULT_AML_NCCL_SOCKET_IFNAME:^docker0,lo"
        ),
        "COMMS_LOGGER_": "ENABLED=False VERBOSE=False PROF_ALL=True DEBUG=False PROF_OPS=[]",
    },
    "constants": {
        "": (
            "INFERENCE_GENERIC_MODE:generic INFERENCE_SPECIALIZED_MODE:specialized "
            "CROSS_RANK:CROSS_RANK CROSS_SIZE:CROSS_SIZE LOCAL_RANK:LOCAL_RANK"
        ),
    },
    "checkpoint.constants": {
        "": (
            "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE "
            "BASE_OPTIMIZER_STATE_STEP SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS "
            "PARAM_ALIGNMENT_PADDINGS PARTITION_COUNT ZERO_STAGE CLIP_GRAD FP32_WEIGHT_KEY:fp32 "
            "LOSS_SCALER PARAM PARAM_SHAPES BUFFER_NAMES FROZEN_PARAM_SHAPES "
            "FROZEN_PARAM_FRAGMENTS MODEL_FILE_PREFIX:mp_rank_ ZERO_FILE_PREFIX:zero_pp_rank_ "
            "OPTIM_FILE_SUFFIX:_optim_states.pt MODEL_FILE_SUFFIX:_model_states.pt "
            "LAYER_FILE_PREFIX:layer_ BF16_ZERO_FILE_PREFIX:bf16_zero_pp_rank_ "
            "FP16_ZERO_FILE_PREFIX:fp16_zero_pp_rank_ "
            "CHECKPOINT_PARALLEL_DIMS:checkpoint_parallel_dimensions DS_VERSION "
            "UNIVERSAL_CHECKPOINT_INFO "
            "UNIVERSAL_CHECKPOINT_VERSION_KEY:universal_checkpoint_version "
            "DS_AUTOTP_UC_META:ds_autotp_universal_checkpoint_meta DS_AUTOEP_UC_META "
            "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS AFFINE_MAP VOCAB_TENSOR PADDED_VOCAB_SIZE "
            "ORIGINAL_VOCAB_SIZE PARAM_SLICE_MAPPINGS CAT_DIM PARAM_N_SUB_PARAMS SUB_PARAM_SHAPE "
            "VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
            "PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS "
            "TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
            "PARAMETER_WITH_SUB_PARAMS SUB_PARAM_SHARD_WIDTHS SUB_PARAMS_SHAPE "
            "EXPERT_PARAMETER_PATTERNS EP_IS_EXPERT_PARAM:is_expert_param EP_NUM_EXPERTS"
        ),
        "CHECKPOINT_": "PP_DEGREE TP_DEGREE",
        "AFFINE_MAP_": "VERSION PARAMS",
    },
}
_OPTIMIZERS = ["adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon"]
# Constants that are lists or numbers, and defaults of constants that are not there.
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "runtime.constants": {
        **dict.fromkeys(("OPTIMIZER_TYPE_DEFAULT", "SCHEDULER_TYPE_DEFAULT")),
        "BFLOAT16_CHECK_OVERFLOW_DEFAULT": False,
        "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"),
        "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
    },
    "runtime.config": {
        **{f"{name.upper()}_OPTIMIZER": name for name in _OPTIMIZERS},
        "DEEPSPEED_OPTIMIZERS": _OPTIMIZERS,
        "TENSOR_CORE_ALIGN_SIZE": 8,
    },
    "constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": 29500},
    "checkpoint.constants": {"UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4},
}


def constants_of(*modules: str) -> dict[str, Any]:
    """Return by name the constants of modules, by their paths in DeepSpeed.

    Example:
        >>> keys = constants_of("runtime.constants")
        >>> keys["FP16_LOSS_SCALE_WINDOW"], keys["FP16_LOSS_SCALE_WINDOW_DEFAULT"]
        ('loss_scale_window', 1000)
    """
    found: dict[str, Any] = {}
    for module in modules:
        for start, words in _TABLE.get(module, {}).items():
            for word in words.split():
                found.update(_read(start, word))
        found |= _OTHERS.get(module, {})
    return found


def _read(start: str, word: str) -> Iterator[tuple[str, Any]]:
    word, _, default = word.partition("=")
    name, _, text = word.partition(":")
    yield f"{start}{name}", text or name.lower()
    if default:
        yield f"{start}{name}_DEFAULT", ast.literal_eval(default)
