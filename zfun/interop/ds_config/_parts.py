"""The parts of a recipe, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zfun import optim
from zfun.errors import OptionError
from zfun.interop.ds_config import _build as build
from zfun.interop.ds_config._auto import AutoValues
from zfun.interop.ds_config._build import Note, Notes, StoreChoice
from zfun.interop.ds_config._explain import entries_of
from zfun.interop.ds_config._mistakes import Mistake, collecting
from zfun.interop.ds_config._optimizers import cycle_of, made, momentum_for, rule_of, schedule_for
from zfun.interop.ds_config._values import Checked, Unusable, Values
from zfun.optim import Optimizer, Schedule

_Z = "zero_optimization"
_PARAM, _OPT = f"{_Z}.offload_param", f"{_Z}.offload_optimizer"


class _Reading(NamedTuple):
    """A configuration on the way to a recipe.

    Attributes:
        found: the configuration.
        auto: the values of the run.
        make: the caller's function from a learning rate to an optimizer.
        mistakes: of keys, and of the parts so far.
        notes: better descriptions of keys, which the parts add.
        done: the fields of the recipe so far.
    """

    found: Checked
    auto: AutoValues
    make: Callable[[Any], Any] | None
    mistakes: list[Mistake]
    notes: Notes
    done: dict[str, Any]


# The fields of parts that cannot be built, for the parts after.
_UNKNOWN: Mapping[str, Any] = {
    **dict.fromkeys(("optimizer", "learning_rate", "rule", "scheduler", "momentum")),
    "max_grad_norm": 0.0,
    "bucket_bytes": 1,
    "num_micro_batches": 1,
}


def parts_of(
    found: Checked,
    auto: AutoValues,
    make: Callable[[Any], Any] | None,
    mistakes: list[Mistake],
) -> dict[str, Any]:
    """Return the fields of a recipe; a part that cannot be built adds a mistake."""
    r = _Reading(found, auto, make, mistakes, {}, dict(_UNKNOWN))
    for path, part in _PARTS:
        try:
            with collecting(path, mistakes):
                r.done.update(part(r, found.values))
        except Unusable:
            assert mistakes or found.late, f"{path} is unusable without a mistake"
    if mistakes:
        return r.done
    late = tuple(sorted({name for names in found.late.values() for name in names}))
    return {**r.done, "late": late, "entries": entries_of(found, r.notes)}


def _sizes(r: _Reading, v: Values) -> dict[str, Any]:
    batch, num_micro_batches = build.batch_sizes(v, r.auto, r.notes)
    return {"batch": batch, "num_micro_batches": num_micro_batches}


def _rates(r: _Reading, v: Values) -> dict[str, Any]:
    scheduler, base = rule_of(r.found, "scheduler"), _base(r)
    if scheduler is None:
        return {"learning_rate": base}
    rate, momentum = schedule_for(scheduler, lr=base), momentum_for(scheduler)
    return {"learning_rate": rate, "scheduler": scheduler, "momentum": momentum}


def _base(r: _Reading) -> float | None:
    """Return the learning rate without the schedule; an optimizer of the caller has the run's."""
    is_own = r.make is not None and r.auto.learning_rate is not None
    if r.found.kind("optimizer") is None or is_own:
        return r.auto.learning_rate
    return r.found.values["optimizer.params.lr"]


def _clip(r: _Reading, v: Values) -> dict[str, Any]:
    path, bound = "gradient_clipping", v["gradient_clipping"]
    becomes = f"zf.optim.clip_by_global_norm({bound})" if bound else "no clipping"
    r.notes[path] = Note(becomes, v.sources.get(path, ""))
    if path not in r.found.given and r.found.kind("optimizer") == "OneBitAdam":
        r.notes[path] = Note("no clipping", "1-bit Adam gets terms of the gradient")
        bound = 0.0
    return {"max_grad_norm": bound}


def _optimizer(r: _Reading, v: Values) -> dict[str, Any]:
    rate, scheduler, clip = (
        r.done[name] for name in ("learning_rate", "scheduler", "max_grad_norm")
    )
    kind = r.found.kind("optimizer")
    if r.make is not None:
        if kind is not None:
            r.notes["optimizer.type"] = Note("the caller's optimizer", "wins, as in DeepSpeed")
        if rate is None and not (r.mistakes or r.found.late):
            raise OptionError(
                "the caller's optimizer needs a learning rate; got none; write a scheduler or "
                "optimizer.params.lr, or pass learning_rate="
            )
        return {} if rate is None else {"optimizer": clipped(r.make(rate), clip)}
    rule = rule_of(r.found, "optimizer")
    if rule is None or rate is None:
        return {"rule": rule}

    def rate_of(lr: float) -> float | Schedule:
        if lr == rule.options["lr"]:
            return rate
        return lr if scheduler is None else schedule_for(scheduler, lr=lr)

    built = made(rule, rate_of, cycle_of(r.done["momentum"]))
    r.notes["optimizer.type"] = Note(f"zf.optim.{built.name or 'muon'}")
    return {"rule": rule, "optimizer": clipped(built, clip)}


def _dtypes(r: _Reading, v: Values) -> dict[str, Any]:
    precision = build.precision_of(v, r.done["num_micro_batches"], r.notes)
    return {"precision": precision, "autocast": build.autocast_of(v)}


def _gathers(r: _Reading, v: Values) -> dict[str, Any]:
    schedule = build.schedule_options_of(v, r.done["bucket_bytes"], r.notes)
    return {"schedule": schedule, "secondary": schedule is not None and schedule.secondary}


def _remat(r: _Reading, v: Values) -> dict[str, Any]:
    is_host = v["activation_checkpointing.cpu_checkpointing"]
    return {"remat": {"store": StoreChoice("host", {})} if is_host else {}}


def clipped(rule: Any, clip: float) -> Optimizer:
    return optim.chain(optim.clip_by_global_norm(clip), rule) if clip else optim.as_optimizer(rule)


_Part = Callable[[_Reading, Values], Mapping[str, Any]]
# By the place of the mistakes, the functions that make the fields of a recipe, in order.
_PARTS: tuple[tuple[str, _Part], ...] = (
    ("train_batch_size", _sizes),
    (_Z, lambda r, v: {"bucket_bytes": build.bucket_bytes_of(v, r.notes)}),
    ("scheduler.params", _rates),
    ("gradient_clipping", _clip),
    ("optimizer.params", _optimizer),
    ("fp16", _dtypes),
    (_Z, _gathers),
    (_Z, lambda r, v: {"compression": build.compression_of(v, r.found.given)}),
    (_PARAM, lambda r, v: {"params_store": build.store_of(v, "offload_param", r.notes)}),
    (_OPT, lambda r, v: {"optimizer_store": build.store_of(v, "offload_optimizer", r.notes)}),
    (_Z, lambda r, v: {"stage": v[f"{_Z}.stage"], "rows": build.rows_of(v)}),
    ("activation_checkpointing", _remat),
)
