"""The state of a torch optimizer, as ``optimizer.state_dict()`` has it, and a sharded state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import SpecMismatch
from zfun.flat import Flat
from zfun.interop._named import write_leaves
from zfun.interop.engine._groups import ParamGroups
from zfun.interop.engine._values import is_flat, parts_of
from zfun.recipes import ZeroState
from zfun.transforms import unshard

__all__ = ["TORCH_NAMES", "torch_state", "with_torch_state"]

TORCH_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "velocity": "momentum_buffer", "total": "sum"}
"""The names of moments in zfun, and in torch; others have torch's names."""
# Masters are the parameters of the file.
_MASTER = "master"


def torch_state(state: ZeroState, groups: ParamGroups) -> dict[str, Any]:
    """Return the state of an optimizer in torch's form, whole; every rank must call.

    Args:
        state: of a run.
        groups: of the optimizer.
    """
    parts = dict(zip(*parts_of(state.opt_state), strict=True))
    positions, entries = groups.positions(), dict[int, dict[str, Any]]()
    for path, part in parts.items():
        owner, field = _owner(path)
        count = int(parts.get(f"{owner}.count", 0))
        if not is_flat(part) or field == _MASTER or not count:
            continue
        beside = {
            name.rpartition(".")[2]: x
            for name, x in parts.items()
            if name.startswith(f"{owner}.scalars.")
        }
        if field in ("mu", "total"):
            beside["step"] = torch.tensor(float(count))
        for leaf, value in _named(unshard(part)).items():
            entry = entries.setdefault(positions[leaf], {})
            entry[TORCH_NAMES.get(field, field)] = value.detach().clone()
            entry |= {name: x.clone() for name, x in beside.items()}
    saved = torch.optim.Optimizer.state_dict(groups.torch_optimizer)
    return {"state": dict(sorted(entries.items())), "param_groups": saved["param_groups"]}


def with_torch_state(state: ZeroState, groups: ParamGroups, given: Mapping[str, Any]) -> ZeroState:
    """Return a state that goes on where an optimizer of torch was; every rank must call.

    Args:
        state: of a run; not to be used again.
        groups: of the optimizer, which take the numbers of its groups.
        given: as ``optimizer.state_dict()`` returns.

    Raises:
        SpecMismatch: an entry has another shape, or leaves of one group have different counts.
    """
    optimizer, entries = groups.torch_optimizer, given["state"]
    numbers = {"state": {}, "param_groups": given["param_groups"]}
    torch.optim.Optimizer.load_state_dict(optimizer, numbers)
    positions = groups.positions()
    paths, parts = parts_of(state.opt_state)
    leaves: dict[str, set[str]] = {}
    for path, part in zip(paths, parts, strict=True):
        if is_flat(part):
            leaves.setdefault(_owner(path)[0], set()).update(part.layout.paths)
    new, steps = list[Any](), 0
    for path, part in zip(paths, parts, strict=True):
        owner, field = _owner(path)
        own = {leaf: entries.get(positions[leaf], {}) for leaf in leaves.get(owner, ())}
        if is_flat(part) and field != _MASTER:
            part = _filled(part, TORCH_NAMES.get(field, field), own)
        elif isinstance(part, Tensor) and (field == "count" or path == f"{owner}.scalars.{field}"):
            found = _number(own, "step" if field == "count" else field)
            part = torch.full_like(part, found)
            steps = max(steps, int(part)) if field == "count" else steps
        new.append(part)
    made = tree.unflatten(tree.structure(state.opt_state, is_leaf=is_flat), new)
    return state._replace(opt_state=made, step=steps, num_applied=steps)


def _owner(path: str) -> tuple[str, str]:
    """Return the path of the optimizer that has a part, and the name of the part."""
    above, _, field = path.rpartition(".")
    return above.removesuffix(".trees").removesuffix(".scalars"), field


def _named(whole: Any) -> dict[str, Tensor]:
    return dict(zip(tree.paths(whole), tree.leaves(whole), strict=True))


def _filled(part: Flat, name: str, entries: Mapping[str, Mapping[str, Any]]) -> Flat:
    shapes = {slot.path: slot.shape for slot in part.layout.leaves}
    values: dict[str, Tensor] = {}
    for leaf, entry in entries.items():
        value = entry.get(name)
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
    # SGD does not count.
    default = float(any(entries.values())) if name == "step" else 0.0
    found = {leaf: float(entry.get(name, default)) for leaf, entry in entries.items()}
    first = next(iter(found.values()), 0.0)
    for leaf, value in found.items():
        if value != first:
            raise SpecMismatch(
                f"parameters of one group have taken the same steps; leaf {leaf!r} has "
                f"{name} = {value:g}; got {first:g} for another; put the leaf into a group of "
                "its own",
                leaf=leaf,
            )
    return first
