"""Right and wrong parts that a user could write: loops, transforms, optimizers, groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from zfun import tree
from zfun.collectives import AllGather, Collective, Group, Work, all_gather, all_reduce
from zfun.collectives._group import Wrapper
from zfun.recipes import StepInfo, Zero, ZeroState
from zfun.transforms import split_batch

RATE = 0.1

Gather = Callable[[Tensor, Group], Tensor]
Unravel = Callable[[Tensor, Any], Any]


def unravel(vector: Tensor, like: Any) -> Any:
    """Cut a vector into the leaves of a tree; a tied tensor has one place in the vector."""
    leaves, spec = tree.flatten(like)
    first: dict[int, int] = {}
    firsts = [first.setdefault(id(leaf), index) for index, leaf in enumerate(leaves)]
    places = sorted(set(firsts))
    pieces = vector[: sum(leaves[i].numel() for i in places)].split(
        [leaves[i].numel() for i in places]
    )
    found = {i: piece.view(leaves[i].shape) for i, piece in zip(places, pieces, strict=True)}
    return tree.unflatten(spec, [found[i] for i in firsts])


def unravel_with_lost_ties(vector: Tensor, like: Any) -> Any:
    """The bug: only the last use of a tied tensor has a gradient."""
    leaves, spec = tree.flatten(unravel(vector, like))
    last = {id(leaf): index for index, leaf in enumerate(tree.leaves(like))}
    cut = [
        leaf if last[id(old)] == index else leaf.detach()
        for index, (leaf, old) in enumerate(zip(leaves, tree.leaves(like), strict=True))
    ]
    return tree.unflatten(spec, cut)


def ravel(params: Any) -> Tensor:
    unique = {id(leaf): leaf for leaf in tree.leaves(params)}
    return torch.cat([leaf.reshape(-1) for leaf in unique.values()])


def own_loop(
    loss_fn: Callable[[Any, Any], Tensor],
    group: Group,
    *,
    gather: Gather = all_gather,
    unravel: Unravel = unravel,
    parts_of: Callable[[Any], Sequence[Any]] = lambda batch: [batch],
    padded: bool = True,
    divisor: Callable[[Group], float] = lambda group: group.size,
    reduce_dtype: torch.dtype | None = None,
    skips: Callable[[Tensor], bool] = lambda grad: False,
) -> Zero:
    """ZeRO-3 by hand: one vector, cut among the ranks, gathered at use, SGD on the own piece."""
    like: list[Any] = []

    def init(params: Any, *, init: str = "check") -> ZeroState:
        like[:] = [params]
        vector = ravel(params)
        length = math.ceil(vector.numel() / group.size)
        if not padded:  # the bug: the remainder of the division stays where the rank has it
            length = vector.numel() // group.size
        rest = vector[group.size * length :]
        padding = vector.new_zeros(max(0, group.size * length - vector.numel()))
        piece = torch.cat([vector, padding])[group.rank * length : (group.rank + 1) * length]
        held: Any = piece, rest
        return ZeroState(held, None, None, 0, 0)

    def step(state: ZeroState, batch: Any) -> tuple[ZeroState, StepInfo]:
        held: Any = state.params
        piece, rest = held
        leaf = piece.detach().clone().requires_grad_()
        parts = parts_of(batch)
        whole = torch.cat([gather(leaf, group), rest])
        losses = [loss_fn(unravel(whole, like[0]), part) for part in parts]
        loss = torch.stack(losses).sum() / len(losses)
        (grad,) = torch.autograd.grad(loss / divisor(group), leaf)
        if reduce_dtype is not None:
            grad = grad.to(reduce_dtype).to(piece.dtype)
        piece = piece if skips(grad) else piece - RATE * grad
        total = all_reduce(loss.detach(), group) / group.size
        info = StepInfo(total, torch.zeros(()), skipped=False, bad_leaf=None, aux=None)
        kept: Any = piece, rest
        return state._replace(params=kept, step=state.step + 1), info

    def params(state: ZeroState, select: Any = None) -> Any:
        held: Any = state.params
        piece, rest = held
        return unravel(torch.cat([all_gather(piece, group), rest]), like[0])

    return Zero(init, step, params)


class _SlicedBackward(torch.autograd.Function):
    """The bug: an all-gather whose backward takes the own slice and adds nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.length = group, len(x)
        return all_gather(x.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        start = ctx.group.rank * ctx.length
        return grads[0][start : start + ctx.length], None


class StaleGather:
    """The bug: two buffers that take turns, of which the older one is used."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor, group: Group) -> Tensor:
        whole = all_gather(x, group)
        self.kept = [*self.kept, whole.detach()][-2:]
        return whole + (self.kept[0] - whole.detach())


def gather_with_wrong_dual(x: Tensor, group: Group) -> Tensor:
    return _SlicedBackward.apply(x, group)


def all_but_the_last(batch: Tensor) -> list[Tensor]:
    """The bug: a loop over micro-batches that ends too early."""
    return split_batch(batch, 3)[:-1]


class StaleGroup(Wrapper):
    """The bug: gathers of parameters return what the gather of that bucket returned before."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.kept: dict[tuple[str, int], list[Tensor]] = {}

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        work = self.wrapped.start(call, x, out)
        if not isinstance(call.op, AllGather) or call.name != "params":
            return work

        def wait() -> Tensor:
            found = work.wait()
            key = (call.name, found.numel())
            kept = self.kept.setdefault(key, [])
            kept.append(found.clone())
            return found.copy_(kept[max(0, len(kept) - 2)])

        return Work(wait)


class RoundingGroup(Wrapper):
    """The bug: sums of gradients in a narrow dtype."""

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        super().__init__(group)
        self.dtype = dtype

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        if call.name == "grads" and x.is_floating_point():
            work = self.wrapped.start(call, x.to(self.dtype))
            return Work(lambda: _given(work.wait().to(x.dtype), out))
        return self.wrapped.start(call, x, out)


def _given(found: Tensor, out: Tensor | None) -> Tensor:
    return found if out is None else out.copy_(found)


def scaled_by_size(vg: Any) -> Any:
    """The bug: a sum over the ranks for a mean."""

    def wrapped(params: Any, batch: Any) -> Any:
        value, grads = vg(params, batch)
        if not isinstance(grads, zf.Flat):
            return value, grads
        return value, grads.with_buffers([g * grads.group.size for g in grads.buffers])

    return wrapped


def clipped(bound: float, own: bool) -> Any:
    """Clip gradients by their norm; the bug is the norm of the own buffers."""

    def transform(vg: Any) -> Any:
        def wrapped(params: Any, batch: Any) -> Any:
            value, grads = vg(params, batch)
            norm = zf.reductions.global_norm(grads)
            if own and isinstance(grads, zf.Flat):
                norm = torch.stack([g.norm() for g in grads.buffers]).norm()
            factor = 1.0 / max(1.0, float(norm) / bound)
            if isinstance(grads, zf.Flat):
                return value, grads.with_buffers([g * factor for g in grads.buffers])
            return value, tree.map(lambda g: g * factor, grads)

        return wrapped

    return transform


def skipping(bound: float, together: bool) -> Any:
    """Skip a step with small gradients; the bug is that each rank looks at its own buffers."""

    def transform(vg: Any) -> Any:
        def wrapped(params: Any, batch: Any) -> Any:
            value, grads = vg(params, batch)
            is_flat = isinstance(grads, zf.Flat)
            buffers = grads.buffers if is_flat else tree.leaves(grads)
            is_large = any(bool((g.abs() > bound).any()) for g in buffers)
            if is_flat and together:
                is_large = zf.reductions.any_rank(is_large, grads.group)
            factor = 1.0 if is_large else 0.0
            if is_flat:
                return value, grads.with_buffers([g * factor for g in buffers])
            return value, tree.map(lambda g: g * factor, grads)

        return wrapped

    return transform


def shifted(in_padding: bool) -> Any:
    """Add a constant to every gradient; the bug adds to the padding too."""

    def transform(vg: Any) -> Any:
        def wrapped(params: Any, batch: Any) -> Any:
            value, grads = vg(params, batch)
            if not isinstance(grads, zf.Flat):
                return value, tree.map(lambda g: g + 0.01, grads)
            if in_padding:
                return value, grads.with_buffers([g + 0.01 for g in grads.buffers])
            buffers = [g.clone() for g in grads.buffers]
            for span in zf.flat.leaf_spans(grads):
                buffers[span.bucket][span.start : span.stop] += 0.01
            return value, grads.with_buffers(buffers)

        return wrapped

    return transform


def centred(by_leaf: bool) -> Any:
    """An optimizer that subtracts the mean of each buffer, and so mixes elements."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: -RATE * (g - g.mean()), grads), state

    return zf.optim.optimizer(lambda params: (), update)._replace(by_leaf=by_leaf)


def own_rule(
    change: Callable[[Tensor, Tensor, int], Tensor],
) -> Callable[[Callable[[Any, Any], Tensor], int, Group], Zero]:
    """A loop whose optimizer gives another change of an element on some ranks.

    Args:
        change: of a gradient, a parameter and the rank.
    """

    def make(loss_fn: Callable[[Any, Any], Tensor], stage: int, group: Group) -> Zero:
        def update(grads: Any, state: Any, params: Any) -> Any:
            return tree.map(lambda g, p: change(g, p, group.rank), grads, params), state

        rule = zf.optim.optimizer(lambda params: (), update)._replace(by_leaf=True)
        return zf.zero(stage, loss_fn, rule, group)

    return make


def remembering(forgets: bool) -> Any:
    """An optimizer whose momentum is in a closure; ``forgets`` clears the closure in ``init``."""
    kept: dict[int, Tensor] = {}

    def init(params: Any) -> Any:
        if forgets:
            kept.clear()
        return ()

    def update(grads: Any, state: Any, params: Any) -> Any:
        leaves, spec = tree.flatten(grads)
        for place, g in enumerate(leaves):
            kept[place] = 0.9 * kept.get(place, torch.zeros_like(g)) + g
        return tree.unflatten(spec, [-RATE * kept[place] for place in range(len(leaves))]), state

    return zf.optim.optimizer(init, update)


def counting() -> Any:
    """A transform whose factor grows with each call."""
    calls = 0

    def transform(vg: Any) -> Any:
        def wrapped(params: Any, batch: Any) -> Any:
            nonlocal calls
            calls += 1
            value, grads = vg(params, batch)
            return value, tree.map(lambda g: g * (1 + calls), grads)

        return wrapped

    return transform
