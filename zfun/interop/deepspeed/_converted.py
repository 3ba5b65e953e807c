"""Checkpoints that DeepSpeed wrote, as they are or converted, for an engine to go on from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import checkpoint, sources
from zfun.errors import CheckpointError, SpecMismatch
from zfun.interop._named import masters_of
from zfun.interop.deepspeed.utils import zero_to_fp32
from zfun.interop.engine import Engine
from zfun.interop.engine._torch_states import TORCH_NAMES, torch_numbers
from zfun.sources import TrainingState
from zfun.sources.unsharded import Unsharded, optimizer_of

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# The keys of a model's file that DeepSpeed does not return as client state.
_OWN = (
    *COUNTERS,
    *("sparse_tensor_module_names", "dp_world_size", "mp_world_size", "data_sampler"),
    *("random_ltd", "optimizer", "lr_scheduler"),
)
# The rule and the state of a loss scale, by the names of DeepSpeed.
_RULE = {
    "fp16.loss_scale_window": "scale_window",
    "fp16.hysteresis": "delayed_shift",
    "fp16.min_loss_scale": "min_scale",
    "fp16.consecutive_hysteresis": "consecutive_hysteresis",
}
_SCALE = {
    "scale": "cur_scale",
    "hysteresis": "cur_hysteresis",
    "count": "cur_iter",
    "last_overflow": "last_overflow_iter",
}


class Opened(NamedTuple):
    """A checkpoint of an engine or of DeepSpeed.

    Attributes:
        state: the parameters, buffers and moments.
        data: the counters, the scheduler and the client state, as an engine saves them.
        is_own: whether an engine saved it.
        unsharded: the optimizer of DeepSpeed without ZeRO, which names no parameters.
    """

    state: TrainingState
    data: dict[str, Any]
    is_own: bool
    unsharded: Unsharded | None = None


def opened(path: Path, *, with_optimizer: bool) -> Opened:
    """Open the directory of one tag."""
    if any(path.glob("*model_states.pt")):
        found = sources.deepspeed(path)
        own = optimizer_of(path) if with_optimizer else None
        values = found.values if own is None else {**found.values, "optimizer": own.numbers}
        return Opened(found, _data_of(values, found.step), is_own=False, unsharded=own)
    if not path.is_dir() or checkpoint.latest(path) is None:
        raise CheckpointError(
            f"load_checkpoint() takes a directory of save_checkpoint() and a tag; got {str(path)!r}"
            ", which has no checkpoint; pass the tag of one, or leave the tag out"
        )
    found = checkpoint.training_state(path)
    data: Any = found.values.get("data") or {}
    if "converted_from" not in checkpoint.manifest_at(path, None)[1].composition:
        return Opened(found, data, is_own=True)
    return Opened(found, _data_of(data, found.step), is_own=False)


def is_weight(key: str) -> bool:
    """Whether a leaf of a state is a parameter or a buffer."""
    return key.partition(".")[0] in ("params", "frozen", "buffers")


def _data_of(values: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return what DeepSpeed tells of a run, in the form of an engine's own checkpoints."""
    numbers = values.get("optimizer") or {}
    scaler = numbers.get("loss_scaler") or {}
    constant = 0 if scaler.get("dynamic", True) else scaler.get("cur_scale", 0)
    groups = {
        str(i): {name: x for name, x in group.items() if name != "params"}
        for i, group in enumerate(numbers.get("param_groups", ()))
    }
    return {
        **zero_to_fp32.packed({name: x for name, x in values.items() if name not in _OWN}),
        "counters": {"global_steps": step or 0}
        | {name: values[name] for name in COUNTERS if name in values},
        "lr_scheduler": values.get("lr_scheduler"),
        "loss_scale": {key: scaler[name] for key, name in _RULE.items() if name in scaler}
        | ({"fp16.loss_scale": constant} if scaler else {}),
        "scale": {key: scaler[name] for key, name in _SCALE.items() if name in scaler},
        "groups": zero_to_fp32.packed(groups),
    }


def take_optimizer(
    core: Engine, saved: Opened, weights: dict[str, Tensor], numbers: Sequence[Any]
) -> None:
    """Take the optimizer of DeepSpeed, and its loss scale; every rank must call.

    Args:
        core: the engine.
        saved: the checkpoint.
        weights: its parameters, for master weights; gets those that the optimizer has.
        numbers: of the parameter groups; the engine's own stay where they are not there.
    """
    groups, found = core._torch_groups(), saved.state
    params, origin = itertools.count(), found.params.origin
    num_groups = len(zero_to_fp32.unpacked(saved.data["groups"]))
    if not (num_groups or found.moments):
        raise _refused(f"{origin}, without an optimizer")
    if num_groups not in (0, len(groups.groups)):
        raise _refused(f"{origin}, with {num_groups} parameter groups for {len(groups.groups)}")
    entries = _entries(core, saved, weights)
    packed = [
        {**group, **own, "params": [next(params) for _ in group["params"]]}
        for group, own in zip(groups.groups, numbers, strict=True)
    ]
    try:
        core.load_optimizer_state({"state": entries, "param_groups": packed}, whole=True)
    except (CheckpointError, SpecMismatch) as error:
        raise _refused(f"{origin}: {error}") from error
    if (scale := core.state.loss_scale) is not None:
        own = {name: getattr(scale, name) for name in scale._fields}
        new = {
            name: torch.full_like(x, saved.data["scale"].get(name, x)) for name, x in own.items()
        }
        core.state = core.state._replace(loss_scale=scale._replace(**new))


def _entries(core: Engine, saved: Opened, weights: dict[str, Tensor]) -> dict[int, Any]:
    """Return moments and master weights in torch's form."""
    positions, step = core._torch_groups().positions(), saved.state.step
    first = {} if step is None else {"step": torch.tensor(float(step))}
    found = _by_name(core, saved) if saved.unsharded is None else _by_place(core, saved)
    has_masters = next(masters_of(core.state.opt_state), None) is not None
    entries: dict[int, dict[str, Tensor]] = {}
    for leaf, place in positions.items():
        entry = found.get(place, {})
        weights |= {leaf: entry.pop("master")} if "master" in entry else {}
        # Stage 0 has master weights of frozen parameters too.
        if entry or (place in found and leaf in core.state.params.layout.paths):
            own = {"master": weights[leaf].float()} if has_masters else {}
            entries[place] = {**first, **entry, **own}
    return entries


def _by_place(core: Engine, saved: Opened) -> dict[int, dict[str, Any]]:
    """Return what stage 0 keeps of each parameter, by place."""
    assert saved.unsharded is not None
    size = sum(len(group["params"]) for group in core._torch_groups().groups)
    if (count := len(saved.unsharded.places)) != size:
        what = f"with {count} parameters in groups for {size}"
        raise _refused(f"{saved.state.params.origin}, {what}")
    return saved.unsharded.read()


def _by_name(core: Engine, saved: Opened) -> dict[int, dict[str, Any]]:
    """Return the moments that other stages keep, by place."""
    found, positions = saved.state, core._torch_groups().positions()
    origin, entries = found.params.origin, dict[int, dict[str, Any]]()
    known = {name for entry in torch_numbers(core.state, whole=True).values() for name in entry}
    if strange := known - {"step"}:
        raise _refused(f"{origin}, without {min(strange)!r} of a parameter")
    for path, moment in found.moments.items():
        field = path.rpartition(".")[2]
        here = {id(x) for leaf, x in moment.items() if leaf in positions}
        for leaf, value in moment.items():
            if id(value) not in here:
                raise _refused(f"{origin}, with {path!r} of {leaf!r}, which is in no group")
            if leaf in positions:  # else another name of a tied parameter
                entry = entries.setdefault(positions[leaf], {})
                entry[TORCH_NAMES.get(field, field)] = value.load()
    return entries


def check_trained(saved: Opened) -> None:
    """Refuse an engine's checkpoint without the optimizer that a load goes on with."""
    # Earlier checkpoints have the rates in place of the groups.
    if not (zero_to_fp32.unpacked(saved.data.get("groups", {})) or saved.data.get("lr")):
        raise _refused(f"{saved.state.params.origin}, of an engine without an optimizer")


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        "load_checkpoint() goes on with the optimizer of the saved run; got a checkpoint of "
        f"{what}; write the optimizer and the groups of that run into the configuration, or pass "
        "load_optimizer_states=False for new moments"
    )
