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

_Z = "zero_optimization"
_STEPS, _REDUCE = "gradient_accumulation_steps", "communication_data_type"
_SCALE, _ACCUM = "fp16.loss_scale", "data_types.grad_accum_dtype"


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
    train, micro, steps = (
        v[name] for name in ("train_batch_size", "train_micro_batch_size_per_gpu", _STEPS)
    )
    if train is micro is steps is None:
        why = "no batch size is known, so a batch is one micro-batch"
        notes[_STEPS] = Note("zf.zero(num_micro_batches=1)", why)
        return None, 1
    ranks = auto.world_size
    if ranks is None and train is None:
        if micro is not None:
            notes[_STEPS] = Note(f"zf.zero(num_micro_batches={steps or 1})")
            return None, steps or 1
        ranks = 1  # batch_of refuses the accumulation alone, whatever the number of ranks
    if ranks is None:
        if not (micro and steps):
            raise _unknown_ranks(train)
        ranks = max(1, train // (micro * steps))
    batch = batch_of(ranks, train=train, micro=micro, accumulation=steps)
    notes["train_batch_size"] = Note(f"Recipe.batch.train={batch.train}")
    notes["train_micro_batch_size_per_gpu"] = Note(f"Recipe.batch.micro={batch.micro}")
    notes[_STEPS] = Note(f"zf.zero(num_micro_batches={batch.accumulation})")
    return batch, batch.accumulation


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


def autocast_of(v: Values) -> torch.dtype | None:
    """Return the dtype of ``torch.autocast`` around the loss; ``None`` without."""
    return v["torch_autocast.dtype"] if v["torch_autocast.enabled"] else None


def precision_of(v: Values, num_micro_batches: int, notes: Notes) -> Precision:
    """Return the dtypes; gradients are sent in the model's dtype by default, as in DeepSpeed."""
    half = torch.float16 if v["fp16.enabled"] else torch.bfloat16 if v["bf16.enabled"] else None
    autocast = autocast_of(v)
    # A run in 16 bits that autocasts keeps parameters in float32.
    half = half if autocast is None else None
    named = [dtype for dtype in (v[_REDUCE], v[_ACCUM]) if dtype is not None]
    reduce = functools.reduce(torch.promote_types, named) if named else half
    if reduce is not None:
        why = "" if named else "DeepSpeed's default, the dtype of the model"
        if not named and num_micro_batches > 1:
            why = 'micro-batches add up in this dtype too; write grad_accum_dtype "fp32" for more'
        notes[_REDUCE] = notes[_ACCUM] = Note(f"zf.Precision(reduce={reduce})", why)
    if half is None:
        # torch's scaler of autocast has no hysteresis, and doubles after 2000 steps.
        is_scaled = autocast is torch.float16
        scale = dynamic_loss_scale(window=2000, hysteresis=1) if is_scaled else None
        return Precision(reduce=reduce, loss_scale=scale)
    narrow = v["bf16.bf16_master_weights_and_grads"] and half is torch.bfloat16
    made = Precision(half, half, reduce, None if narrow else torch.float32, _loss_scale(v, notes))
    notes["bf16.enabled" if half is torch.bfloat16 else "fp16.enabled"] = Note(
        f"zf.Precision(param={half}, compute={half}, reduce={reduce}, master={made.master})"
    )
    return made


def _loss_scale(v: Values, notes: Notes) -> LossScale | float | None:
    if not v["fp16.enabled"]:
        return None
    if v[_SCALE] > 0:
        notes[_SCALE] = Note(f"zf.Precision(loss_scale={v[_SCALE]})")
        return v[_SCALE]
    notes[_SCALE] = Note("zf.optim.dynamic_loss_scale(...)", "0 is a dynamic scale")
    return dynamic_loss_scale(
        2.0 ** v["fp16.initial_scale_power"],
        window=v["fp16.loss_scale_window"],
        hysteresis=v["fp16.hysteresis"],
        min_scale=v["fp16.min_loss_scale"],
        consecutive_hysteresis=v["fp16.consecutive_hysteresis"],
        raise_at_min=True,
    )


def _itemsize(v: Values) -> int:
    return 2 if (v["fp16.enabled"] or v["bf16.enabled"]) and autocast_of(v) is None else 4


def bucket_bytes_of(v: Values, notes: Notes) -> int:
    """Return the size of a bucket: zfun's, or less if DeepSpeed's bounds are below."""
    names = [
        "reduce_bucket_size",
        *(["allgather_bucket_size"] if v[f"{_Z}.stage"] in (1, 2) else []),
    ]
    bounds = {name: max(1, v[f"{_Z}.{name}"] * _itemsize(v)) for name in names}
    size = min(DEFAULT_BUCKET_BYTES, *bounds.values())
    for name, bound in bounds.items():
        why = "the other bound is lower"
        if size == bound:
            why = f"{v[f'{_Z}.{name}']} elements"
        elif size == DEFAULT_BUCKET_BYTES:
            why = "zfun's default, below this bound; smaller buckets overlap better"
        notes[f"{_Z}.{name}"] = Note(f"zf.zero(bucket_bytes={size})", why)
    return size


def schedule_options_of(v: Values, bucket_bytes: int, notes: Notes) -> ScheduleOptions | None:
    """Return when stage 3 gathers; ``None`` at other stages."""
    if v[f"{_Z}.stage"] != 3:
        return None
    ahead, live = v[f"{_Z}.stage3_prefetch_bucket_size"], v[f"{_Z}.stage3_max_live_parameters"]
    prefetch = max(1, ahead * _itemsize(v) // bucket_bytes) if ahead and live else 0
    notes[f"{_Z}.stage3_prefetch_bucket_size"] = Note(
        f"zf.ScheduleOptions(prefetch={prefetch})",
        f"{ahead} elements in buckets of {bucket_bytes} bytes" if prefetch else "no prefetch",
    )
    if not live:
        why = "in DeepSpeed 0 only stops prefetching"
        notes[f"{_Z}.stage3_max_live_parameters"] = Note("zf.ScheduleOptions(prefetch=0)", why)
    return ScheduleOptions(
        prefetch=prefetch,
        max_live=live or None,
        reuse_distance=v[f"{_Z}.stage3_max_reuse_distance"],
        persistence=v[f"{_Z}.stage3_param_persistence_threshold"],
        max_persistent=v[f"{_Z}.stage3_model_persistence_threshold"],
        secondary=v[f"{_Z}.zero_hpz_partition_size"] > 1,
    )


def rows_of(v: Values) -> int | None:
    """Return how many ranks make a row of the mesh; ``None`` without a mesh."""
    hpz, mics = v[f"{_Z}.zero_hpz_partition_size"], v[f"{_Z}.mics_shard_size"]
    return hpz if hpz > 1 else mics if mics > 0 else None


def compression_of(v: Values, given: Mapping[str, Any]) -> Compression:
    """Return the codecs of ZeRO++ and LoCo."""
    loco = f"{_Z}.zeropp_loco_param"
    feedback = None
    if any(path.startswith(loco) for path in given):
        feedback = error_feedback(err_beta=v[f"{loco}.err_beta"], reset=v[f"{loco}.reset_T"])
    return Compression(
        params=int8() if v[f"{_Z}.zero_quantized_weights"] else None,
        grads=int4(feedback=feedback) if v[f"{_Z}.zero_quantized_gradients"] else None,
    )


def store_of(v: Values, section: str, notes: Notes) -> StoreChoice | None:
    """Return the store of ``offload_param`` or ``offload_optimizer``."""
    path = f"{_Z}.{section}"
    device, is_pinned = v[f"{path}.device"], v[f"{path}.pin_memory"]
    if device == "none":
        return None
    # Without a device there is nothing to page-lock for, so true asks and does not insist.
    options: dict[str, Any] = {} if is_pinned else {"pin": False}
    if device == "nvme":
        names = ("buffer_count", *(("buffer_size", "max_in_cpu") if "param" in section else ()))
        options = {
            "path": v[f"{path}.nvme_path"],
            "block_size": v["aio.block_size"],
            "queue_depth": v["aio.queue_depth"],
            "num_threads": v["aio.intra_op_parallelism"],
            **{name: v[f"{path}.{name}"] for name in names},
            **({} if is_pinned else {"pin_memory": False}),
        }
    made = StoreChoice("nvme" if device == "nvme" else "host", options)
    parts = "params={0}" if "param" in section else "optimizer={0}, grads={0}"
    notes[f"{path}.device"] = Note(
        f"zf.stores.Offload({parts.format(f'zf.stores.{made.kind}(...)')})"
    )
    return made
