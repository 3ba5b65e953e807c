"""The whole state of an optimizer by leaf: moments, master weights, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import CheckpointError
from zfun.flat import Flat
from zfun.interop._named import write_leaves
from zfun.interop.engine._values import parts_of
from zfun.optim import MissedSteps
from zfun.recipes import ZeroState
from zfun.transforms import unshard

__all__ = ["FIELDS", "moments_of", "with_moments"]

# The fields of zfun's optimizers, and torch's. A count is the number of steps of a leaf.
FIELDS = {
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "velocity": "momentum_buffer",
    "total": "sum",
    "count": "step",
}


def moments_of(state: ZeroState) -> dict[str, dict[str, Tensor]]:
    """Return what ``optimizer.state`` would be, by the name of the leaf; every rank must call.

    Master weights stand beside the moments, as ``"master"``.

    Args:
        state: of a run.

    Raises:
        CheckpointError: the optimizer has a state that belongs to no leaf.
    """
    found: dict[str, dict[str, Tensor]] = {}
    parts = _parts(state)
    for owner, field, part in parts:
        if isinstance(part, Flat):
            whole = unshard(part)
            for name, value in zip(tree.paths(whole), tree.leaves(whole), strict=True):
                found.setdefault(name, {})[FIELDS.get(field, field)] = value.clone()
        else:
            late = state.missed.counts if field in ("count", "step") else {}
            for name in _leaves(parts, owner):
                number = part.float() - late.get(name, 0)
                found.setdefault(name, {})[FIELDS.get(field, field)] = number
    return found


def with_moments(state: ZeroState, given: Mapping[str, Mapping[str, Any]]) -> ZeroState:
    """Return a state with what :func:`moments_of` returned; every rank must call.

    Args:
        state: of a run; not to be used again.
        given: by the name of the leaf.

    Raises:
        CheckpointError: a moment of a leaf is missing.
    """
    parts = _parts(state)
    steps = {name: int(held["step"]) for name, held in given.items() if "step" in held}
    missed: dict[str, int] = {}
    moved: list[Any] = []
    for owner, field, part in parts:
        key, names = FIELDS.get(field, field), _leaves(parts, owner)
        for name in names:
            if key not in given.get(name, {}):
                raise CheckpointError(
                    "load_state_dict() of an engine's optimizer takes the moments of each leaf; "
                    f"got none named {key!r} for leaf {name!r}; pass what state_dict() of an "
                    "engine's optimizer returned, of the same class",
                    leaf=name,
                )
        if isinstance(part, Flat):
            own = {name: torch.as_tensor(given[name][key]) for name in part.layout.paths}
            moved.append(write_leaves(part, own))
        elif field == "count" and names:
            last = max(steps[name] for name in names)
            missed |= {name: last - steps[name] for name in names if steps[name] != last}
            moved.append(torch.full_like(part, last))
        elif names:
            moved.append(torch.as_tensor(given[names[0]][key]).to(part.dtype).reshape(part.shape))
        else:
            moved.append(part)
    structure = tree.structure(state.opt_state, is_leaf=lambda x: isinstance(x, Flat))
    paths, leaves = parts_of(state.opt_state)
    fresh = iter(moved)
    new = [next(fresh) if _is_state(path, x) else x for path, x in zip(paths, leaves, strict=True)]
    return state._replace(
        opt_state=tree.unflatten(structure, new),
        missed=MissedSteps(dict(sorted(missed.items()))),
    )


def _parts(state: ZeroState) -> list[tuple[str, str, Any]]:
    """Return owner, field and value of each part of a state that is no hyperparameter."""
    found: list[tuple[str, str, Any]] = []
    for path, part in zip(*parts_of(state.opt_state), strict=True):
        if _is_state(path, part):
            owner, _, field = path.rpartition(".")
            found.append((owner.removesuffix(".trees").removesuffix(".scalars"), field, part))
        elif isinstance(part, Tensor) and ".hyperparams." not in f".{path}":
            raise CheckpointError(
                "state_dict() of an engine's optimizer has states of leaves; got "
                f"{path!r}, which belongs to none; use save_checkpoint() of the engine"
            )
    return found


def _is_state(path: str, part: Any) -> bool:
    words = path.split(".")
    is_number = isinstance(part, Tensor) and (words[-1] == "count" or "scalars" in words)
    return "hyperparams" not in words and (isinstance(part, Flat) or is_number)


def _leaves(parts: Sequence[tuple[str, str, Any]], owner: str) -> list[str]:
    """Return the leaves whose states an owner has."""
    flats = [x for where, _, x in parts if where == owner and isinstance(x, Flat)]
    return list(dict.fromkeys(path for flat in flats for path in flat.layout.paths))
