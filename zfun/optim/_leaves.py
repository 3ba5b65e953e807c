"""Rules that need whole leaves: LAMB and Muon."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.errors import LeafError, OptionError
from zfun.flat import Flat, leaf_spans
from zfun.layout import LabelFn, layout_of
from zfun.optim._base import Optimizer, State, as_optimizer, itself, of_update, remembered
from zfun.optim._labels import by_label
from zfun.optim._missed import sparing, sparing_apply
from zfun.optim._rows import aligned, check_fields, check_trainable, flat_view, own, step_count
from zfun.optim._rules import AdamState
from zfun.optim._schedules import Schedule, decay_at, rate_at
from zfun.optim._stepping import Into, assemble, no_steps, zeros_like
from zfun.options import FLOATING, OF_LEAVES, SECOND_DECAY, integer, number, takes
from zfun.placement import S
from zfun.reductions import gather_values, map_leaves
from zfun.tree import Tree

# Muon's quintic: the slope at 0 is large, so five steps bring singular values above 1e-2 near 1
# (Jordan et al., 2024).
_QUINTIC = (3.4445, -4.7750, 2.0315)


@takes(min_ratio=number(0), max_ratio=number(0, infinite=True))
@remembered
def lamb(
    learning_rate: float | Schedule,
    *,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    min_ratio: float = 0.01,
    max_ratio: float = 10.0,
) -> Optimizer:
    """LAMB: Adam whose step for each leaf is in proportion to the norm of the leaf.

    ``m`` and ``v`` as in :func:`adam`, ``d = m / (√v + eps) + weight_decay p``, ``r = ‖p‖ / ‖d‖``
    within the bounds, or 1 where either norm is 0, and
    ``p = p - learning_rate √(1 - b2ᵗ) / (1 - b1ᵗ) r d``. The norms are exact norms of
    whole leaves, so that shards give the same bits; on shards a rank sends a few hundred bytes for
    each leaf. "Large Batch Optimization for Deep Learning: Training BERT in
    76 minutes", You et al., 2020.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        b1: decay of the first moment, in [0, 1), or a function of the number of steps taken so far.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root mean square.
        weight_decay: share of a parameter that is added to the direction.
        min_ratio: the least ratio.
        max_ratio: the largest ratio.

    Returns:
        An optimizer with :class:`AdamState`.

    Raises:
        OptionError: a value of an option is out of range.

    Example:
        >>> optimizer = lamb(0.5, b1=0.0, b2=0.0)
        >>> params, grads = {"w": torch.full((4,), 2.0)}, {"w": torch.ones(4)}
        >>> optimizer.apply(grads, optimizer.init(params), params)[0]
        {'w': tensor([1., 1., 1., 1.])}
    """
    if min_ratio > max_ratio:
        raise OptionError(
            f"min_ratio lies in [0, max_ratio]; got min_ratio={min_ratio} and "
            f"max_ratio={max_ratio}; exchange the two, or raise max_ratio"
        )

    def init(params: Tree) -> AdamState:
        check_trainable(params)
        return AdamState(no_steps(), zeros_like(params), zeros_like(params))

    def step(grads: Tree, state: State, params: Tree, into: Into) -> tuple[Tree, AdamState]:
        check_fields(state, "count", "mu", "nu")
        rows = aligned(params, gradients=grads, mu=state.mu, nu=state.nu)
        before = step_count(state.count)
        first = decay_at("b1", b1, before)
        rule = ops.LambRule(
            b1=first,
            b2=b2,
            learning_rate=rate_at(learning_rate, before)
            * math.sqrt(1.0 - b2 ** (before + 1))
            / (1.0 - first ** (before + 1)),
            eps=eps,
            weight_decay=weight_decay,
            bounds=(min_ratio, max_ratio),
        )
        mus, nus = (
            own([row[2] for row in rows], into.donate),
            own([row[3] for row in rows], into.donate),
        )
        targets, changes = into.targets([row[0] for row in rows])
        for row, where, target, change, mu, nu in zip(
            rows, _layers(params), targets, changes, mus, nus, strict=True
        ):
            to = None if change is None else flat_view(change)
            rule(flat_view(target), flat_view(row[1]), flat_view(mu), flat_view(nu), to, **where)
        spec = tree.structure(params)
        after = AdamState(state.count + 1, tree.unflatten(spec, mus), tree.unflatten(spec, nus))
        return tree.unflatten(spec, into.results(targets, changes)), after

    rule = assemble(init, step)
    return itself(
        rule._replace(update=sparing(rule.update), apply=sparing_apply(rule.apply), by_leaf=True)
    )


def _layers(params: Tree) -> list[dict[str, Any]]:
    """Return the kernel's options per tensor: the spans of leaves, and how ranks sum norms."""
    found: list[dict[str, Any]] = []
    for value in tree.leaves(params, is_leaf=lambda x: isinstance(x, Flat)):
        if not isinstance(value, Flat):
            found.append({"segments": [(0, flat_view(value).numel())]})
            continue
        gather = (
            functools.partial(gather_values, value, name="norm") if value.placement is S else None
        )
        spans = leaf_spans(value)
        found += (
            {
                "segments": [(spans[leaf].start, spans[leaf].stop) for leaf in bucket.leaves],
                "gather": gather,
            }
            for bucket in value.layout.buckets
        )
    return found


class MuonState(NamedTuple):
    """State of :func:`muon` for matrices.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
        mu: momentum, a tree like the parameters.
    """

    count: Tensor
    mu: Tree


def is_matrix(path: str, leaf: Any) -> bool:
    """Whether a leaf is a real matrix."""
    del path
    return leaf.ndim == 2 and not leaf.dtype.is_complex


@takes(matrices=OF_LEAVES, momentum=SECOND_DECAY, num_iterations=integer(1), dtype=FLOATING | None)
def muon(
    learning_rate: float | Schedule,
    rest: Any,
    *,
    matrices: LabelFn = is_matrix,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.0,
    num_iterations: int = 5,
    dtype: torch.dtype | None = None,
) -> Optimizer:
    """Muon: step matrices by orthogonalised momentum, and other leaves by another optimizer.

    ``m = momentum m + (1 - momentum) g``, ``d = momentum m + (1 - momentum) g`` after Nesterov or
    else ``m``, and ``p = p - learning_rate (√max(1, rows / columns) orthogonal(d) + weight_decay
    p)``. Here ``orthogonal`` divides by the norm and then iterates ``X = 3.4445 X - 4.7750 (X Xᵀ) X
    + 2.0315 (X Xᵀ)² X``.

    If the parameters are sharded, the momentum is sharded too. A matrix that lies whole on one rank
    (all of them under :class:`zfun.placement.Owned`) is orthogonalised there. Each other matrix is
    sent to one rank, which sends every rank its shard back; the ranks divide these by cost. At
    stage 0 every rank orthogonalises all matrices. "Muon: An optimizer for hidden layers in neural
    networks", Jordan et al., 2024.

    Args:
        learning_rate: step size of matrices, or a function of the number of steps taken so far.
        rest: the optimizer of all other leaves, such as ``adamw(3e-4)``.
        matrices: ``matrices(path, leaf)`` chooses the leaves to orthogonalise; by default all real
            matrices. Leave embeddings out here.
        momentum: decay of the momentum, in [0, 1).
        nesterov: look ahead along the momentum.
        weight_decay: share of a matrix that a step with learning rate 1 would subtract.
        num_iterations: iterations of the quintic, at least 1.
        dtype: the dtype of the iteration; by default the dtype of the parameters, or float32 if
            the parameters are narrower.

    Returns:
        An optimizer by label: ``"matrices"`` with :class:`MuonState` and ``"rest"``.

    Raises:
        OptionError: a value of an option is out of range.
        LeafError: from ``init``, where ``matrices`` chooses a leaf that is not a real matrix.

    Example:
        >>> from zfun.optim import sgd
        >>> optimizer = muon(1.0, sgd(0.1))
        >>> params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
        >>> grads = {"w": torch.diag(torch.tensor([30.0, -20.0])), "b": torch.ones(2)}
        >>> new, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> new["b"], new["w"].round(), list(state)
        (tensor([-0.1000, -0.1000]), tensor([[-1.,  0.],
                [ 0.,  1.]]), ['matrices', 'rest'])
    """
    # Numbers of any class, as Fraction, multiply tensors here.
    core = _muon(
        learning_rate, float(momentum), nesterov, float(weight_decay), num_iterations, dtype
    )
    return by_label(
        {"matrices": core, "rest": as_optimizer(rest)},
        lambda path, leaf: "matrices" if matrices(path, leaf) else "rest",
    )


@remembered
def _muon(
    learning_rate: float | Schedule,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    num_iterations: int,
    dtype: torch.dtype | None,
) -> Optimizer:

    def orthogonal(x: Tensor) -> Tensor:
        return _orthogonal(x, num_iterations, dtype)

    def init(params: Tree) -> MuonState:
        check_matrices(params, "Muon", "let matrices(path, leaf) leave it to the rest")
        return MuonState(no_steps(), zeros_like(params))

    @torch.no_grad()
    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, MuonState]:
        check_fields(state, "count", "mu")
        rows = aligned(params, gradients=grads, mu=state.mu)
        rate = rate_at(learning_rate, step_count(state.count))
        spec = tree.structure(params)
        moments: list[Tensor] = []
        directions: list[Tensor] = []
        for p, g, m in rows:
            wide = ops.wide(p.dtype)
            fresh = g.detach().to(wide).mul(1.0 - momentum)
            mean = m.to(wide).mul(momentum).add_(fresh)
            moments.append(mean.to(m.dtype))
            directions.append(mean.mul(momentum).add_(fresh) if nesterov else mean)
        steps = mapped(tree.unflatten(spec, directions), orthogonal)
        updates = []
        for (p, _, _), u in zip(rows, tree.leaves(steps), strict=True):
            change = u.mul(-rate)
            if weight_decay:
                change.add_(p.detach().to(change.dtype).mul(-rate * weight_decay))
            updates.append(change.to(p.dtype))
        return tree.unflatten(spec, updates), MuonState(
            state.count + 1, tree.unflatten(spec, moments)
        )

    return itself(of_update(init, update)._replace(by_leaf=True))


def check_matrices(params: Tree, name: str, remedy: str) -> None:
    """Refuse leaves that are no real matrices."""
    check_trainable(params)
    layout = params.layout if isinstance(params, Flat) else layout_of(params)
    for slot in layout.leaves:
        if len(slot.shape) != 2 or slot.dtype.is_complex:
            raise LeafError(
                f"{name} steps real matrices; leaf {slot.path!r} is {slot.dtype} of shape "
                f"{slot.shape}; {remedy}",
                leaf=slot.path,
            )


def mapped(value: Tree, fn: Any) -> Tree:
    """Apply a function of whole matrices to each leaf, which one rank does for all."""
    if isinstance(value, Flat):
        return map_leaves(value, fn, lambda shape: float(min(shape)) ** 2 * max(shape))
    return tree.map(lambda x: fn(x.clone(memory_format=torch.contiguous_format)), value)


def _orthogonal(x: Tensor, num_iterations: int, dtype: torch.dtype | None) -> Tensor:
    """Bring the singular values of a fresh contiguous matrix to about 1, times a shape factor."""
    if x.numel() == 0:
        return x
    scale = math.sqrt(max(1.0, x.shape[0] / x.shape[1]))
    y = x if dtype is None else x.to(dtype)
    # The norm is exact, and so the same on every device and rank. A tall matrix is transposed,
    # because the products over the shorter side are smaller.
    y = y / max(math.sqrt(ops.total_of_bins(ops.squares_in_bins(y.reshape(-1))[None]).item()), 1e-7)
    tall = x.shape[0] > x.shape[1]
    y = y.T.contiguous() if tall else y
    a, b, c = _QUINTIC
    for _ in range(num_iterations):
        square = y @ y.T
        y = torch.addmm(y, torch.addmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return (y.T.contiguous() if tall else y).to(x.dtype).mul_(scale)
