"""The first state of a run, built bucket by bucket; see [Note: building] of the transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, LeafRecord, check_same, is_symmetric
from zfun.errors import OptionError
from zfun.flat import Flat
from zfun.layout import LabelFn, Layout, place, split_by_label
from zfun.optim import Optimizer
from zfun.parallel import LocalTree, ModelAxis
from zfun.placement import Placement, R, S, Sharded
from zfun.recipes._options import ZeroOptions
from zfun.reductions import checked_rule
from zfun.sources.deferred import spec_of
from zfun.sources.scratch import scratch
from zfun.stores import Store, Stored
from zfun.transforms import check_agreement, redistribute
from zfun.transforms.optimizer.by_bucket import StateBuilder
from zfun.transforms.values.building import Leaves, Target, fill, target

_Fn = Callable[[str, Any], Any]


def role_of(recipe: ZeroOptions) -> _Fn:
    """Return the function that says whether a leaf is a buffer, trained or frozen."""
    rule, trainable = recipe.buffers, recipe.trainable

    def role(path: str, leaf: Any) -> str:
        if rule is not None and rule(path, spec_of(leaf)) is not None:
            return "buffer"
        return "trained" if trainable is None or trainable(path, spec_of(leaf)) else "frozen"

    return role


def local_tree(
    recipe: ZeroOptions, params: tree.Tree, axes: Sequence[ModelAxis], init: str
) -> LocalTree:
    """Return how a logical tree is spread over the axes.

    Raises:
        OptionError: the values are to come from rank 0, the optimizer looks at whole leaves, or a
            buffer is spread although ranks write values of their own.
        SpecMismatch: ranks of a model axis have other options.
    """
    if init == "broadcast":
        raise OptionError(
            "the ranks of a model axis keep parts of one logical tree, which each of them makes; "
            "got init='broadcast'; start all ranks from one seed or one file"
        )
    for axis in axes:
        words = [LeafRecord.of_option(*word) for word in recipe.in_words().items()]
        check_same(words, axis.group, "options", kind="option")
    if _clips_by_label(recipe.optimizer):
        raise OptionError(
            "ranks of a model axis may lack the leaves of a label, and then take no part in its "
            "norm; got clip_by_global_norm() inside of by_label(); write chain("
            "clip_by_global_norm(...), by_label(...))"
        )
    whole = next((x for x in _parts(recipe.optimizer) if x.by_leaf), None)
    if whole is not None:
        raise OptionError(
            "a rule that looks at whole leaves sees the part of a leaf that a rank of a model axis "
            f"keeps; got {whole.name or 'such a rule'}; use an element-wise optimizer"
        )
    policy = recipe.precision
    role = role_of(recipe)
    local = LocalTree(params, axes, policy.param if policy.master is None else None, role)
    _check_buffers(recipe, local, axes)
    return local


def _check_buffers(recipe: ZeroOptions, local: LocalTree, axes: Sequence[ModelAxis]) -> None:
    """Refuse spread buffers into which ranks write other values; all ranks raise alike."""
    if recipe.buffers is None:
        return
    for path, leaf in local.specs.items():
        spread = local.spreads[path]
        if local.roles[path] != "buffer" or not any(spread):
            continue
        if any(x.has_batches and kind for x, kind in zip(axes, spread, strict=True)):
            raise OptionError(
                f"a buffer is whole on the ranks of an expert axis; got {path!r}, which "
                "expert_parallel() cuts; name other leaves in experts= and gathered=",
                leaf=path,
            )
        if checked_rule(recipe.buffers)(path, leaf) == "by rank":
            raise OptionError(
                "a buffer with the rule 'by rank' is whole on every rank; got one that is spread "
                f"over a model axis, {path!r}; use 'mean' or 'rank 0', or keep it whole",
                leaf=path,
            )


def _clips_by_label(optimizer: Optimizer) -> bool:
    return any(
        _clips_by_label(part) or (optimizer.name == "by_label" and _clips(part))
        for part in optimizer.parts
    )


def _clips(optimizer: Optimizer) -> bool:
    return optimizer.name == "clip_by_global_norm" or any(map(_clips, optimizer.parts))


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that an optimizer is composed of, or itself."""
    if not optimizer.parts:
        yield optimizer
    for part in optimizer.parts:
        yield from _parts(part)


def first_values(
    recipe: ZeroOptions,
    params: tree.Tree,
    role: _Fn,
    init: str,
    local: LocalTree | None = None,
) -> tuple[Flat, Flat | None, Any]:
    """Return the trained parameters, the frozen ones, and the optimizer's state.

    The tree has no buffers; ``role`` says whether a leaf is ``"trained"``. ``local`` made the tree,
    if the loss goes over model axes.
    """
    stage, group, policy, offload = recipe.stage, recipe.group, recipe.precision, recipe.offload
    # Master weights keep the bits that rounding drops, so compare the unrounded values.
    values = "values" if policy.master is None else "unrounded"
    placement_rule, codecs = recipe.placement, recipe.compression
    is_coded = codecs.grads is not None or codecs.params is not None
    if local is not None and not (placement_rule is None or isinstance(placement_rule, Sharded)):
        placement_rule = local.asks(placement_rule)

    def layout_for(part: tree.Tree, labels: LabelFn | None) -> Layout:
        layout = check_agreement(
            part,
            group,
            bucket_bytes=recipe.bucket_bytes,
            persistence=recipe.schedule.persistence if stage == 3 else 0,
            order=recipe.order,
            dtype=policy.param,
            compare=values if init == "check" else "forms",
            placement=placement_rule,
        )
        layout = layout if local is None else local.placed(layout, is_coded=is_coded)
        layout = layout if labels is None else split_by_label(layout, labels)
        return layout if recipe.placement is None else place(layout, recipe.placement, group.size)

    chosen, rest = params, None
    if recipe.trainable is not None:
        chosen, rest = tree.partition(params, lambda path, leaf: role(path, leaf) == "trained")
    rule = recipe.rule
    layouts = [layout_for(chosen, rule.labels)]
    if rest is not None and tree.leaves(rest):
        layouts.append(layout_for(rest, None))
    is_shared = stage in (1, 2) and is_symmetric(group)
    placement = S if stage == 3 or is_shared else R
    dtypes = [_wider(slot.dtype, policy.master) for slot in layouts[0].buckets]
    states = StateBuilder(
        recipe.placed_rule,
        rule.init,
        layouts[0],
        dtypes,
        rule.placement or placement,
        rule.group or group,
        offload.optimizer,
        offload.fraction,
    )
    rounded = policy.param if policy.master is None else None
    leaves = Leaves(params, group, init, compared_as=rounded)
    built = [
        _built(leaves, layout, placement, group, offload.params, states if index == 0 else None)
        for index, layout in enumerate(layouts)
    ]
    state = leaves.attempt("optimizer state", states.result)
    if local is None:
        leaves.check()
    else:
        local.check(leaves.check)
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
