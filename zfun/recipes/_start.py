"""The first state of a run, built bucket by bucket; see [Note: building] of the transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, is_symmetric
from zfun.flat import Flat
from zfun.layout import LabelFn, Layout, place, split_by_label
from zfun.optim import Optimizer
from zfun.placement import Placement, PlacementRule, R, S, Sharded
from zfun.recipes._precision import Precision
from zfun.sources.deferred import spec_of
from zfun.sources.scratch import scratch
from zfun.stores import Offload, Store, Stored
from zfun.transforms import check_agreement, redistribute
from zfun.transforms.optimizer.by_bucket import StateBuilder
from zfun.transforms.values.building import Leaves, Target, fill, target

_Fn = Callable[[str, Any], Any]


def of_specs(fn: _Fn) -> _Fn:
    """Let a function of paths and leaves see the spec of a deferred leaf."""
    return lambda path, leaf: fn(path, spec_of(leaf))


def first_values(
    params: tree.Tree,
    group: Group,
    stage: int,
    rules: tuple[Optimizer, Optimizer],
    *,
    init: str,
    policy: Precision,
    trainable: _Fn | None,
    bucket_bytes: int,
    persistence: int,
    order: Sequence[str] | None,
    offload: Offload,
    cut: Sharded | PlacementRule | None,
) -> tuple[Flat, Flat | None, Any]:
    """Return the trained parameters, the frozen ones, and the optimizer's state.

    Args:
        params: a tree of tensors and deferred leaves, without buffers.
        group: of the run.
        stage: of the run.
        rules: the optimizer before and after it is offloaded.
        init: ``"check"`` or ``"broadcast"``.
        policy: the dtypes of parameters and of master weights.
        trainable: chooses the trained leaves; by default all.
        bucket_bytes: where a bucket closes.
        persistence: the largest leaves of separate buckets.
        order: of the leaves in the buckets.
        offload: the stores.
        cut: how ranks cut the buckets; by default in equal pieces.
    """
    placed, rule = rules
    # The master weights start from the digits that rounding removes, so ranks must agree on them.
    compared_as = policy.param if policy.master is None else None

    def layout_for(part: tree.Tree, labels: LabelFn | None) -> Layout:
        layout = check_agreement(
            part,
            group,
            bucket_bytes=bucket_bytes,
            persistence=persistence,
            order=order,
            values=init == "check",
            dtype=policy.param,
            compared_as=compared_as,
            placement=cut,
        )
        layout = layout if labels is None else split_by_label(layout, labels)
        return layout if cut is None else place(layout, cut, group.size)

    chosen, rest = (
        (params, None) if trainable is None else tree.partition(params, of_specs(trainable))
    )
    layouts = [layout_for(chosen, rule.labels)]
    if rest is not None and tree.leaves(rest):
        layouts.append(layout_for(rest, None))
    is_shared = stage in (1, 2) and is_symmetric(group)
    placement = S if stage == 3 or is_shared else R
    dtypes = [_wider(slot.dtype, policy.master) for slot in layouts[0].buckets]
    states = StateBuilder(
        placed,
        rule.init,
        layouts[0],
        dtypes,
        rule.placement or placement,
        rule.group or group,
        offload.optimizer,
        offload.fraction,
    )
    leaves = Leaves(params, group, init, compared_as=compared_as)
    built = [
        _built(leaves, layout, placement, group, offload.params, states if index == 0 else None)
        for index, layout in enumerate(layouts)
    ]
    state = leaves.attempt("optimizer state", states.result)
    leaves.check()
    if is_shared:
        # Over ranks that share memory, each rank owns one part of the whole, and updates this part.
        built = [redistribute(flat, R, group, name="params", zero_copy=True) for flat in built]
    return built[0], built[1] if len(built) > 1 else None, state


def _built(
    leaves: Leaves,
    layout: Layout,
    placement: Placement,
    group: Group,
    store: Store | None,
    states: StateBuilder | None,
) -> Flat:
    """Build parameters, and with ``states`` the state of the optimizer from unrounded ones."""
    buffers: list[Any] = []
    for bucket, slot in enumerate(layout.buckets):
        own = target(layout, bucket, placement, group)
        targets = [own]
        exact = Flat([own.buffer], placement, layout.select([bucket]), group)
        if states is not None and states.dtypes[bucket] != slot.dtype:
            targets.append(_unshared(layout, bucket, states))
            exact = Flat(
                [targets[1].buffer], states.placement, layout.select([bucket]), states.group
            )
        fill(leaves, layout, bucket, targets)
        del targets
        name = layout.label(bucket)
        if states is not None:
            leaves.attempt(name, functools.partial(states.add, bucket, exact))
        del exact
        buffers.append(
            own.buffer
            if store is None
            else leaves.attempt(name, functools.partial(_kept, store, own.buffer))
        )
        del own
    return Flat(buffers, placement, layout, group)


def _wider(dtype: torch.dtype, master: torch.dtype | None) -> torch.dtype:
    return master if master is not None and dtype.itemsize < master.itemsize else dtype


def _unshared(layout: Layout, bucket: int, states: StateBuilder) -> Target:
    """Return a buffer for unrounded parameters, until the optimizer has a copy."""
    start, stop = Flat((), states.placement, layout, states.group).span(bucket)
    return Target(scratch((stop - start,), states.dtypes[bucket], layout.device), start)


def _kept(store: Store, buffer: Tensor) -> Stored:
    """Put a buffer into a store, and wait, so that no second buffer is on the way."""
    handle = store.put(buffer, "params")
    handle.flush()
    return handle
