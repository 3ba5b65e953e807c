"""Shard an optimizer's state: ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zfun import stores, tree
from zfun.collectives import Group, await_readers, check_shardable, sum_group
from zfun.errors import PlacementError
from zfun.flat import Flat, change_layout, ravel, unravel
from zfun.layout import DEFAULT_BUCKET_BYTES, layout_of
from zfun.optim import Optimizer, PrepareInner, as_optimizer
from zfun.options import takes
from zfun.placement import S
from zfun.transforms.optimizer._placing import is_placed, layout_for, lift, lower
from zfun.transforms.optimizer._probe import check_padding, probe
from zfun.transforms.values._agreement import check_agreement
from zfun.transforms.values._redistribute import redistribute


@takes()
def shard_optimizer(
    optimizer: Any, group: Group, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Optimizer:
    """Let each rank keep and update one part of the state: ZeRO-1 (state ``S``).

    Args:
        optimizer: a :class:`zfun.optim.Optimizer` that is element-wise or looks for leaves by
            itself, or an ``(init, update)`` pair.
        group: the ranks that share the state: a group, a mesh, or the inner axis of one.
        bucket_bytes: the most bytes of a bucket, for parameters that are not flat yet.

    Returns:
        An optimizer with sharded state, for parameters and gradients of any placement; new
        parameters have the placement of the old.

    Raises:
        NotElementwiseError: at once, where a probe finds that the optimizer mixes elements.

    Example:
        >>> import torch, zfun as zf
        >>> def main(group):
        ...     optimizer = zf.shard_optimizer(zf.optim.adamw(0.1), group)
        ...     state = optimizer.init({"w": torch.ones(50)})
        ...     return state.mu
        >>> zf.simulate(2, main)[0]
        Flat(S, rank 0 of 2: 1 leaf, 50 elements in 1 bucket; here 32 of 64 padded elements)
    """
    check_shardable(group, "shard_optimizer()")
    inner = as_optimizer(optimizer)
    if inner.placement not in (None, S):
        raise PlacementError(
            "shard_optimizer() takes an optimizer that follows its parameters; got one that "
            f"computes in {inner.placement!r}; shard it once, innermost"
        )
    probe(inner)

    def init(params: tree.Tree) -> Any:
        if not isinstance(params, Flat):
            check_agreement(params, group, bucket_bytes=bucket_bytes)
            params = ravel(params, layout_of(params, sum_group(group).size, bucket_bytes), group)
        check_padding(inner, {bucket.dtype for bucket in params.layout.buckets})
        present = stores.resident(params)
        return inner.init(
            redistribute(
                change_layout(present, layout_for(inner, present.layout)), S, group, name="params"
            )
        )

    def apply_to_shards(
        grads: tree.Tree, state: Any, params: Flat, *, donate: bool = False, **options: Any
    ) -> tuple[Any, Any]:
        if donate:
            # Peers may still read the shards, whether zf.apply or the user calls.
            await_readers(params.group, params.buffers)
        return inner.apply(grads, state, params, donate=donate, **options)

    def placed(step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        """Let a function of shards take values of any placement.

        Values that come through :func:`apply` are shards already.
        """

        def run(grads: tree.Tree, state: Any, params: tree.Tree, **options: Any) -> tuple[Any, Any]:
            if is_placed(sharded, params):
                return step(grads, state, params, **options)
            whole = params
            if not isinstance(params, Flat):
                layout = (
                    grads.layout
                    if isinstance(grads, Flat)
                    else layout_of(params, sum_group(group).size, bucket_bytes)
                )
                whole = ravel(params, layout, group)
            here = lower(sharded, grads, state, whole)
            new, state = step(here.grads, state, here.params, **options)
            result = lift(new, whole)
            return (result if isinstance(params, Flat) else unravel(result)), state

        return run

    sharded = inner._replace(
        init=init,
        update=placed(inner.update),
        apply=placed(apply_to_shards),
        placement=S,
        group=group,
        # Values are placed before they are prepared, so the step needs no wrapper.
        prepare=PrepareInner(inner),
    )
    return sharded
