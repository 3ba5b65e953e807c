"""The options of ``zf.zero`` that the values of a configuration make."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from zfun import stores
from zfun.compression import Compression, error_feedback, int4, int8
from zfun.errors import OptionError
from zfun.interop.ds_config._auto import AutoValues
from zfun.interop.ds_config._batch import Batch, batch_of, solve_batch
from zfun.interop.ds_config._values import Values
from zfun.layout import DEFAULT_BUCKET_BYTES
from zfun.optim import LossScale, dynamic_loss_scale
from zfun.recipes import Precision
from zfun.stores import Store
from zfun.transforms import ScheduleOptions

__all__ = [
    "Notes",
    "StoreChoice",
    "batch_sizes",
    "bucket_bytes_of",
    "compression_of",
    "precision_of",
    "rows_of",
    "schedule_options_of",
    "store_of",
]

_Z = "zero_optimization"


class Note(NamedTuple):
    """A better description of a key than the one in the table.

    Attributes:
        becomes: the option with its value.
        why: the reason.
    """

    becomes: str
    why: str = ""


Notes: TypeAlias = dict[str, Note]


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """A store that is not made yet, because a disk may be on another machine.

    Attributes:
        kind: ``"host"`` or ``"nvme"``.
        options: of :func:`zfun.stores.host` or :func:`zfun.stores.nvme`.
    """

    kind: str
    options: Mapping[str, Any]

    def make(self) -> Store:
        """Make the store."""
        return getattr(stores, self.kind)(**self.options)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"zf.stores.{self.kind}({options})"


def batch_sizes(v: Values, auto: AutoValues, notes: Notes) -> tuple[Batch | None, int]:
    """Return the sizes, where the number of ranks is known, and the number of micro-batches."""
    if v["elasticity.enabled"]:
        batch = _elastic(v, auto)
        text = f"train {batch.train}, micro {batch.micro}, accumulation {batch.accumulation}"
        notes["elasticity.enabled"] = Note(f"Recipe.batch: {text}")
        return batch, batch.accumulation
    train, micro = v["train_batch_size"], v["train_micro_batch_size_per_gpu"]
    accumulation = v["gradient_accumulation_steps"]
    if train is None and micro is None and accumulation is None:
        notes["gradient_accumulation_steps"] = Note(
            "zf.zero(num_micro_batches=1)", "no batch size is known, so a batch is one micro-batch"
        )
        return None, 1
    if auto.world_size is None and train is None and micro is not None:
        steps = accumulation or 1
        notes["gradient_accumulation_steps"] = Note(f"zf.zero(num_micro_batches={steps})")
        return None, steps
    batch = batch_of(_ranks(v, auto), train=train, micro=micro, accumulation=accumulation)
    notes["train_batch_size"] = Note(f"Recipe.batch.train={batch.train}")
    notes["train_micro_batch_size_per_gpu"] = Note(f"Recipe.batch.micro={batch.micro}")
    notes["gradient_accumulation_steps"] = Note(f"zf.zero(num_micro_batches={batch.accumulation})")
    return batch, batch.accumulation


def _ranks(v: Values, auto: AutoValues) -> int:
    """Return the number of ranks, or the number that the three batch sizes imply."""
    if auto.world_size is not None:
        return auto.world_size
    sizes = v["train_batch_size"], v["train_micro_batch_size_per_gpu"]
    train, micro, accumulation = *sizes, v["gradient_accumulation_steps"]
    if train and micro and accumulation:
        return max(1, train // (micro * accumulation))
    if train is None:
        return 1  # batch_of refuses the accumulation alone, whatever the number of ranks
    raise _unknown_ranks(train)


def _unknown_ranks(train: int) -> OptionError:
    return OptionError(
        "the sizes of a batch need the number of ranks; got "
        f"train_batch_size {train} for an unknown number; pass world_size="
    )


def _elastic(v: Values, auto: AutoValues) -> Batch:
    found = solve_batch(
        v["elasticity.max_train_batch_size"],
        list(v["elasticity.micro_batch_sizes"]),
        auto.world_size,
        min_ranks=v["elasticity.min_gpus"],
        max_ranks=v["elasticity.max_gpus"],
        prefer_larger=v["elasticity.prefer_larger_batch"],
        version=v["elasticity.version"],
        ranks_per_node=v["elasticity.num_gpus_per_node"],
        model_parallel=v["elasticity.model_parallel_size"],
    )
    if auto.world_size is None or found.micro is None:
        raise _unknown_ranks(found.train)
    replicas = auto.world_size // v["elasticity.model_parallel_size"]
    return batch_of(replicas, train=found.train, micro=found.micro)


def precision_of(v: Values, num_micro_batches: int, notes: Notes) -> Precision:
    """Return the dtypes; gradients are sent in the model's dtype by default, as in DeepSpeed."""
    half = torch.float16 if v["fp16.enabled"] else torch.bfloat16 if v["bf16.enabled"] else None
    named = [v["communication_data_type"], v["data_types.grad_accum_dtype"]]
    named = [dtype for dtype in named if dtype is not None]
    reduce = functools.reduce(torch.promote_types, named) if named else half
    if reduce is not None:
        why = ""
        if not named and num_micro_batches > 1:
            why = 'micro-batches add up in this dtype too; write grad_accum_dtype "fp32" for more'
        elif not named:
            why = "DeepSpeed's default, the dtype of the model"
        for path in ("communication_data_type", "data_types.grad_accum_dtype"):
            notes[path] = Note(f"zf.Precision(reduce={reduce})", why)
    if half is None:
        return Precision(reduce=reduce)
    narrow = v["bf16.bf16_master_weights_and_grads"] and half is torch.bfloat16
    made = Precision(half, half, reduce, None if narrow else torch.float32, _loss_scale(v, notes))
    notes["bf16.enabled" if half is torch.bfloat16 else "fp16.enabled"] = Note(
        f"zf.Precision(param={half}, compute={half}, reduce={reduce}, master={made.master})"
    )
    return made


def _loss_scale(v: Values, notes: Notes) -> LossScale | float | None:
    if not v["fp16.enabled"]:
        return None
    if v["fp16.loss_scale"] > 0:
        notes["fp16.loss_scale"] = Note(f"zf.Precision(loss_scale={v['fp16.loss_scale']})")
        return v["fp16.loss_scale"]
    notes["fp16.loss_scale"] = Note("zf.optim.dynamic_loss_scale(...)", "0 is a dynamic scale")
    return dynamic_loss_scale(
        2.0 ** v["fp16.initial_scale_power"],
        window=v["fp16.loss_scale_window"],
        hysteresis=v["fp16.hysteresis"],
        min_scale=v["fp16.min_loss_scale"],
        consecutive_hysteresis=v["fp16.consecutive_hysteresis"],
        raise_at_min=True,
    )


def _itemsize(v: Values) -> int:
    return 2 if v["fp16.enabled"] or v["bf16.enabled"] else 4


def bucket_bytes_of(v: Values, notes: Notes) -> int:
    """Return the size of a bucket: zfun's, or less if DeepSpeed's bounds are below."""
    bounds = {f"{_Z}.reduce_bucket_size": v[f"{_Z}.reduce_bucket_size"]}
    if v[f"{_Z}.stage"] in (1, 2):
        bounds[f"{_Z}.allgather_bucket_size"] = v[f"{_Z}.allgather_bucket_size"]
    size = max(1, min(DEFAULT_BUCKET_BYTES, *(n * _itemsize(v) for n in bounds.values())))
    for path, elements in bounds.items():
        is_bound = size == max(1, elements * _itemsize(v))
        why = (
            f"{elements} elements"
            if is_bound
            else "zfun's default, below this bound; smaller buckets overlap better"
            if size == DEFAULT_BUCKET_BYTES
            else "the other bound is lower"
        )
        notes[path] = Note(f"zf.zero(bucket_bytes={size})", why)
    return size


def schedule_options_of(v: Values, bucket_bytes: int, notes: Notes) -> ScheduleOptions | None:
    """Return when stage 3 gathers; ``None`` at other stages."""
    if v[f"{_Z}.stage"] != 3:
        return None
    ahead, live = (
        v[f"{_Z}.stage3_prefetch_bucket_size"],
        v[f"{_Z}.stage3_max_live_parameters"],
    )
    prefetch = max(1, ahead * _itemsize(v) // bucket_bytes) if ahead and live else 0
    notes[f"{_Z}.stage3_prefetch_bucket_size"] = Note(
        f"zf.ScheduleOptions(prefetch={prefetch})",
        f"{ahead} elements in buckets of {bucket_bytes} bytes" if prefetch else "no prefetch",
    )
    if not live:
        notes[f"{_Z}.stage3_max_live_parameters"] = Note(
            "zf.ScheduleOptions(prefetch=0)", "in DeepSpeed 0 only stops prefetching"
        )
    is_hpz = v[f"{_Z}.zero_hpz_partition_size"] > 1
    return ScheduleOptions(
        prefetch=prefetch,
        max_live=live or None,
        reuse_distance=v[f"{_Z}.stage3_max_reuse_distance"],
        persistence=v[f"{_Z}.stage3_param_persistence_threshold"],
        max_persistent=v[f"{_Z}.stage3_model_persistence_threshold"],
        secondary=is_hpz,
    )


def rows_of(v: Values) -> int | None:
    """Return how many ranks make a row of the mesh; ``None`` without a mesh."""
    hpz, mics = v[f"{_Z}.zero_hpz_partition_size"], v[f"{_Z}.mics_shard_size"]
    return hpz if hpz > 1 else mics if mics > 0 else None


def compression_of(v: Values, given: Mapping[str, Any]) -> Compression:
    """Return the codecs of ZeRO++ and LoCo."""
    loco = f"{_Z}.zeropp_loco_param"
    feedback = (
        error_feedback(err_beta=v[f"{loco}.err_beta"], reset=v[f"{loco}.reset_T"])
        if any(path.startswith(loco) for path in given)
        else None
    )
    return Compression(
        params=int8() if v[f"{_Z}.zero_quantized_weights"] else None,
        grads=int4(feedback=feedback) if v[f"{_Z}.zero_quantized_gradients"] else None,
    )


def store_of(v: Values, section: str, notes: Notes) -> StoreChoice | None:
    """Return the store of ``offload_param`` or ``offload_optimizer``."""
    path = f"{_Z}.{section}"
    device = v[f"{path}.device"]
    if device == "none":
        return None
    # Without a device there is nothing to page-lock for, so true asks and does not insist.
    pin = None if v[f"{path}.pin_memory"] else False
    if device == "cpu":
        made = StoreChoice("host", {} if pin is None else {"pin": pin})
    else:
        params = section == "offload_param"
        options = {
            "path": v[f"{path}.nvme_path"],
            "block_size": v["aio.block_size"],
            "queue_depth": v["aio.queue_depth"],
            "num_threads": v["aio.intra_op_parallelism"],
            "buffer_count": v[f"{path}.buffer_count"],
            **({"buffer_size": v[f"{path}.buffer_size"]} if params else {}),
            **({"max_in_cpu": v[f"{path}.max_in_cpu"]} if params else {}),
            **({} if pin is None else {"pin_memory": pin}),
        }
        made = StoreChoice("nvme", options)
    parts = "params={0}" if section == "offload_param" else "optimizer={0}, grads={0}"
    notes[f"{path}.device"] = Note(
        f"zf.stores.Offload({parts.format(f'zf.stores.{made.kind}(...)')})"
    )
    return made
