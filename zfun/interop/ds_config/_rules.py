"""The rules about several keys together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zfun.interop.ds_config._mistakes import Mistake, mistake
from zfun.interop.ds_config._values import Checked, Unusable, Values
from zfun.interop.ds_config.table import kind_of, torch_options

_Z = "zero_optimization"
_PARAM, _OPT = f"{_Z}.offload_param", f"{_Z}.offload_optimizer"
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# The parameters that a schedule cannot do without.
_NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}

# A rule yields for each mistake the key, the rule in words, the value and the remedy.
_Found = Iterator[tuple[str, str, Any, str]]
_Rule = Callable[[Values, Mapping[str, Any]], _Found]


def contradictions(checked: Checked) -> list[Mistake]:
    """Return the mistakes of keys that do not go together.

    A rule that reads a key with a mistake says nothing.
    """
    mistakes: list[Mistake] = []
    for rule in _RULES:
        try:
            mistakes.extend(mistake(*one) for one in rule(checked.values, checked.given))
        except Unusable:
            continue
    return mistakes


def _one_dtype(v: Values, given: Mapping[str, Any]) -> _Found:
    if v["fp16.enabled"] and v["bf16.enabled"]:
        got = "fp16 and bf16 enabled"
        yield "fp16.enabled", "a run has one dtype", got, "disable one of the two"


def _autocast(v: Values, given: Mapping[str, Any]) -> _Found:
    if not v["torch_autocast.enabled"]:
        return
    if v["torch_autocast.dtype"] is None:
        rule = "autocast names its dtype, because torch's default differs by device"
        yield "torch_autocast.dtype", rule, None, 'write "dtype": "bfloat16"'
    for half in ("fp16", "bf16"):
        if f"{half}.enabled" in given and v[f"{half}.enabled"]:
            rule = "autocast keeps parameters in float32"
            yield f"{half}.enabled", rule, "torch_autocast beside it", "disable one of the two"


def _bf16_states(v: Values, given: Mapping[str, Any]) -> _Found:
    master, states = v["bf16.bf16_master_weights_and_grads"], v["bf16.bf16_optimizer_states"]
    if v["bf16.enabled"] and master is not states:
        yield (
            "bf16.bf16_master_weights_and_grads",
            "master weights and moments have one dtype",
            f"{str(master).lower()}, with bf16_optimizer_states {str(states).lower()}",
            "set both or neither",
        )


def _stage_of(section: str, rule: str, stages: tuple[int, ...], write: str) -> _Rule:
    def offload(v: Values, given: Mapping[str, Any]) -> _Found:
        device, stage = v[f"{section}.device"], v[f"{_Z}.stage"]
        if device != "none" and stage not in stages:
            remedy = f'write "stage": {write}, or leave {section.rpartition(".")[2]} out'
            yield f"{section}.device", rule, f"{device} at stage {stage}", remedy

    return offload


def _path_of(section: str) -> _Rule:
    def nvme(v: Values, given: Mapping[str, Any]) -> _Found:
        if v[f"{section}.device"] == "nvme" and v[f"{section}.nvme_path"] is None:
            remedy = 'write "nvme_path": "/local_nvme", or another directory on the disk'
            yield f"{section}.nvme_path", "nvme needs a directory", None, remedy

    return nvme


def _one_call(v: Values, given: Mapping[str, Any]) -> _Found:
    block, depth = v["aio.block_size"], v["aio.queue_depth"]
    if block * depth > 2**30:
        rule = "block_size · queue_depth is at most 2**30"
        yield "aio.block_size", rule, f"{block} · {depth}", "make one smaller"


def _stage_3_only(v: Values, given: Mapping[str, Any]) -> _Found:
    stage = v[f"{_Z}.stage"]
    for name, least in (
        ("zero_quantized_weights", 1),
        ("zero_hpz_partition_size", 2),
        ("mics_shard_size", 1),
    ):
        if stage != 3 and v[f"{_Z}.{name}"] >= least:
            got = f"{given.get(f'{_Z}.{name}')} at stage {stage}"
            yield f"{_Z}.{name}", "is for stage 3", got, 'write "stage": 3, or leave the key out'


def _one_mesh(v: Values, given: Mapping[str, Any]) -> _Found:
    hpz, mics = v[f"{_Z}.zero_hpz_partition_size"], v[f"{_Z}.mics_shard_size"]
    if hpz > 1 and mics > 0:
        rule = "MiCS shards within rows of ranks, hpZ over all ranks"
        got = f"{mics}, with zero_hpz_partition_size {hpz}"
        yield f"{_Z}.mics_shard_size", rule, got, "leave one of the two out"


def _onebit(v: Values, given: Mapping[str, Any]) -> _Found:
    if kind_of("optimizer", given.get("optimizer.type")) != "OneBitAdam":
        return
    if v[f"{_Z}.stage"] == 3:
        rule = "1-bit Adam keeps whole errors on every rank, so it is for stages 0 to 2"
        yield "optimizer.type", rule, "OneBitAdam at stage 3", 'write "stage": 2, or "AdamW"'
    clip = given.get("gradient_clipping", 0)
    if clip != 0 and v["gradient_clipping"] > 0:
        rule = "1-bit Adam gets the terms of the gradient, whose norm nobody knows"
        yield "gradient_clipping", rule, clip, 'write "gradient_clipping": 0'


def _constant_betas(v: Values, given: Mapping[str, Any]) -> _Found:
    kind = kind_of("optimizer", given.get("optimizer.type"))
    is_cycle = kind_of("scheduler", given.get("scheduler.type")) == "OneCycle"
    path = "scheduler.params.cycle_momentum"
    if is_cycle and "betas" in torch_options(kind) and v[path]:
        remedy = 'write false, or "type": "AdamW" for the optimizer'
        yield path, f"torch's {kind} has constant betas, which a cycle changes", True, remedy


def _elastic(v: Values, given: Mapping[str, Any]) -> _Found:
    if not v["elasticity.enabled"]:
        return
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if v[f"elasticity.{name}"] is None:
            yield f"elasticity.{name}", "an elastic batch needs the key", None, "write the key"
    for name in _SIZES:
        if name in given and not v["elasticity.ignore_non_elastic_batch_info"]:
            remedy = 'leave the key out, or write "ignore_non_elastic_batch_info": true'
            yield name, "the elastic batch sets the sizes", given[name], remedy


def _needed(name: str) -> _Rule:
    def schedule(v: Values, given: Mapping[str, Any]) -> _Found:
        kind = kind_of("scheduler", given.get("scheduler.type"))
        if name in _NEEDED.get(kind or "", ()) and v[f"scheduler.params.{name}"] is None:
            field = " or pass num_steps=" if name == "total_num_steps" else ""
            path = f"scheduler.params.{name}"
            yield path, "the schedule needs the key", None, f"write the key{field}"

    return schedule


_RULES = (
    _one_dtype,
    _autocast,
    _bf16_states,
    _stage_of(_PARAM, "parameters are offloaded at stage 3 only", (3,), "3"),
    _stage_of(_OPT, "the optimizer's state is offloaded at stages 1 to 3", (1, 2, 3), "1, 2 or 3"),
    _path_of(_PARAM),
    _path_of(_OPT),
    _one_call,
    _stage_3_only,
    _one_mesh,
    _onebit,
    _constant_betas,
    _elastic,
    *(_needed(name) for name in ("total_num_steps", "cycle_min_lr", "cycle_max_lr")),
)
