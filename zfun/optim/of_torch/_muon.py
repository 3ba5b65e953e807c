"""``torch.optim.Muon`` as a pure optimizer: each matrix is sent to one rank, as for ``muon``."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun import tree
from zfun.optim._base import Optimizer, State, itself, of_update, remembered
from zfun.optim._leaves import check_matrices, mapped
from zfun.optim._rows import aligned, check_fields, step_count
from zfun.optim._schedules import Schedule, rate_at
from zfun.optim._stepping import no_steps, zeros_like
from zfun.optim.of_torch._probe import step_alone
from zfun.optim.of_torch._rule import TorchState, pieces_of, wide
from zfun.tree import Tree

_NAME = "momentum_buffer"


@remembered
def torch_muon(
    lr: float | Schedule = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Optimizer:
    """Make ``torch.optim.Muon``, whose options these are, a pure optimizer of matrices."""
    options = {
        "momentum": 0.0,
        "weight_decay": 0.0,
        "ns_coefficients": ns_coefficients,
        "eps": eps,
        "ns_steps": int(ns_steps),
        "adjust_lr_fn": adjust_lr_fn,
    }

    def init(params: Tree) -> TorchState:
        check_matrices(params, "torch.optim.Muon", "give the leaf to another optimizer")
        return TorchState(no_steps(), {_NAME: zeros_like(params)}, {})

    @torch.no_grad()
    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, TorchState]:
        check_fields(state, *TorchState._fields)
        rows = aligned(params, gradients=grads, momentum=state.trees[_NAME])
        spec, rate = tree.structure(params), rate_at(lr, step_count(state.count))
        buffers: list[Tensor] = []
        directions: list[Tensor] = []
        for p, g, m in rows:
            pairs = zip(pieces_of(m), pieces_of(g.detach().to(m.dtype)), strict=True)
            pieces = [(buffer.lerp_(grad, 1 - momentum), grad) for buffer, grad in pairs]
            ahead = [g.lerp(m, momentum) if nesterov else m for m, g in pieces]
            buffers.append(_joined([m for m, _ in pieces], m))
            directions.append(_joined(ahead, p))

        def stepped(matrix: Tensor) -> Tensor:
            if not matrix.numel():
                return matrix
            # The step of a matrix of zeros is the step alone.
            zero = torch.nn.Parameter(torch.zeros_like(matrix), requires_grad=False)
            zero.grad = matrix
            step_alone(torch.optim.Muon([zero], lr=rate, **options))
            return zero.detach()

        steps = tree.leaves(mapped(tree.unflatten(spec, directions), stepped))
        changes: list[Tensor] = []
        for (p, *_), step in zip(rows, steps, strict=True):
            new = p.detach().mul(1 - rate * weight_decay).add_(step)
            # In float64 the difference is exact, so adding the change gives torch's bits.
            changes.append(new.to(wide(p)) - p.detach().to(wide(p)))
        after = {_NAME: tree.unflatten(spec, buffers)}
        return tree.unflatten(spec, changes), TorchState(state.count + 1, after, {})

    return itself(of_update(init, update)._replace(by_leaf=True))


def _joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    """Return a tensor of the first elements of pieces."""
    found = torch.cat(pieces)[: like.numel()] if pieces else like.new_zeros(0)
    return found.view(like.shape).to(like.dtype)
