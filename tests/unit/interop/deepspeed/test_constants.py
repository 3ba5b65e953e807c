"""Constants of DeepSpeed, and placeholders in places of values."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib
import inspect
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zfun.errors import ConfigError, OptionError
from zfun.interop import deepspeed, from_ds_config
from zfun.interop.deepspeed._placeholders import placeholder

# As in the sources of DeepSpeed 0.19.8.
KNOWN: dict[str, dict[str, Any]] = {
    "runtime.constants": {
        "ROUTE_TRAIN": "train",
        "ROUTE_ENCODE": "encode",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU": "train_micro_batch_size_per_gpu",
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT": None,
        "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "OPTIMIZER": "optimizer",
        "OPTIMIZER_PARAMS": "params",
        "OPTIMIZER_TYPE_DEFAULT": None,
        "MAX_GRAD_NORM": "max_grad_norm",
        "BFLOAT16": "bf16",
        "BFLOAT16_ENABLED": "enabled",
        "BFLOAT16_MASTER_WEIGHTS_AND_GRADS": "bf16_master_weights_and_grads",
        "FP16_LOSS_SCALE": "loss_scale",
        "FP16_INITIAL_SCALE_POWER_DEFAULT": 16,
        "FP16_MASTER_WEIGHTS_AND_GRADS": "fp16_master_weights_and_grads",
        "GRADIENT_CLIPPING_DEFAULT": 1.0,
        "GRADIENT_ALLREDUCE_OP_DEFAULT": "mean",
        "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
        "CHECKPOINT_TAG_VALIDATION_DEFAULT": "WARN",
        "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
        "PIPE_REPLICATED": "ds_pipe_replicated",
        "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT": "fp32",
    },
    "runtime.config": {
        "ADAM_OPTIMIZER": "adam",
        "MUSGD_OPTIMIZER": "musgd",
        "TORCH_ADAM_PARAM": "torch_adam",
        "ADAM_W_MODE_DEFAULT": True,
        "TENSOR_CORE_ALIGN_SIZE": 8,
        "TRAIN_BATCH_SIZE": "train_batch_size",
        "DEEPSPEED_OPTIMIZERS": [
            *("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
        ],
    },
    "runtime.engine": {"ROUTE_EVAL": "eval", "LION_OPTIMIZER": "lion"},
    "runtime.zero.config": {"ZERO_OPTIMIZATION": "zero_optimization"},
    "runtime.precision_config": {"FP16": "fp16", "BFLOAT16_OLD": "bfloat16"},
    "runtime.lr_schedules": {
        "WARMUP_LR": "WarmupLR",
        "WARMUP_MIN_LR": "warmup_min_lr",
        "WARMUP_LOG_RATE": "log",
        "ONE_CYCLE": "OneCycle",
        "LR_RANGE_TEST_STEP_RATE": "lr_range_test_step_rate",
        "DECAY_MOM_RATE": "decay_mom_rate",
    },
    "runtime.activation_checkpointing.config": {
        "ACT_CHKPT": "activation_checkpointing",
        "ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT": False,
    },
    "runtime.swap_tensor.constants": {"AIO_BLOCK_SIZE": "block_size", "AIO_QUEUE_DEPTH_DEFAULT": 8},
    "utils.config": {"TIMERS": "timers", "TIMERS_THROUGHPUT": "throughput"},
    "profiling.constants": {"FLOPS_PROFILER": "flops_profiler"},
    "comm.constants": {"NCCL_BACKEND": "nccl", "COMMS_LOGGER_PROF_OPS_DEFAULT": []},
    "constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": 29500, "CROSS_RANK": "CROSS_RANK"},
    "checkpoint.constants": {
        "PARAM_SHAPES": "param_shapes",
        "ZERO_FILE_PREFIX": "zero_pp_rank_",
        "MODEL_FILE_SUFFIX": "_model_states.pt",
        "CHECKPOINT_TP_DEGREE": "tp_degree",
        "AFFINE_MAP_PARAMS": "params",
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
    },
}


def module_of(path: str) -> Any:
    return importlib.import_module(f"zfun.interop.deepspeed.{path}")


@pytest.mark.shows(
    "constants, such as those of `deepspeed.runtime.constants`", "right", "their values"
)
@pytest.mark.parametrize("path", KNOWN)
def test_constants_have_the_values_of_deepspeed(path: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from zfun.interop.deepspeed.{path} import {', '.join(KNOWN[path])}", names)
    assert {name: names[name] for name in KNOWN[path]} == KNOWN[path]
    if path not in ("runtime.engine", "constants"):  # the package, whose __all__ has no constants
        every: dict[str, Any] = {}
        exec(f"from zfun.interop.deepspeed.{path} import *", every)
        assert KNOWN[path].keys() <= every.keys()


@pytest.mark.slow
def test_every_constant_has_the_value_of_the_source(deepspeed_source: Path) -> None:
    count = 0
    for path in KNOWN.keys() - {"runtime.engine"}:
        source = deepspeed_source.joinpath(*path.split(".")).with_suffix(".py")
        values = {
            ast.unparse(node.targets[0]): node.value.value
            for node in ast.parse(source.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for name, value in values.items():
            if name.isupper() and not name.startswith("_") and not name.endswith("_FORMAT"):
                found = getattr(module_of(path), name)
                if not hasattr(type(found), "_raise"):
                    count += 1
                    assert found == value, (path, name)
    assert count > 200


@pytest.mark.parametrize("stage", [0, 2])
def test_a_configuration_by_constants_is_the_one_by_strings(stage: int) -> None:
    keys, zero = module_of("runtime.constants"), module_of("runtime.zero.config")
    schedules = module_of("runtime.lr_schedules")
    config = {
        keys.TRAIN_MICRO_BATCH_SIZE_PER_GPU: 2,
        keys.GRADIENT_ACCUMULATION_STEPS: 4,
        keys.GRADIENT_CLIPPING: 0.5,
        keys.OPTIMIZER: {keys.TYPE: deepspeed.ADAM_OPTIMIZER, keys.OPTIMIZER_PARAMS: {"lr": 0.1}},
        keys.SCHEDULER: {
            keys.TYPE: schedules.WARMUP_LR,
            keys.SCHEDULER_PARAMS: {schedules.WARMUP_NUM_STEPS: 4},
        },
        zero.ZERO_OPTIMIZATION: {"stage": stage},
        keys.BFLOAT16: {keys.BFLOAT16_ENABLED: True},
    }
    engine: Any = deepspeed.initialize(model=nn.Linear(2, 1), config=config)[0]
    assert engine.gradient_accumulation_steps() == 4
    assert engine.gradient_clipping() == 0.5
    assert engine.zero_optimization_stage() == stage
    assert engine.optimizer_name() == "adam"
    assert type(engine.lr_scheduler) is schedules.WarmupLR
    assert engine.bfloat16_enabled()


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({3: 4}, "3"),
        ({"zero_optimization": {None: 2}}, r"zero_optimization\.None"),
        ({"optimizer": {"type": "SGD", "params": {("lr",): 1}}}, r"optimizer\.params\.\('lr',\)"),
        ({deepspeed.zero.TiledLinear: 1}, "<class .*TiledLinear'>"),
    ],
)
def test_a_key_that_is_no_string_is_a_mistake(config: Any, path: str) -> None:
    with pytest.raises(ConfigError, match=rf"\n- {path}: a key is a string; got "):
        from_ds_config(config)


# Constants that are not there: of a module of placeholders, and beside others that are there.
ABSENT = [
    (module_of("autotuning.constants").DS_CONFIG, "planner.plan"),
    (module_of("runtime.data_pipeline.constants").CURRICULUM_LEARNING, "torch sampler"),
    (module_of("runtime.constants").FP16_FORMAT, "write the options into the configuration"),
    (module_of("checkpoint.constants").AUTOEP_LAYERS_KEY, "engine.load_checkpoint"),
]


@pytest.mark.shows(
    "constants that are not there",
    "refused",
    "when they are compared, hashed, formatted or tested; they import",
)
@pytest.mark.parametrize(("absent", "remedy"), ABSENT)
def test_a_constant_that_is_not_there_raises_where_a_value_would_do(
    absent: Any, remedy: str
) -> None:
    uses: list[Any] = [
        lambda: absent == "text",
        lambda: absent != "text",
        lambda: "text" == absent,  # noqa: SIM300
        lambda: absent in ["text"],
        lambda: absent in {"text": 1},
        lambda: "text" in absent,
        lambda: {absent: 1},
        lambda: {"text": 1}.get(absent, 2),
        lambda: {absent},
        lambda: f"{absent}",
        lambda: f"{absent:>4}",
        lambda: str(absent),
        lambda: "%s" % absent,  # noqa: UP031
        lambda: absent + "text",
        lambda: "text" + absent,
        lambda: absent or "text",
        lambda: not absent,
        lambda: list(absent),
        lambda: len(absent),
        lambda: absent < 3,
        lambda: range(absent),
        lambda: float(absent),
        lambda: isinstance("text", absent),
        lambda: issubclass(str, absent),
        lambda: Path(absent),
        lambda: absent.lower,
        absent,
    ]
    for use in uses:
        with pytest.raises(OptionError, match=remedy):
            use()


def test_tools_that_walk_over_a_module_pass_a_constant_that_is_not_there() -> None:
    absent = ABSENT[0][0]
    script = types.ModuleType("script")
    script.__dict__.update(DS_CONFIG=absent, Own=deepspeed.zero.TiledLinear)
    assert absent is module_of("autotuning.constants").DS_CONFIG
    assert "DS_CONFIG" in repr(absent)
    assert copy.deepcopy([absent])[0] is absent
    assert dict(inspect.getmembers(script))["DS_CONFIG"] is absent
    assert doctest.DocTestFinder().find(script) == []
    assert inspect.unwrap(absent) is absent
    assert not inspect.isroutine(absent)
    assert not isinstance(absent, (str, nn.Module, typing.Mapping))


def test_a_class_that_is_not_there_stands_in_annotations_and_sets() -> None:
    absent = deepspeed.zero.DeepSpeedZeroOptimizer
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert type(optimizer) not in {absent, torch.optim.Adam}
    assert type(optimizer) not in (absent,)

    def step(optimizer: absent | None, others: list[absent]) -> None: ...

    hints = typing.get_type_hints(step, localns={"absent": absent})
    assert absent in typing.get_args(hints["optimizer"])
    assert typing.get_args(typing.Optional[absent])[0] is absent  # noqa: UP045
    with pytest.raises(OptionError, match=r"engine\.optimizer"):
        bool(absent)


def test_the_supported_optimizers_are_those_of_deepspeed() -> None:
    utils = module_of("runtime.zero.utils")
    params = [nn.Parameter(torch.zeros(2))]
    assert utils.is_zero_supported_optimizer(deepspeed.ops.FusedAdam(params))
    assert torch.optim.Adagrad in utils.ZERO_SUPPORTED_OPTIMIZERS
    assert not utils.is_zero_supported_optimizer(torch.optim.SGD(params, lr=0.1))


def test_one_placeholder_stands_for_a_name() -> None:
    assert placeholder("a.SOME", "remedy") is placeholder("a.SOME", "remedy")
