"""The parts of a recipe, in order: each makes fields of the record from the values of the keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from zfun import optim, stores
from zfun.compression import Compression, error_feedback, int4, int8
from zfun.errors import OptionError
from zfun.interop.ds_config import _optimizers
from zfun.interop.ds_config._batch import Batch, batch_of, elastic_batch
from zfun.interop.ds_config._explain import Note, Notes, entries_of
from zfun.interop.ds_config._mistakes import Mistake, collecting
from zfun.interop.ds_config._read import AutoValues
from zfun.interop.ds_config._values import Checked, Unusable, Values
from zfun.layout import DEFAULT_BUCKET_BYTES
from zfun.recipes import Precision
from zfun.transforms import ScheduleOptions

_Z = "zero_optimization"
_STEPS, _REDUCE = "gradient_accumulation_steps", "communication_data_type"
_SCALE, _ACCUM = "fp16.loss_scale", "data_types.grad_accum_dtype"
_Fields: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """A store that is not made yet, because a disk may be on another machine.

    Attributes:
        kind: ``"host"`` or ``"nvme"``.
        options: of :func:`zfun.stores.host` or :func:`zfun.stores.nvme`.
    """

    kind: str
    options: Mapping[str, Any]

    def make(self) -> stores.Store:
        """Make the store."""
        return getattr(stores, self.kind)(**self.options)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"zf.stores.{self.kind}({options})"


@dataclass(frozen=True, slots=True)
class _Reading:
    """A configuration on the way to a recipe.

    Attributes:
        checked: the configuration.
        auto: the values of the run.
        make: the caller's function from a learning rate to an optimizer.
        mistakes: of keys, and of the parts so far.
        notes: better descriptions of keys, which the parts add.
        done: the fields so far, with values for the parts after one that cannot be built.
    """

    checked: Checked
    auto: AutoValues
    make: Callable[[Any], Any] | None
    mistakes: list[Mistake]
    notes: Notes = field(default_factory=dict)
    done: dict[str, Any] = field(
        default_factory=lambda: {
            **dict.fromkeys(("optimizer", "learning_rate", "rule", "scheduler", "momentum")),
            "max_grad_norm": 0.0,
            "bucket_bytes": 1,
            "num_micro_batches": 1,
        }
    )


def parts_of(
    checked: Checked,
    auto: AutoValues,
    make: Callable[[Any], Any] | None,
    mistakes: list[Mistake],
) -> dict[str, Any]:
    """Return the fields of a recipe; a part that cannot be built adds a mistake."""
    r = _Reading(checked, auto, make, mistakes)
    for path, part in _PARTS:
        try:
            with collecting(path, mistakes):
                r.done.update(part(r, checked.values))
        except Unusable:
            assert mistakes or checked.late, f"{path} is unusable without a mistake"
    if mistakes:
        return r.done
    late = tuple(sorted({name for names in checked.late.values() for name in names}))
    return {**r.done, "late": late, "entries": entries_of(checked, r.notes)}


def _sizes(r: _Reading, v: Values) -> _Fields:
    """Return the sizes, where the number of ranks is known, and the number of micro-batches."""
    if v["elasticity.enabled"]:
        batch = _elastic(v, r.auto.world_size)
        text = f"train {batch.train}, micro {batch.micro}, accumulation {batch.accumulation}"
        r.notes["elasticity.enabled"] = Note(f"Recipe.batch: {text}")
        return {"batch": batch, "num_micro_batches": batch.accumulation}
    train, micro, steps = (
        v[name] for name in ("train_batch_size", "train_micro_batch_size_per_gpu", _STEPS)
    )
    ranks = r.auto.world_size
    if train is None and (micro is steps is None or (ranks is None and micro is not None)):
        why = "no batch size is known, so a batch is one micro-batch" if micro is None else ""
        r.notes[_STEPS] = Note(f"zf.zero(num_micro_batches={steps or 1})", why)
        return {"batch": None, "num_micro_batches": steps or 1}
    if ranks is None and train is None:
        ranks = 1  # batch_of refuses the accumulation alone, whatever the number of ranks
    if ranks is None:
        if not (micro and steps):
            raise _unknown_ranks(train)
        ranks = max(1, train // (micro * steps))
    batch = batch_of(ranks, train=train, micro=micro, accumulation=steps)
    r.notes["train_batch_size"] = Note(f"Recipe.batch.train={batch.train}")
    r.notes["train_micro_batch_size_per_gpu"] = Note(f"Recipe.batch.micro={batch.micro}")
    r.notes[_STEPS] = Note(f"zf.zero(num_micro_batches={batch.accumulation})")
    return {"batch": batch, "num_micro_batches": batch.accumulation}


def _axes(r: _Reading, v: Values) -> _Fields:
    """Return how many ranks share a matrix, and a sequence."""
    tensor, sequence = v["tensor_parallel.autotp_size"] or 1, v["sequence_parallel_size"]
    r.notes["tensor_parallel.autotp_size"] = Note(f"Recipe.tensor={tensor}")
    r.notes["sequence_parallel_size"] = Note(f"Recipe.sequence={sequence}")
    return {"tensor": tensor, "sequence": sequence}


def _unknown_ranks(train: int) -> OptionError:
    return OptionError(
        "the sizes of a batch need the number of ranks; got "
        f"train_batch_size {train} for an unknown number; pass world_size="
    )


def _elastic(v: Values, world_size: int | None) -> Batch:
    paths = [path for path in v.found if path.startswith("elasticity.")]
    found = elastic_batch({path.partition(".")[2]: v[path] for path in paths}, world_size)
    if world_size is None or found.micro is None:
        raise _unknown_ranks(found.train)
    replicas = world_size // v["elasticity.model_parallel_size"]
    return batch_of(replicas, train=found.train, micro=found.micro)


def _buckets(r: _Reading, v: Values) -> _Fields:
    """Return the size of a bucket: zfun's, or less if DeepSpeed's bounds are below."""
    names = ["reduce_bucket_size"]
    names += ["allgather_bucket_size"] if v[f"{_Z}.stage"] in (1, 2) else []
    bounds = {name: max(1, v[f"{_Z}.{name}"] * _itemsize(v)) for name in names}
    size = min(DEFAULT_BUCKET_BYTES, *bounds.values())
    live = v[f"{_Z}.stage3_max_live_parameters"] if v[f"{_Z}.stage"] == 3 else 0
    if live:
        # The bucket in use and the one gathered ahead must fit.
        size = min(size, max(1, live * _itemsize(v) // 2))
    for name, bound in bounds.items():
        why = "the other bound is lower"
        if size == bound:
            why = f"{v[f'{_Z}.{name}']} elements"
        elif size == DEFAULT_BUCKET_BYTES:
            why = "zfun's default, below this bound"
        r.notes[f"{_Z}.{name}"] = Note(f"zf.zero(bucket_bytes={size})", why)
    return {"bucket_bytes": size}


def _rates(r: _Reading, v: Values) -> _Fields:
    """Return the schedule; an optimizer of the caller has the learning rate of the run."""
    scheduler, base = _optimizers.rule_of(r.checked, "scheduler"), r.auto.learning_rate
    if r.checked.kind("optimizer") is not None and (r.make is None or base is None):
        base = v["optimizer.params.lr"]
    if scheduler is None:
        return {"learning_rate": base}
    rate, momentum = (
        _optimizers.schedule_for(scheduler, lr=base),
        _optimizers.momentum_for(scheduler),
    )
    return {"learning_rate": rate, "scheduler": scheduler, "momentum": momentum}


def _clip(r: _Reading, v: Values) -> _Fields:
    path, bound = "gradient_clipping", v["gradient_clipping"]
    becomes = f"zf.optim.clip_by_global_norm({bound})" if bound else "no clipping"
    r.notes[path] = Note(becomes, v.sources.get(path, ""))
    if path not in r.checked.given and r.checked.kind("optimizer") == "OneBitAdam":
        r.notes[path] = Note("no clipping", "1-bit Adam gets terms of the gradient")
        bound = 0.0
    return {"max_grad_norm": bound}


def clipped(rule: Any, clip: float) -> optim.Optimizer:
    return optim.chain(optim.clip_by_global_norm(clip), rule) if clip else optim.as_optimizer(rule)


def _optimizer(r: _Reading, v: Values) -> _Fields:
    rate, scheduler, clip = (
        r.done[name] for name in ("learning_rate", "scheduler", "max_grad_norm")
    )
    rule = _optimizers.rule_of(r.checked, "optimizer") if r.make is None else None
    if r.make is not None:
        if r.checked.kind("optimizer") is not None:
            r.notes["optimizer.type"] = Note("the caller's optimizer", "wins, as in DeepSpeed")
        if rate is None and not (r.mistakes or r.checked.late):
            raise OptionError(
                "the caller's optimizer needs a learning rate; got none; write a scheduler or "
                "optimizer.params.lr, or pass learning_rate="
            )
        return {} if rate is None else {"optimizer": clipped(r.make(rate), clip)}
    if rule is None or rate is None:
        return {"rule": rule}

    # DeepSpeed's first group is that of Muon, and its Muon has no betas that a cycle changes.
    is_muon = rule.kind == "Muon"
    first = _optimizers.own_rates(rule.options)["muon_lr"] if is_muon else rule.options["lr"]

    def rate_of(lr: float) -> float | optim.Schedule:
        lr = first if scheduler is not None and scheduler.is_absolute else lr
        if lr == rule.options["lr"]:
            return rate
        return lr if scheduler is None else _optimizers.schedule_for(scheduler, lr=lr)

    built = _optimizers.made(
        rule, rate_of, {} if is_muon else _optimizers.cycle_of(r.done["momentum"])
    )
    r.notes["optimizer.type"] = Note(f"zf.optim.{built.name or 'muon'}")
    return {"rule": rule, "optimizer": clipped(built, clip)}


def _autocast(v: Values) -> torch.dtype | None:
    return v["torch_autocast.dtype"] if v["torch_autocast.enabled"] else None


def _itemsize(v: Values) -> int:
    return 2 if (v["fp16.enabled"] or v["bf16.enabled"]) and _autocast(v) is None else 4


def _dtypes(r: _Reading, v: Values) -> _Fields:
    """Return the dtypes; gradients are sent in the model's dtype by default, as in DeepSpeed."""
    half = torch.float16 if v["fp16.enabled"] else torch.bfloat16 if v["bf16.enabled"] else None
    autocast = _autocast(v)
    # A run in 16 bits that autocasts keeps parameters in float32.
    half = half if autocast is None else None
    named = [dtype for dtype in (v[_REDUCE], v[_ACCUM]) if dtype is not None]
    reduce = functools.reduce(torch.promote_types, named) if named else half
    if reduce is not None:
        why = "" if named else "DeepSpeed's default, the dtype of the model"
        if not named and r.done["num_micro_batches"] > 1:
            why = 'micro-batches add up in this dtype too; write grad_accum_dtype "fp32" for more'
        r.notes[_REDUCE] = r.notes[_ACCUM] = Note(f"zf.Precision(reduce={reduce})", why)
    if half is None:
        scale = optim.grad_scaler() if autocast is torch.float16 else None
        return {"precision": Precision(reduce=reduce, loss_scale=scale), "autocast": autocast}
    narrow = v["bf16.bf16_master_weights_and_grads"] and half is torch.bfloat16
    master, scale = None if narrow else torch.float32, _loss_scale(r, v)
    r.notes["bf16.enabled" if half is torch.bfloat16 else "fp16.enabled"] = Note(
        f"zf.Precision(param={half}, compute={half}, reduce={reduce}, master={master})"
    )
    return {"precision": Precision(half, half, reduce, master, scale), "autocast": None}


def _loss_scale(r: _Reading, v: Values) -> optim.LossScale | float | None:
    if not v["fp16.enabled"]:
        return None
    if v[_SCALE] > 0:
        r.notes[_SCALE] = Note(f"zf.Precision(loss_scale={v[_SCALE]})")
        return v[_SCALE]
    r.notes[_SCALE] = Note("zf.optim.dynamic_loss_scale(...)", "0 is a dynamic scale")
    return dynamic_scale_of(v)


def dynamic_scale_of(v: Values | Mapping[str, Any]) -> optim.LossScale:
    """Return the dynamic loss scale of the section ``fp16``."""
    return optim.dynamic_loss_scale(
        2.0 ** v["fp16.initial_scale_power"],
        window=v["fp16.loss_scale_window"],
        hysteresis=v["fp16.hysteresis"],
        min_scale=v["fp16.min_loss_scale"],
        consecutive_hysteresis=v["fp16.consecutive_hysteresis"],
        raise_at_min=True,
    )


def _gathers(r: _Reading, v: Values) -> _Fields:
    """Return when stage 3 gathers."""
    if v[f"{_Z}.stage"] != 3:
        return {"schedule": None, "secondary": False}
    ahead, live = v[f"{_Z}.stage3_prefetch_bucket_size"], v[f"{_Z}.stage3_max_live_parameters"]
    bucket_bytes = r.done["bucket_bytes"]
    prefetch = max(1, ahead * _itemsize(v) // bucket_bytes) if ahead and live else 0
    why = f"{ahead} elements in buckets of at most {bucket_bytes} bytes"
    r.notes[f"{_Z}.stage3_prefetch_bucket_size"] = Note(
        f"zf.ScheduleOptions(prefetch={prefetch})", why if prefetch else "no prefetch"
    )
    if not live:
        why = "in DeepSpeed 0 only stops prefetching"
        r.notes[f"{_Z}.stage3_max_live_parameters"] = Note("zf.ScheduleOptions(prefetch=0)", why)
    schedule = ScheduleOptions(
        prefetch=prefetch,
        max_live=live or None,
        reuse_distance=v[f"{_Z}.stage3_max_reuse_distance"],
        persistence=v[f"{_Z}.stage3_param_persistence_threshold"],
        max_persistent=v[f"{_Z}.stage3_model_persistence_threshold"],
        secondary=v[f"{_Z}.zero_hpz_partition_size"] > 1,
    )
    return {"schedule": schedule, "secondary": schedule.secondary}


def _codecs(r: _Reading, v: Values) -> _Fields:
    """Return the codecs of ZeRO++ and LoCo."""
    loco = f"{_Z}.zeropp_loco_param"
    feedback = None
    if any(path.startswith(loco) for path in r.checked.given):
        feedback = error_feedback(err_beta=v[f"{loco}.err_beta"], reset=v[f"{loco}.reset_T"])
    params = int8() if v[f"{_Z}.zero_quantized_weights"] else None
    grads = int4(feedback=feedback) if v[f"{_Z}.zero_quantized_gradients"] else None
    return {"compression": Compression(params=params, grads=grads)}


def _store(r: _Reading, v: Values, section: str) -> StoreChoice | None:
    """Return the store of ``offload_param`` or ``offload_optimizer``."""
    path, of_params = f"{_Z}.{section}", section == "offload_param"
    device, is_pinned = v[f"{path}.device"], v[f"{path}.pin_memory"]
    if device == "none":
        return None
    # Without a device there is nothing to page-lock for, so true asks and does not insist.
    options: dict[str, Any] = {} if is_pinned else {"pin": False}
    if device == "nvme":
        names = ("buffer_count", *(("buffer_size", "max_in_cpu") if of_params else ()))
        options = {
            "path": v[f"{path}.nvme_path"],
            "block_size": v["aio.block_size"],
            "queue_depth": v["aio.queue_depth"],
            "num_threads": v["aio.intra_op_parallelism"],
            **{name: v[f"{path}.{name}"] for name in names},
            **({} if is_pinned else {"pin_memory": False}),
        }
    store = StoreChoice("nvme" if device == "nvme" else "host", options)
    name = f"zf.stores.{store.kind}(...)"
    parts = f"params={name}" if of_params else f"optimizer={name}, grads={name}"
    r.notes[f"{path}.device"] = Note(f"zf.stores.Offload({parts})")
    return store


def _places(r: _Reading, v: Values) -> _Fields:
    """Return the stage, and how many ranks make a row of the mesh; ``None`` without a mesh."""
    hpz, mics = v[f"{_Z}.zero_hpz_partition_size"], v[f"{_Z}.mics_shard_size"]
    rows = hpz if hpz > 1 else mics if mics > 0 else None
    return {"stage": v[f"{_Z}.stage"], "rows": rows}


def _remat(r: _Reading, v: Values) -> _Fields:
    is_host = v["activation_checkpointing.cpu_checkpointing"]
    return {"remat": {"store": StoreChoice("host", {})} if is_host else {}}


# By the place of the mistakes, the functions that make the fields of a recipe, in order.
_PARTS: tuple[tuple[str, Callable[[_Reading, Values], _Fields]], ...] = (
    ("train_batch_size", _sizes),
    ("tensor_parallel.autotp_size", _axes),
    (_Z, _buckets),
    ("scheduler.params", _rates),
    ("gradient_clipping", _clip),
    ("optimizer.params", _optimizer),
    ("fp16", _dtypes),
    (_Z, _gathers),
    (_Z, _codecs),
    (f"{_Z}.offload_param", lambda r, v: {"params_store": _store(r, v, "offload_param")}),
    (
        f"{_Z}.offload_optimizer",
        lambda r, v: {"optimizer_store": _store(r, v, "offload_optimizer")},
    ),
    (_Z, _places),
    ("activation_checkpointing", _remat),
)
