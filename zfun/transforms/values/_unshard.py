"""Return whole trees: all leaves or some, plain or differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from zfun import compression, ops, stores, tree
from zfun.errors import PlacementError
from zfun.flat import Flat, unravel_buffers
from zfun.options import ANY, OF_LEAVES, takes
from zfun.placement import P, R
from zfun.transforms._cast import cast_leaves
from zfun.transforms.call._lazy import materialise
from zfun.transforms.values._redistribute import redistribute
from zfun.typing import Params


@ops.uncompiled
@takes(value=ANY, select=OF_LEAVES | None)
def unshard(
    value: Flat[Params],
    select: Callable[[str, Tensor], bool] | None = None,
    *,
    name: str = "unshard",
) -> Params:
    """Return the whole tree on every rank (``S -> R``), as ordinary tensors.

    Args:
        value: a ``Flat`` of any placement; a partial one is summed.
        select: ``select(path, leaf)`` chooses leaves by path, shape and dtype, alike on all ranks;
            ``leaf`` is a ``meta`` tensor. Only the buckets of these leaves are gathered. By default
            all leaves.
        name: of the value, in records and errors.

    Returns:
        A tree of new tensors; tied leaves are one tensor. With ``select`` the tree has holes
        (``None``) in place of the other leaves, as one of :func:`zfun.partition`. Every rank must
        call.

    Example:
        >>> import zfun as zf
        >>> zf.simulate(2, lambda group: zf.unshard(zf.shard({"w": torch.ones(2)}, group)))[1]
        {'w': tensor([1., 1.])}
        >>> def main(group):
        ...     flat = zf.shard({"w": torch.ones(2), "b": torch.zeros(1)}, group, bucket_bytes=1)
        ...     return zf.unshard(flat, lambda path, leaf: path == "b")
        >>> zf.simulate(2, main)[1]
        {'w': None, 'b': tensor([0.])}
    """
    if not isinstance(value, Flat):
        raise PlacementError(
            f"unshard() takes a Flat; got {type(value).__name__}; a tree of whole tensors needs "
            "no unshard()"
        )
    if select is not None:
        return _unshard_some(value, select, name)
    with torch.no_grad():
        whole = redistribute(value, R, value.group, name=name)
        # A store in host memory returns the very tensor that the store keeps.
        buffers = [
            buffer.clone() if buffer is old or isinstance(old, stores.Stored) else buffer
            for buffer, old in zip(whole.buffers, value.buffers, strict=True)
        ]
        return unravel_buffers(buffers, value.layout)


def _unshard_some(value: Flat, select: Callable[[str, Tensor], bool], name: str) -> tree.Tree:
    layout = value.layout
    slots = [layout.leaves[position] for position in layout.positions]
    chosen = [
        bool(select(path, torch.empty(slot.shape, dtype=slot.dtype, device="meta")))
        for path, slot in zip(layout.paths, slots, strict=True)
    ]
    wanted = {position for position, keep in zip(layout.positions, chosen, strict=True) if keep}
    found: dict[int, Tensor] = {}
    for index, bucket in enumerate(layout.buckets):
        inside = [leaf for leaf in bucket.leaves if leaf in wanted]
        if not inside:
            continue
        # One bucket at a time, and copies of the leaves, so that no other leaf stays in memory.
        part = Flat(
            [value.buffers[index]],
            value.placement,
            layout.select([index]),
            value.group,
            codec=value.codec,
        )
        with torch.no_grad():
            (whole,) = redistribute(part, R, value.group, name=name).buffers
            for leaf in inside:
                slot = layout.leaves[leaf]
                found[leaf] = ops.unravel(whole, slot.offset, slot.shape, slot.dtype).clone()
    return tree.unflatten(
        layout.spec,
        [
            found[position] if keep else None
            for position, keep in zip(layout.positions, chosen, strict=True)
        ],
    )


@overload
def gather(value: Flat[Params]) -> Params: ...


@overload
def gather(value: Params) -> Params: ...


def gather(value: tree.Tree) -> tree.Tree:
    """Return whole parameters for use in a loss (``S -> R``), differentiably.

    On a ``Flat``, gather runs one all-gather for each bucket. The derivative is a reduce-scatter,
    so gather composes with autograd and ``torch.func``. On a subtree of the lazy leaves of
    :func:`zfun.shard_params`, gather loads the buckets at once, for a block under
    ``torch.compile`` inside the loss.

    Args:
        value: a ``Flat``, or a tree of lazy leaves and tensors.

    Returns:
        A tree of whole tensors. Tensors of lazy leaves may be memory of the parameters, so
        ``clone()`` before you keep one.

    Raises:
        PlacementError: the flat is partial.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     params = zf.shard({"w": torch.tensor([1.0, 2.0])}, group)
        ...     loss = lambda params: (zf.gather(params)["w"] ** 2).sum() / group.size
        ...     return zf.unshard(torch.func.grad(loss)(params))
        >>> zf.simulate(2, main)[0]
        {'w': tensor([2., 4.])}
    """
    if not isinstance(value, Flat):
        return materialise(value)
    if value.placement is P:
        raise PlacementError(
            "gather() returns whole values; got a Flat with placement P; redistribute() it to R "
            "or S first"
        )
    return unravel_buffers(redistribute(value, R, value.group).buffers, value.layout)


def gather_for(
    value: Flat, dtype: torch.dtype | None, codec: compression.Codec | None
) -> tree.Tree:
    """Gather parameters differentiably with a codec, in the dtype of a loss."""
    coded = Flat((), value.placement, value.layout, value.group, codec=codec, life=value.life)
    whole = gather(coded)
    # Cast after the gather, because the derivative of the gather must sum in the wider dtype.
    return whole if dtype is None else cast_leaves(whole, dtype)
