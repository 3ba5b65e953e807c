"""Checks of traffic, memory and duals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, record, simulate
from zfun.flat import flats
from zfun.options import TENSOR, each, integer, number, takes
from zfun.planner import Plan, plan
from zfun.recipes import Zero
from zfun.testing._compositions import BATCHES


@takes(batches=BATCHES, at_most=number(0))
def assert_traffic(
    make: Callable[[Group], Zero],
    params: tree.Tree,
    batches: Sequence[Sequence[Any]],
    *,
    at_most: float,
) -> dict[str, float]:
    """Check the volume that a rank sends in a step, in multiples of ``Ψ (N-1)/N``.

    Ψ is the bytes of all parameters, padding included, and N the number of ranks: in these units
    stages 0 to 2 send 2, and stage 3 sends 3. The last step counts, because the first one also
    agrees on an order.

    Args:
        make: ``make(group)`` returns ``zf.zero(...)``, or a :class:`zfun.recipes.Zero` of your own
            transforms.
        params: a tree of tensors.
        batches: ``batches[step][rank]``; one simulated rank per batch of a step.
        at_most: the largest allowed volume of parameters and gradients together.

    Returns:
        The volume by the name of the value; the largest of the ranks.

    Raises:
        AssertionError: some rank sent more.

    Example:
        >>> import zfun as zf
        >>> loss_fn = lambda params, batch: ((params["w"] - batch) ** 2).sum()
        >>> make = lambda group: zf.zero(3, loss_fn, zf.optim.sgd(0.1), group)
        >>> assert_traffic(make, {"w": torch.ones(64)}, [[torch.ones(64)] * 2], at_most=3)
        {'params': 2.0, 'grads': 1.0}
    """
    size = len(batches[0])

    def main(group: Group) -> dict[str, float]:
        recorded = record(group)
        z = make(recorded)
        state = z.init(params)
        kept = flats(state.params)
        unit = sum(
            bucket.padded_numel * buffer.dtype.itemsize
            for flat in kept
            for bucket, buffer in zip(flat.layout.buckets, flat.buffers, strict=True)
        )
        for step in batches:
            recorded.clear()
            state, _ = z.step(state, step[group.rank])
        names = {entry.name: None for entry in recorded.log if entry.name in ("params", "grads")}
        unit_sent = unit * (size - 1) / size
        return {name: recorded.bytes_sent(name) / unit_sent for name in names}

    sent = simulate(size, main)
    rank = max(range(size), key=lambda rank: sum(sent[rank].values()))
    if sum(sent[rank].values()) > at_most * (1 + 1e-9):
        parts = ", ".join(f"{volume:.3g} of {name}" for name, volume in sent[rank].items())
        raise AssertionError(
            f"a rank may send {at_most:g} Ψ (N-1)/N a step; rank {rank} of {size} sent {parts}; "
            "zf.record(group).log lists the messages"
        )
    return sent[rank]


@takes(size=integer(1), at_most=integer(0))
def assert_memory(
    make: Callable[[Group], Zero],
    params: tree.Tree,
    batch: Any,
    *,
    size: int,
    at_most: int,
) -> Plan:
    """Check the peak of a rank's memory in a step, without running the step.

    Args:
        make: as in :func:`zfun.plan`.
        params: a tree of tensors; their values are not read.
        batch: the batch of a rank.
        size: the number of ranks.
        at_most: the largest allowed peak on the device, in bytes.

    Returns:
        The plan of the step.

    Raises:
        AssertionError: the peak is larger; the message has the table by category.

    Example:
        >>> import zfun as zf
        >>> loss_fn = lambda params, batch: ((params["w"] - batch) ** 2).sum()
        >>> make = lambda group: zf.zero(3, loss_fn, zf.optim.adamw(0.1), group)
        >>> params, batch = {"w": torch.ones(4096)}, torch.ones(4096)
        >>> assert_memory(make, params, batch, size=4, at_most=131_072).steady.device.params
        4096
    """
    found = plan(make, params, batch, size)
    peak = found.peak.device.total
    if peak > at_most:
        raise AssertionError(
            f"a step may hold {at_most:,} bytes on the device; rank 0 of {size} holds {peak:,} at "
            f"{found.peak.what}:\n{found}"
        )
    return found


@takes(
    inputs=each(TENSOR, "a sequence of tensors", "[torch.ones(2)]"),
    tolerance=number(0),
    seed=integer(0),
)
def assert_adjoint(
    fn: Callable[[Tensor, Group], Tensor],
    inputs: Sequence[Tensor],
    *,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> None:
    """Check that the backward pass of a collective is the transpose of its derivative.

    For random tangents ``x`` and cotangents ``y``, the inner products of all ranks,
    ``<y, J x>`` and ``<Jᵀ y, x>``, must be equal. ``J x`` comes from central differences of the
    forward pass, so ``fn`` needs no forward-mode rule.

    Args:
        fn: ``fn(x, group)`` returns a tensor; differentiable.
        inputs: the input of each rank; one simulated rank for each.
        tolerance: the largest difference, relative to the inner products.
        seed: of tangents and cotangents.

    Raises:
        AssertionError: backward is not the transpose; the message has both inner products.

    Example:
        >>> from zfun.collectives import all_reduce
        >>> assert_adjoint(all_reduce, [torch.ones(3), torch.zeros(3)])
    """
    starts = [x.detach().double() for x in inputs]
    generator = torch.Generator().manual_seed(seed)
    tangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in starts]

    def main(group: Group) -> tuple[float, float]:
        x, tangent = starts[group.rank], tangents[group.rank]
        step = 1e-5
        with torch.no_grad():
            ahead, behind = fn(x + step * tangent, group), fn(x - step * tangent, group)
        leaf = x.clone().requires_grad_()
        out = fn(leaf, group)
        own = torch.Generator().manual_seed(seed + 1 + group.rank)
        cotangent = torch.randn(out.shape, generator=own, dtype=out.dtype)
        (back,) = torch.autograd.grad(out, leaf, cotangent, materialize_grads=True)
        forward = (ahead - behind) / (2 * step)
        return float((cotangent * forward).sum()), float((back * tangent).sum())

    forward, backward = (
        sum(products) for products in zip(*simulate(len(inputs), main), strict=True)
    )
    if not abs(forward - backward) <= tolerance * max(abs(forward), abs(backward), 1e-3):
        raise AssertionError(
            "the backward pass of a collective is the transpose of its derivative; the inner "
            f"product with the derivative is {forward:.9g}, that with the gradient {backward:.9g}; "
            "see the table of duals in zfun.collectives"
        )
