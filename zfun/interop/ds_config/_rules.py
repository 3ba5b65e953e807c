"""The rules about several keys together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zfun.interop.ds_config._mistakes import Mistake, mistake
from zfun.interop.ds_config._values import Unusable, Values

__all__ = ["contradictions"]

_Z = "zero_optimization"
_PARAM = f"{_Z}.offload_param"
_OPT = f"{_Z}.offload_optimizer"


def contradictions(values: Values, given: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes of keys that do not go together.

    Args:
        values: of every key; rules that read a key with a mistake say nothing.
        given: the values as written.
    """
    found: list[Mistake] = []
    for rule in _RULES:
        try:
            found += rule(values, given)
        except Unusable:
            continue
    return found


def _one_dtype(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    if v["fp16.enabled"] and v["bf16.enabled"]:
        yield mistake(
            "fp16.enabled", "a run has one dtype", "fp16 and bf16 enabled", "disable one of the two"
        )


def _bf16_states(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    master, states = v["bf16.bf16_master_weights_and_grads"], v["bf16.bf16_optimizer_states"]
    if v["bf16.enabled"] and master is not states:
        yield mistake(
            "bf16.bf16_master_weights_and_grads",
            "master weights and moments have one dtype",
            f"{str(master).lower()}, with bf16_optimizer_states {str(states).lower()}",
            "set both or neither",
        )


def _offload_params(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    if v[f"{_PARAM}.device"] != "none" and v[f"{_Z}.stage"] != 3:
        yield mistake(
            f"{_PARAM}.device",
            "parameters are offloaded at stage 3 only",
            f"{v[f'{_PARAM}.device']} at stage {v[f'{_Z}.stage']}",
            'write "stage": 3, or leave offload_param out',
        )


def _offload_optimizer(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    if v[f"{_OPT}.device"] != "none" and v[f"{_Z}.stage"] == 0:
        yield mistake(
            f"{_OPT}.device",
            "the optimizer's state is offloaded at stages 1 to 3",
            f"{v[f'{_OPT}.device']} at stage 0",
            'write "stage": 1, 2 or 3, or leave offload_optimizer out',
        )


def _path_of(section: str) -> Callable[[Values, Mapping[str, Any]], Iterator[Mistake]]:
    def rule(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if v[f"{section}.device"] == "nvme" and v[f"{section}.nvme_path"] is None:
            yield mistake(
                f"{section}.nvme_path",
                "nvme needs a directory",
                None,
                'write "nvme_path": "/local_nvme", or another directory on the disk',
            )

    return rule


def _one_call(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    block, depth = v["aio.block_size"], v["aio.queue_depth"]
    if block * depth > 2**30:
        yield mistake(
            "aio.block_size",
            "block_size · queue_depth is at most 2**30",
            f"{block} · {depth}",
            "make one smaller",
        )


def _stage_3_only(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    if v[f"{_Z}.stage"] == 3:
        return
    for path, is_on in (
        (f"{_Z}.zero_quantized_weights", v[f"{_Z}.zero_quantized_weights"]),
        (f"{_Z}.zero_hpz_partition_size", v[f"{_Z}.zero_hpz_partition_size"] > 1),
        (f"{_Z}.mics_shard_size", v[f"{_Z}.mics_shard_size"] > 0),
    ):
        if is_on:
            yield mistake(
                path,
                "is for stage 3",
                f"{given.get(path)} at stage {v[f'{_Z}.stage']}",
                'write "stage": 3, or leave the key out',
            )


def _one_mesh(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    hpz, mics = v[f"{_Z}.zero_hpz_partition_size"], v[f"{_Z}.mics_shard_size"]
    if hpz > 1 and mics > 0:
        yield mistake(
            f"{_Z}.mics_shard_size",
            "MiCS shards within rows of ranks, hpZ over all ranks",
            f"{mics}, with zero_hpz_partition_size {hpz}",
            "leave one of the two out",
        )


def _onebit(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    if str(given.get("optimizer.type")).lower() != "onebitadam":
        return
    if v[f"{_Z}.stage"] == 3:
        yield mistake(
            "optimizer.type",
            "1-bit Adam keeps whole errors on every rank, so it is for stages 0 to 2",
            "OneBitAdam at stage 3",
            'write "stage": 2, or "AdamW"',
        )
    clip = given.get("gradient_clipping", 0)
    if clip != 0 and v["gradient_clipping"] > 0:
        yield mistake(
            "gradient_clipping",
            "1-bit Adam gets the terms of the gradient, whose norm nobody knows",
            clip,
            'write "gradient_clipping": 0',
        )


def _elastic(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    if not v["elasticity.enabled"]:
        return
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if v[f"elasticity.{name}"] is None:
            yield mistake(
                f"elasticity.{name}", "an elastic batch needs the key", None, "write the key"
            )
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in sizes:
        if name in given and not v["elasticity.ignore_non_elastic_batch_info"]:
            yield mistake(
                name,
                "the elastic batch sets the sizes",
                given[name],
                'leave the key out, or write "ignore_non_elastic_batch_info": true',
            )


def _schedule(v: Values, given: Mapping[str, Any]) -> Iterator[Mistake]:
    kind = str(given.get("scheduler.type", "")).lower()
    needed = {
        "warmupdecaylr": ("total_num_steps",),
        "warmupcosinelr": ("total_num_steps",),
        "onecycle": ("cycle_min_lr", "cycle_max_lr"),
    }
    for name in needed.get(kind, ()):
        path = f"scheduler.params.{name}"
        try:
            is_missing = v[path] is None
        except Unusable:
            continue
        if is_missing:
            field = " or pass num_steps=" if name == "total_num_steps" else ""
            yield mistake(path, "the schedule needs the key", None, f"write the key{field}")


_RULES = (
    _one_dtype,
    _bf16_states,
    _offload_params,
    _offload_optimizer,
    _path_of(_PARAM),
    _path_of(_OPT),
    _one_call,
    _stage_3_only,
    _one_mesh,
    _onebit,
    _elastic,
    _schedule,
)
