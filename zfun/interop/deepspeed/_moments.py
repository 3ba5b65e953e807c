"""The moments of an engine's state, leaf by leaf, under the names that torch gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import stores, tree
from zfun.collectives import barrier, mesh_of
from zfun.errors import CheckpointError, OptionError
from zfun.flat import Flat, leaf_spans
from zfun.interop._named import write_leaves
from zfun.interop.engine import Engine
from zfun.optim import LossScaleState, MissedSteps

__all__ = ["Entry", "dict_of", "entries", "load_dict", "local_of", "write_local"]

# torch's names for the fields of zfun's states.
_NAMES = {"mu": "exp_avg", "nu": "exp_avg_sq", "velocity": "momentum_buffer", "total": "sum"}


class Entry(NamedTuple):
    """The values of one leaf in one field of the optimizer's state.

    Attributes:
        key: the name of the field, as torch has it; one name stands once for each leaf.
        leaf: the name of the leaf.
        flat: of which the leaf is a part.
    """

    key: str
    leaf: str
    flat: Flat


def entries(engine: Engine) -> Iterator[Entry]:
    """Yield the moments and master weights of each leaf."""
    used: set[tuple[str, str]] = set()
    for path, part in _parts(engine.state.opt_state):
        if isinstance(part, Flat):
            field = path.rpartition(".")[2]
            for leaf in part.layout.paths:
                name = key = _NAMES.get(field, field)
                count = 1
                while (leaf, key) in used:
                    key, count = f"{name}.{count}", count + 1
                used.add((leaf, key))
                yield Entry(key, leaf, part)


def local_of(flat: Flat, leaf: str) -> Tensor:
    """Return this rank's elements of a leaf as a vector: a view, unless a store has them."""
    held = stores.resident(flat)
    span = next(span for span in leaf_spans(held) if span.path == leaf)
    return held.buffers[span.bucket][span.start : span.stop]


def write_local(flat: Flat, leaf: str, value: Tensor) -> None:
    """Write this rank's elements of a leaf, in place."""
    check_memory(flat)
    size = local_of(flat, leaf).numel()
    if value.numel() != size:
        raise CheckpointError(
            f"this rank has {size} elements of leaf {leaf!r}; got {value.numel()}; pass values of "
            "this rank, at the same stage and number of ranks"
        )
    write_leaves(flat, {leaf: value}, local=True)


def check_memory(flat: Flat) -> None:
    """Refuse to write to a state that is in a store."""
    if not all(isinstance(buffer, Tensor) for buffer in flat.buffers):
        raise OptionError(
            "single values are written to a state in memory; got a state in a store; leave "
            "offload_optimizer out, or save and load with engine.save_checkpoint()"
        )


def dict_of(engine: Engine, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the groups, moments and counts of this rank in the form of torch."""
    indices = _indices(engine, groups)
    found: dict[Any, dict[str, Tensor]] = {}
    for key, leaf, flat in entries(engine):
        found.setdefault(indices[leaf], {})[key] = local_of(flat, leaf).clone()
    state, ranks = engine.state, engine.state.params.group
    numbers = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
    return {
        "state": found,
        "param_groups": [
            {**group, "params": [numbers[id(p)] for p in group["params"]]} for group in groups
        ],
        "zfun": {
            "rank": [ranks.rank, ranks.size],
            "counts": {path: x.clone() for path, x in _parts(state.opt_state) if _is_count(x)},
            "steps": [state.step, state.num_skipped, state.num_applied],
            "loss_scale": [x.clone() for x in state.loss_scale or ()],
            "missed": dict(state.missed.counts),
        },
    }


def load_dict(engine: Engine, groups: list[dict[str, Any]], given: Mapping[str, Any]) -> None:
    """Take what :func:`dict_of` has returned on this rank; every rank must call."""
    record, moments = given.get("zfun"), given.get("state")
    if record is None or moments is None:
        raise CheckpointError(
            "an engine's optimizer loads its own state_dict(), with moments; got a dict with "
            f"{sorted(given)}; load the directory of a checkpoint with engine.load_checkpoint()"
        )
    ranks = engine.state.params.group
    if list(record["rank"]) != [ranks.rank, ranks.size]:
        raise CheckpointError(
            f"a rank loads its own moments; got those of rank {record['rank'][0]} of "
            f"{record['rank'][1]} on rank {ranks.rank} of {ranks.size}; save "
            "optimizer.state_dict() on each rank, or use engine.save_checkpoint()"
        )
    indices = _indices(engine, groups)
    wanted = list(entries(engine))
    for key, leaf, _ in wanted:
        if key not in moments.get(indices[leaf], {}):
            raise CheckpointError(
                f"a state_dict() has the moments of each leaf; got none named {key!r} for leaf "
                f"{leaf!r}; load the state_dict() of an engine with the same optimizer"
            )
    for key, leaf, flat in wanted:
        write_local(flat, leaf, moments[indices[leaf]][key])
    for group, saved in zip(groups, given["param_groups"], strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    state, counts = engine.state, record["counts"]
    parts = [
        counts[path].clone() if _is_count(part) else part for path, part in _parts(state.opt_state)
    ]
    step, num_skipped, num_applied = record["steps"]
    scale = record["loss_scale"]
    engine.state = state._replace(
        opt_state=tree.unflatten(tree.structure(state.opt_state, _is_flat), parts),
        step=step,
        num_skipped=num_skipped,
        num_applied=num_applied,
        loss_scale=LossScaleState(*(x.clone() for x in scale)) if scale else None,
        missed=MissedSteps(record["missed"]),
    )
    barrier(mesh_of(ranks))


def _indices(engine: Engine, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of each leaf among the parameters of the groups."""
    numbers = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
    return {name: numbers.get(id(param), name) for name, param in engine.leaves.items()}


def _is_flat(value: Any) -> bool:
    return isinstance(value, Flat)


def _is_count(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _parts(state: Any) -> list[tuple[str, Any]]:
    leaves, _ = tree.flatten(state, _is_flat)
    return list(zip(tree.paths(state, _is_flat), leaves, strict=True))
