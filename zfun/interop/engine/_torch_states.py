"""The state of a torch optimizer, as ``optimizer.state_dict()`` has it, and a sharded state."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import CheckpointError, SpecMismatch
from zfun.flat import Flat
from zfun.interop._named import named, write_leaves
from zfun.interop.engine._groups import GROUP, ParamGroups, group_of, with_group_numbers
from zfun.interop.engine._moments import empty_state
from zfun.interop.engine._values import is_flat, parts_of, without_average
from zfun.optim import MissedSteps
from zfun.recipes import ZeroState
from zfun.transforms import unshard

TORCH_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "velocity": "momentum_buffer", "total": "sum"}
"""The names of moments in zfun, and in torch; others have torch's names."""
CONFIGURED = ("adam_w_mode", "freeze_step")
"""Constants that DeepSpeed keeps outside of groups, so they are those of the run that loads."""
_MASTER = "master"
_GIVEN = ".inner.given."


def torch_numbers(
    state: ZeroState, *, whole: bool = False, begun: Collection[str] = ()
) -> dict[str, dict[str, Tensor]]:
    """Return the numbers that torch keeps for each tensor, by leaf: of those that took a step.

    Those in ``begun`` have moments before. If ``whole``, also of the other leaves, and counts that
    torch does not keep. Of a leaf that has missed steps only their count is known.
    """
    parts = dict(zip(*parts_of(without_average(state.opt_state)[0]), strict=True))
    numbers: dict[str, dict[str, Tensor]] = {}
    late: dict[str, str] = {}
    for path, part in parts.items():
        owner, field = _owner(path)
        if not is_flat(part) or field == _MASTER:
            continue
        scalars = f"{owner}.scalars."
        beside = {x.removeprefix(scalars): y for x, y in parts.items() if x.startswith(scalars)}
        counts = "step" in beside or field in ("mu", "total") or whole
        count = int(parts[f"{owner}.count"]) if f"{owner}.count" in parts else 0
        for leaf in part.layout.paths:
            missed = state.missed.counts.get(leaf, 0)
            steps = count - missed
            if steps or whole or leaf in begun:
                entry = numbers.setdefault(leaf, {})
                entry |= {} if missed else {name: x.clone() for name, x in beside.items()}
                entry |= {"step": torch.tensor(float(steps))} if counts else {}
            if steps and missed:
                late = dict.fromkeys(beside.keys() - {"step"}, leaf) | late
    if late:
        name = min(late)
        warnings.warn(
            "the state of an optimizer has the numbers of the last step of each leaf; got leaf "
            f"{late[name]!r}, which has missed steps, and one {name!r} for all leaves, which is "
            "that of the newest step; the state has none for this leaf, so zfun loads it and torch "
            "does not; to go on in torch, use a class that keeps only a count, such as "
            "torch.optim.AdamW",
            stacklevel=2,
        )
    return numbers


def torch_state(state: ZeroState, groups: ParamGroups, *, whole: bool = False) -> dict[str, Any]:
    """Return the state of an optimizer in torch's form; every rank must call.

    If ``whole``, of every leaf, and with master weights, which torch does not have.
    """
    positions = groups.positions()
    entries = torch_numbers(state, whole=whole, begun=groups.begun)
    stepped = set(entries)
    for path, part in zip(*parts_of(without_average(state.opt_state)[0]), strict=True):
        field = _owner(path)[1]
        if is_flat(part) and (whole or field != _MASTER):
            for leaf, value in named(unshard(part)).items():
                if whole or leaf in stepped:
                    name = TORCH_NAMES.get(field, field)
                    entries.setdefault(leaf, {})[name] = value.detach().clone()
    with empty_state(groups.torch_optimizer, hooks=False) as optimizer:
        saved = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    by_position = {positions[leaf]: entry for leaf, entry in entries.items()}
    return {
        "state": dict(sorted(by_position.items())),
        "param_groups": with_group_numbers(saved, state),
    }


def by_position(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of a torch optimizer, with the places of parameters as keys of their entries.

    As in torch, the keys are those by which the groups name parameters, in their order: functions
    of ``torch.distributed.checkpoint`` take names.
    """
    groups, state = given["param_groups"], given.get("state", {})
    places = {key: i for i, key in enumerate(key for x in groups for key in x["params"])}
    if unknown := [key for key in state if key not in places]:
        raise CheckpointError(
            "the groups of an optimizer's state name the parameter of each entry; got an entry for "
            f"{unknown[0]!r}, which is in no group; pass what state_dict() of an optimizer returned"
        )
    named = [{**group, "params": [places[key] for key in group["params"]]} for group in groups]
    return {"param_groups": named, "state": {places[key]: x for key, x in state.items()}}


def with_own_constants(opt_state: Any, groups: ParamGroups, saved: Sequence[Any]) -> list[Any]:
    """Return saved parameter groups with the constants that a run keeps, and refuse others."""
    own = [{name: x[name] for name in CONFIGURED if name in x} for x in groups.groups]
    # torch refuses other numbers of groups.
    own += [dict[str, Any]()] * len(saved)
    found = [{**x, **y} for x, y in zip(saved, own, strict=False)]
    groups.check_saved(opt_state, found)
    return found


def with_torch_state(
    state: ZeroState, groups: ParamGroups, given: Mapping[str, Any], *, whole: bool = False
) -> ZeroState:
    """Return a state that goes on where an optimizer of torch was; every rank must call.

    The old state is not to be used again. If ``whole``, every leaf must be there.
    """
    if without_average(state.opt_state)[1] is not None:
        raise CheckpointError(
            "an average of parameters lies in zfun's checkpoints alone; got the state of an "
            "optimizer of torch in a run with an average; resume from the checkpoint's directory, "
            "or leave the average out"
        )
    entries = given.get("state", {})
    numbers = {
        "state": dict[int, Any](),
        "param_groups": with_own_constants(state.opt_state, groups, given["param_groups"]),
    }
    with empty_state(groups.torch_optimizer, hooks=False) as optimizer:
        torch.optim.Optimizer.load_state_dict(optimizer, numbers)
    positions = groups.positions()
    paths, parts = parts_of(state.opt_state)
    leaves: dict[str, dict[str, None]] = {}
    for path, part in zip(paths, parts, strict=True):
        if is_flat(part):
            leaves.setdefault(_owner(path)[0], {}).update(dict.fromkeys(part.layout.paths))
    new, last, missed = list[Any](), 0, dict[str, int]()
    for path, part in zip(paths, parts, strict=True):
        owner, field = _owner(path)
        own = {leaf: entries.get(positions[leaf], {}) for leaf in leaves.get(owner, ())}
        if is_flat(part) and (whole or field != _MASTER):
            part = _filled(part, TORCH_NAMES.get(field, field), own, whole=whole)
        elif GROUP in path or _GIVEN in path:
            part = torch.full_like(part, _group_number(path, given["param_groups"]))
        elif field == "count":
            # SGD does not count, and a class that keeps numbers of groups alone has no leaves here.
            steps = {leaf: int(entry.get("step", bool(entry))) for leaf, entry in own.items()}
            has_group = any(x.startswith(f"{owner}.group.") for x in paths)
            count = max(steps.values(), default=int(has_group))
            missed |= {leaf: count - x for leaf, x in steps.items() if x != count}
            part, last = torch.full_like(part, count), max(last, count)
        elif path == f"{owner}.scalars.{field}":
            part = torch.full_like(part, _number(own, field))
        new.append(part)
    made = tree.unflatten(tree.structure(state.opt_state, is_leaf=is_flat), new)
    return state._replace(
        opt_state=made,
        step=last,
        num_applied=last,
        missed=MissedSteps(dict(sorted(missed.items()))),
    )


def give_moments(state: ZeroState, groups: ParamGroups) -> None:
    """Let an optimizer of torch have the moments of a state, whole; every rank must call."""
    found = torch_state(state, groups)["state"] if state.step else {}
    groups.leave()
    with_group_numbers(groups.groups, state)
    params = [param for group in groups.groups for param in group["params"]]
    groups.torch_optimizer.state.update({params[i]: x for i, x in found.items()})


def _owner(path: str) -> tuple[str, str]:
    """Return the path of the optimizer that has a part, and the name of the part."""
    above, _, field = path.rpartition(".")
    return above.removesuffix(".trees").removesuffix(".scalars"), field


def _group_number(path: str, groups: Any) -> float:
    index, name = group_of(path, GROUP if GROUP in path else _GIVEN)
    if name not in groups[index]:
        raise CheckpointError(
            "the groups of an optimizer have the numbers that its steps write; got group "
            f"{index} without {name!r}; load the state of the same optimizer"
        )
    return float(groups[index][name])


def _filled(
    part: Flat, name: str, entries: Mapping[str, Mapping[str, Any]], *, whole: bool
) -> Flat:
    shapes = {slot.path: slot.shape for slot in part.layout.leaves}
    values: dict[str, Tensor] = {}
    for leaf in filter(shapes.__contains__, entries):
        value = entries[leaf].get(name)
        if value is None and whole:
            raise CheckpointError(
                "load_state_dict() of an engine's optimizer takes the moments of each leaf; got "
                f"none named {name!r} for leaf {leaf!r}; pass what state_dict() of an engine's "
                "optimizer returned, of the same class",
                leaf=leaf,
            )
        value = torch.zeros(shapes[leaf]) if value is None else value
        if value.shape != shapes[leaf]:
            raise SpecMismatch(
                "the state of an optimizer has the shapes of its parameters; leaf "
                f"{leaf!r} has {tuple(shapes[leaf])}; got {name} of {tuple(value.shape)}; load "
                "the state of the same optimizer",
                leaf=leaf,
            )
        values[leaf] = value
    return write_leaves(part, values)


def _number(entries: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Return a number that torch keeps for each tensor, which is one number here."""
    newest = max((float(entry.get("step", 0)) for entry in entries.values()), default=0.0)
    for leaf, entry in entries.items():
        # Leaves that have missed steps have none.
        if entry and name not in {*entry, "step"} and float(entry.get("step", 0)) == newest:
            raise CheckpointError(
                "the state of an optimizer has the numbers of the leaves that took most steps; got "
                f"no {name!r} for leaf {leaf!r}; resume from a directory that the run has saved, "
                "or use a class that keeps only a count, such as torch.optim.AdamW",
                leaf=leaf,
            )
    found = {leaf: float(entry[name]) for leaf, entry in entries.items() if name in entry}
    first = max(found.values(), default=0.0)
    for leaf, value in found.items():
        # Counts of steps are those of the leaves that have taken all.
        if value != first and name != "step":
            raise SpecMismatch(
                f"parameters of one group have one {name!r}, as an optimizer keeps it; leaf "
                f"{leaf!r} has {value:g}; got {first:g} for another; put the leaf into a group of "
                "its own",
                leaf=leaf,
            )
    return first
