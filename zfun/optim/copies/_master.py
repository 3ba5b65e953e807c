"""Wide master weights beside narrow parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import PlacementError, SpecMismatch
from zfun.flat import Flat
from zfun.optim._base import (
    InitFn,
    Optimizer,
    State,
    UpdateFn,
    apply_updates,
    around,
    as_optimizer,
    remembered,
)
from zfun.optim._rows import aligned, check_fields, check_trainable, own
from zfun.options import FLOATING, takes
from zfun.tree import Tree

_REMEDY = "pass optimizer.init(params) or the state of the last step"


class MasterState(NamedTuple):
    """State of :func:`with_master`.

    Attributes:
        master: the master weights: a tree like the parameters, with holes (``None``) where a
            parameter is its own master; ``None`` where all parameters are.
        inner: the state of the optimizer of the master weights.
    """

    master: Tree
    inner: State


@takes(dtype=FLOATING)
@remembered
def with_master(
    optimizer: Optimizer | tuple[InitFn, UpdateFn], dtype: torch.dtype = torch.float32
) -> Optimizer:
    """Keep wide copies of narrow parameters; the optimizer steps the copies.

    The parameters are the rounded copies.

    A parameter in bfloat16 has 8 significant bits, so a change of less than 1/512 of the parameter
    is lost; master weights add up such changes. Moments have the dtype of the master weights. A
    parameter that is not narrower than ``dtype`` has no copy. "Mixed Precision Training",
    Micikevicius et al., 2018.

    ``with_master`` stands inside of ``shard_optimizer``, so that each rank keeps the master weights
    of its own part only: ``shard_optimizer(with_master(adamw(3e-4)), group)``. In a :func:`chain`
    ``with_master`` is the last part; the optimizer of the master weights may be a chain.

    Args:
        optimizer: an optimizer, or an ``(init, update)`` pair.
        dtype: the dtype of the master weights.

    Returns:
        An optimizer with :class:`MasterState`, for gradients of any dtype.

    Raises:
        OptionError: ``dtype`` is not a floating dtype.
        PlacementError: the optimizer is sharded already; the master weights would not be sharded.

    Example:
        >>> from zfun.optim import sgd
        >>> params, grads = {"w": torch.ones(1, dtype=torch.bfloat16)}, {"w": torch.ones(1)}
        >>> optimizer = with_master(sgd(1e-3))
        >>> state = optimizer.init(params)
        >>> for _ in range(8):
        ...     params, state = optimizer.apply(grads, state, params)
        >>> params, state.master
        ({'w': tensor([0.9922], dtype=torch.bfloat16)}, {'w': tensor([0.9920])})
    """
    inner = as_optimizer(optimizer)
    if inner.placement is not None:
        raise PlacementError(
            "with_master() stands inside of shard_optimizer(), which shards the master weights "
            f"too; got an optimizer that computes in {inner.placement!r}; write "
            "shard_optimizer(with_master(optimizer), group)"
        )
    return _with_master(inner, dtype)


def _with_master(inner: Optimizer, dtype: torch.dtype) -> Optimizer:
    def init(params: Tree) -> MasterState:
        check_trainable(params)
        # A copy, because the values may be views that would keep larger buffers alive.
        master = tree.map(Tensor.clone, masters_of(params, params, dtype))
        return MasterState(master, inner.init(_widened(params, master, dtype)))

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, MasterState]:
        check_fields(state, *MasterState._fields)
        before = _widened(params, state.master, dtype)
        updates, after = inner.update(grads, state.inner, before)
        wide = apply_updates(before, updates)
        # The changes are exact, so adding a change gives the same parameter as apply.
        changes = [
            new.to(p.dtype).to(_exact(p)) - p.detach().to(_exact(p))
            if _is_narrow(p, dtype)
            else change
            for p, new, change in aligned(params, masters=wide, updates=updates)
        ]
        return tree.unflatten(tree.structure(params), changes), MasterState(
            masters_of(wide, params, dtype), after
        )

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False, **options: Any
    ) -> tuple[Tree, MasterState]:
        check_fields(state, *MasterState._fields)
        before = _widened(params, state.master, dtype)
        wide, after = inner.apply(grads, state.inner, before, donate=donate, **options)
        rows = list(zip(tree.leaves(params), tree.leaves(wide), strict=True))
        kept = iter(own([p for p, _ in rows if _is_narrow(p, dtype)], donate) if donate else ())
        rounded = [
            _rounded(new, p.dtype, next(kept, None)) if _is_narrow(p, dtype) else new
            for p, new in rows
        ]
        return tree.unflatten(tree.structure(params), rounded), MasterState(
            masters_of(wide, params, dtype), after
        )

    outer = around(inner, lambda ready: _with_master(ready, dtype), MasterState._fields)
    return outer._replace(init=init, update=update, apply=apply, wide=dtype)


def _is_flat(value: Any) -> bool:
    return isinstance(value, Flat)


def _is_narrow(x: Tensor, dtype: torch.dtype) -> bool:
    return (x.dtype.to_real() if x.is_complex() else x.dtype).itemsize < dtype.itemsize


def _narrow_buckets(flat: Flat, dtype: torch.dtype) -> list[int]:
    """Return the buckets that are narrow in the layout; buffers may hold unrounded values."""
    return [
        i for i, bucket in enumerate(flat.layout.buckets) if bucket.dtype.itemsize < dtype.itemsize
    ]


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype.to_complex() if x.is_complex() else dtype)


def _exact(x: Tensor) -> torch.dtype:
    """Return a dtype with exact differences of the numbers of ``x``, up to ratios of 2**44."""
    return torch.complex128 if x.is_complex() else torch.float64


@torch.no_grad()
def _rounded(wide: Tensor, dtype: torch.dtype, into: Tensor | None) -> Tensor:
    return wide.to(dtype) if into is None else into.copy_(wide)


def masters_of(values: Tree, params: Tree, dtype: torch.dtype) -> Tree:
    """Return the leaves of ``values`` whose parameters are narrow, in the wide dtype."""

    def one(value: Any, param: Any) -> Any:
        if not isinstance(param, Flat):
            return _to(value, dtype) if _is_narrow(param, dtype) else None
        narrow = _narrow_buckets(param, dtype)
        if not narrow:
            return None
        return Flat(
            (_to(value.buffers[i], dtype) for i in narrow),
            param.placement,
            param.layout.select(narrow),
            param.group,
        )

    masters = tree.map(one, values, params, is_leaf=_is_flat)
    # A tree of holes only becomes None, so that trees and flats without masters have one form.
    return masters if tree.leaves(masters) else None


def _widened(params: Tree, master: Tree, dtype: torch.dtype) -> Tree:
    """Return the parameters with master weights in place of narrow parameters."""
    leaves, spec = tree.flatten(params, is_leaf=_is_flat)
    masters = [None] * len(leaves) if master is None else tree.subtrees(spec, master)
    if masters is None:
        raise SpecMismatch(
            "master weights have the tree of the parameters; got masters of "
            f"{tree.paths(master)[:3]} for parameters {tree.paths(params)[:3]}; {_REMEDY}"
        )
    names = tree.paths(params, is_leaf=_is_flat)
    return tree.unflatten(
        spec, [_put(*row, dtype) for row in zip(names, leaves, masters, strict=True)]
    )


def _put(path: str, param: Any, master: Any, dtype: torch.dtype) -> Any:
    """Return the master weights of one leaf or flat, and the parameter itself where it is wide."""
    is_flat = isinstance(param, Flat)
    narrow = _narrow_buckets(param, dtype) if is_flat else [0] * _is_narrow(param, dtype)
    held = () if master is None else master.buffers if isinstance(master, Flat) else (master,)
    if len(held) != len(narrow):
        raise SpecMismatch(
            f"a parameter narrower than {dtype} has master weights, and no other parameter has; "
            f"got {len(held)} for the {len(narrow)} narrow buffers of {path!r}; {_REMEDY}",
            leaf=path,
        )
    if not is_flat:
        return held[0] if held else param
    rest = iter(held)
    return param.with_buffers(
        next(rest) if i in narrow else buffer for i, buffer in enumerate(param.buffers)
    )
