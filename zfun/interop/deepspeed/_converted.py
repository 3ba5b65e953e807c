"""Checkpoints that DeepSpeed wrote, as they are or converted, for an engine to go on from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import checkpoint, sources
from zfun.errors import CheckpointError
from zfun.interop._named import masters_of
from zfun.interop.deepspeed.utils import zero_to_fp32
from zfun.interop.engine import Engine
from zfun.interop.engine._torch_states import TORCH_NAMES, torch_numbers
from zfun.sources import TrainingState

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
    """

    state: TrainingState
    data: dict[str, Any]
    is_own: bool


def opened(path: Path) -> Opened:
    """Open the directory of one tag."""
    if any(path.glob("*model_states.pt")):
        found = sources.deepspeed(path)
        return Opened(found, _data_of(found.values, found.step), is_own=False)
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
    core: Engine, saved: Opened, weights: Mapping[str, Tensor], numbers: Sequence[Any]
) -> None:
    """Take the optimizer of DeepSpeed, and its loss scale; every rank must call.

    Args:
        core: the engine.
        saved: the checkpoint.
        weights: its parameters, for master weights.
        numbers: of the parameter groups; the engine's own stay where they are not there.
    """
    groups, found = core._torch_groups(), saved.state
    positions, params = groups.positions(), itertools.count()
    known = {name for entry in torch_numbers(core.state, whole=True).values() for name in entry}
    origin = found.params.origin
    if strange := known - {"step"}:
        raise _refused(f"{origin}, without {min(strange)!r} of a parameter")
    num_groups = len(zero_to_fp32.unpacked(saved.data["groups"]))
    if num_groups not in (0, len(groups.groups)):
        raise _refused(f"{origin}, with {num_groups} parameter groups for {len(groups.groups)}")
    first = {"step": torch.tensor(float(found.step))} if found.step is not None else {}
    has_masters = next(masters_of(core.state.opt_state), None) is not None
    entries: dict[int, dict[str, Tensor]] = {}
    for path, moment in found.moments.items():
        field = path.rpartition(".")[2]
        here = {id(x) for leaf, x in moment.items() if leaf in positions}
        for leaf, value in moment.items():
            if id(value) not in here:
                raise _refused(f"{origin}, with {path!r} of {leaf!r}, which is in no group")
            if leaf not in positions:  # another name of a tied parameter
                continue
            entry = entries.setdefault(positions[leaf], dict(first))
            entry[TORCH_NAMES.get(field, field)] = value.load()
            if has_masters:
                entry["master"] = weights[leaf].float()
    packed = [
        {**group, **own, "params": [next(params) for _ in group["params"]]}
        for group, own in zip(groups.groups, numbers, strict=True)
    ]
    try:
        core.load_optimizer_state({"state": entries, "param_groups": packed}, whole=True)
    except CheckpointError as error:
        raise _refused(f"{origin}: {error}") from error
    if (scale := core.state.loss_scale) is not None:
        own = {name: getattr(scale, name) for name in scale._fields}
        new = {
            name: torch.full_like(x, saved.data["scale"].get(name, x)) for name, x in own.items()
        }
        core.state = core.state._replace(loss_scale=scale._replace(**new))


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
