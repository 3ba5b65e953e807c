"""Losses in two parts, for tests of ``zf.vjp``: a forward pass, and a criterion outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import tree


def forward(params: Any, batch: Tensor) -> dict[str, Any]:
    """A tree of outputs, in which every leaf of the parameters is in every floating tensor."""
    loss = models.tree_loss(params, batch)
    return {"rows": len(batch), "pair": (loss.sin() * batch, [loss * 2]), "sign": loss.sign().int()}


def criterion(out: Any, batch: Tensor) -> Tensor:
    row, [double] = out["pair"]
    return (row - batch).pow(2).mean() + double * row.sum()


def whole(params: Any, batch: Tensor) -> Tensor:
    """The same loss in one part."""
    return criterion(forward(params, batch), batch)


def cotangents(out: Any, batch: Tensor) -> tuple[Tensor, Any]:
    """Return the loss and the derivatives with respect to the outputs."""
    leaves, spec = tree.flatten(out)
    mine = [
        leaf.requires_grad_() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    loss = criterion(tree.unflatten(spec, mine), batch)
    places = [i for i, leaf in enumerate(mine) if isinstance(leaf, Tensor) and leaf.requires_grad]
    found: list[Any] = [None] * len(leaves)
    for place, grad in zip(
        places, torch.autograd.grad(loss, [mine[i] for i in places]), strict=True
    ):
        found[place] = grad
    return loss.detach(), tree.unflatten(spec, found)


def pulled(vg: Callable[..., Any], params: Any, batch: Tensor, num_micro: int = 1) -> Any:
    """Return the gradients of :func:`whole` through ``zf.vjp`` of :func:`forward`."""
    out, pullback = zf.vjp(vg, params, batch)
    if num_micro == 1:
        return pullback(cotangents(out, batch)[1])
    micro = batch.chunk(num_micro)
    return pullback([cotangents(x, part)[1] for x, part in zip(out, micro, strict=True)])
