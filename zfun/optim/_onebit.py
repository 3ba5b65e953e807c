"""1-bit Adam: momentum that is averaged over the ranks in one bit per number.

[Note: the compressed sum]
A message holds the rank's own momentum and the error of its last message. So from ``freeze_step``
on this optimizer takes the terms of the gradient (``P``), where other optimizers take the sum.
``Optimizer.partial`` tells the transforms before each step whether to leave the sum to the
optimizer. Parameters and moments are ``R`` or ``S`` as in other optimizers. The errors of messages
are a term on every rank (``P``). The errors of answers are sharded: each rank keeps the errors of
the chunk that it averages. Messages encode the whole momentum leaf by leaf, and each rank takes its
shard of the mean, so parameters have the same bits for every sharding and every layout of buckets.

A rank with a shard of the moments needs the whole momentum, because its gradient is whole. The last
answers hold the whole momentum in one bit per number, so the state keeps the answers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import compression, ops, tree
from zfun.errors import PlacementError
from zfun.flat import Flat, local_shards
from zfun.layout import Layout
from zfun.optim._base import Optimizer, State, remembered
from zfun.optim._rows import aligned, check_fields, check_trainable, flat_view, own, step_count
from zfun.optim._rules import AdamState
from zfun.optim._schedules import Schedule, decay_at, rate_at
from zfun.optim._stepping import Into, Kernel, assemble, elementwise, no_steps, zeros_like
from zfun.options import integer, takes
from zfun.placement import P, R, S
from zfun.reductions import all_ranks, whole_buffers
from zfun.tree import Tree


class OneBitState(NamedTuple):
    """State of :func:`onebit_adam`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU. From ``freeze_step`` on momentum is compressed.
        mu: first moments, a tree like the parameters.
        nu: second moments, a tree like the parameters; constant from ``freeze_step`` on.
        worker_error: the errors of this rank's messages, a whole value on every rank; ``None`` on
            one rank.
        server_error: the errors of this rank's answers: for each bucket the chunks of the leaves,
            one after the other. A tree like the parameters if the parameters are a tree, and
            ``None`` on one rank.
        answers: for each bucket the last answers if the moments are sharded; else ``None``.
    """

    count: Tensor
    mu: Tree
    nu: Tree
    worker_error: Tree
    server_error: Any
    answers: tuple[Tensor, ...] | None


@takes(freeze_step=integer(1))
@remembered
def onebit_adam(
    learning_rate: float | Schedule,
    *,
    freeze_step: int = 100_000,
    b1: float | Schedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> Optimizer:
    """1-bit Adam: after a warm-up, second moments are constant and momentum is sent in one bit.

    The first T = ``freeze_step`` steps are those of :func:`adamw`, to the last bit. From then on,
    with the gradient gᵢ of rank i, ``m = compressed mean of (b1 m + (1 - b1) gᵢ)`` and ``p = p -
    learning_rate ((m / (1 - b1ᵗ)) / (√(v / (1 - b2ᵀ)) + eps) + weight_decay p)``. Each leaf is sent
    by itself, as in :func:`zfun.compression.compressed_all_reduce`: the signs and one scale of the
    momentum plus the error of the last message. An element without a gradient in the warm-up has
    ``v = 0``, and stays unchanged.

    The compressed steps take the terms of the gradient (``P``), as :func:`zfun.data_parallel`
    returns: at stages 0 and 1, and in ``zf.zero(2, ...)``, which then leaves the sum out of
    backward. Stage 3 is refused, because every rank keeps the errors of whole parameters. In a
    :func:`chain` 1-bit Adam is the first part. All leaves take every step, because messages hold
    all leaves: one that no rank used has a gradient of zeros, whatever ``zf.zero(..., unused=)``
    says. "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    Tang et al., 2021.

    Args:
        learning_rate: step size, or a function of the number of steps taken so far.
        freeze_step: the number of warm-up steps, after which v hardly changes: 15 to 20 % of all
            steps in the paper.
        b1: decay of the first moment, in [0, 1), or a function of the number of steps taken so far.
        b2: decay of the second moment, in [0, 1).
        eps: added to the root mean square.
        weight_decay: share of the parameter that a step with learning rate 1 would subtract.
        bias_correction: whether moments are divided by ``1 - bᵗ``. DeepSpeed's OneBitAdam does not.

    Returns:
        An optimizer with :class:`OneBitState`.

    Raises:
        OptionError: a value of an option is out of range.
        PlacementError: from a compressed step, if the gradients are summed already.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     group = zf.record(group)
        ...     loss_fn = lambda params, batch: ((params["w"] - batch) ** 2).sum()
        ...     zero = zf.zero(0, loss_fn, zf.optim.onebit_adam(0.1, freeze_step=2), group)
        ...     state, sent = zero.init({"w": torch.zeros(1024)}), []
        ...     for _ in range(4):
        ...         group.clear()
        ...         state, _ = zero.step(state, torch.ones(1024) * (group.rank + 1))
        ...         sent.append(group.bytes_sent("grads") + group.bytes_sent("momentum"))
        ...     return sent
        >>> zf.simulate(2, main)[0]
        [4096, 4096, 136, 136]
    """

    def kernel_at(before: int) -> Kernel:
        rate, first, frozen = (
            rate_at(learning_rate, before),
            decay_at("b1", b1, before),
            before >= freeze_step,
        )
        num_second = freeze_step if frozen else before + 1
        return ops.AdamRule(
            # In compressed steps the moments are known before the kernel runs.
            b1=1.0 if frozen else first,
            b2=1.0 if frozen else b2,
            step_size=rate / (1.0 - first ** (before + 1)) if bias_correction else rate,
            eps=eps,
            decay=rate * weight_decay,
            correction=math.sqrt(1.0 - b2**num_second) if bias_correction else 1.0,
        )

    adam = elementwise(AdamState, ("mu", "nu"), kernel_at)

    def init(params: Tree) -> OneBitState:
        check_trainable(params)
        return OneBitState(no_steps(), zeros_like(params), zeros_like(params), *_no_errors(params))

    def warm_up(grads: Tree, state: State, params: Tree, into: Into) -> tuple[Tree, OneBitState]:
        method = adam.update if into.updates else functools.partial(adam.apply, donate=into.donate)
        new, after = method(grads, AdamState(*state[:3]), params)
        return new, OneBitState(*after, *_kept(state, into.donate))

    def step(grads: Tree, state: State, params: Tree, into: Into) -> tuple[Tree, OneBitState]:
        check_fields(state, *OneBitState._fields)
        before = step_count(state.count)
        grads = grads.with_missed({}) if isinstance(grads, Flat) else grads
        if before < freeze_step:
            return warm_up(grads, state, params, into)
        first = decay_at("b1", b1, before)
        if isinstance(params, Flat) and all_ranks(params).size > 1:
            if not isinstance(grads, Flat) or grads.placement is not P:
                raise PlacementError(
                    f"from step {freeze_step} on onebit_adam() sums by itself, in one bit, and "
                    "takes each rank's own term of the gradients (P); got "
                    f"{grads.placement if isinstance(grads, Flat) else type(grads).__name__!r}, "
                    "summed already; from that step on leave shard_grads() out, or let zf.zero() "
                    "do it"
                )
            whole, worker, server, answers = _summed(
                grads, state, params, first, into.donate, is_first=before == freeze_step
            )
            mus = list(
                local_shards(Flat(whole, R, params.layout, params.group))
                if params.placement is S
                else whole
            )
            rest = worker, server, answers
        else:
            rows = aligned(params, gradients=grads, mu=state.mu)
            wide = [
                m.to(ops.wide(m.dtype), copy=True)
                .mul_(first)
                .add_(g.detach().to(ops.wide(m.dtype)).mul(1.0 - first))
                for _, g, m in rows
            ]
            mus = [x.to(m.dtype) for x, (_, _, m) in zip(wide, rows, strict=True)]
            rest = _kept(state, into.donate)
        return _stepped(mus, state, params, into, kernel_at(before), rest)

    def is_frozen(state: OneBitState) -> bool:
        check_fields(state, "count")
        return step_count(state.count) >= freeze_step

    return assemble(init, step)._replace(by_leaf=True, partial=is_frozen)


def _stepped(
    mus: Sequence[Tensor],
    state: OneBitState,
    params: Tree,
    into: Into,
    kernel: Kernel,
    rest: Sequence[Any],
) -> tuple[Tree, OneBitState]:
    """Step by the given momentum, in fresh tensors."""
    rows = aligned(params, nu=state.nu)
    spec = tree.structure(params)
    nus = own([nu for _, nu in rows], into.donate)
    targets, changes = into.targets([p for p, _ in rows])
    for mu, nu, target, change in zip(mus, nus, targets, changes, strict=True):
        flat_nu, flat_mu = flat_view(nu), flat_view(mu)
        # An element with v = 0 takes no step. Padding has v = 0 too.
        used = torch.where(flat_nu > 0, flat_mu.to(flat_nu.dtype), 0.0)
        kernel(
            flat_view(target), flat_mu, used, flat_nu, None if change is None else flat_view(change)
        )
    # Clone views, because a view keeps the whole buffer alive.
    kept = [mu.clone() if mu.untyped_storage().nbytes() > mu.nbytes else mu for mu in mus]
    after = OneBitState(
        state.count + 1, tree.unflatten(spec, kept), tree.unflatten(spec, nus), *rest
    )
    return tree.unflatten(spec, into.results(targets, changes)), after


def _kept(state: OneBitState, donate: bool) -> list[Any]:
    """Return the errors and answers of a step without messages."""
    return [tree.map(lambda x: x if donate else x.clone(), part) for part in state[3:]]


def _no_errors(params: Tree) -> tuple[Any, Any, Any]:
    """Return zeros as the errors and answers before the first message."""
    if not isinstance(params, Flat):
        # A tree does not know the number of ranks, so both errors are whole.
        wide = tree.map(lambda p: torch.empty_like(p, dtype=ops.wide(p.dtype)), params)
        return zeros_like(wide), zeros_like(wide), None
    group, layout = all_ranks(params), params.layout
    if group.size == 1:
        return None, None, None
    zeros = functools.partial(torch.zeros, device=layout.device)
    dtypes = [ops.wide(buffer.dtype) for buffer in params.buffers]
    worker = [
        zeros(slot.padded_numel, dtype=dtype)
        for slot, dtype in zip(layout.buckets, dtypes, strict=True)
    ]
    numels = [_numels(layout, bucket) for bucket in range(len(layout.buckets))]
    server = tuple(
        zeros(
            sum(
                chunk.stop - chunk.start
                for chunk in (compression.own_chunk(n, group) for n in found)
            ),
            dtype=dtype,
        )
        for found, dtype in zip(numels, dtypes, strict=True)
    )
    answers = [
        zeros(compression.packed_bytes(found, group.size, dtype), dtype=torch.uint8)
        for found, dtype in zip(numels, dtypes, strict=True)
    ]
    return Flat(worker, P, layout, group), server, tuple(answers) if params.placement is S else None


def _numels(layout: Layout, bucket: int) -> list[int]:
    return [layout.leaves[leaf].numel for leaf in layout.buckets[bucket].leaves]


def _views(buffer: Tensor, layout: Layout, bucket: int) -> list[Tensor]:
    slots = [layout.leaves[leaf] for leaf in layout.buckets[bucket].leaves]
    return [buffer[slot.offset : slot.offset + slot.numel] for slot in slots]


def _summed(
    grads: Flat, state: OneBitState, params: Flat, first: float, donate: bool, *, is_first: bool
) -> tuple[list[Tensor], Flat, Any, tuple[Tensor, ...] | None]:
    """Sum the momentum of all ranks, all buckets at once.

    Returns:
        The whole buckets of the momentum, the errors of messages and of answers, and the answers
        where the state keeps answers.
    """
    group, layout = grads.group, params.layout
    before = _whole_momentum(state, params, group.size, is_first=is_first)
    workers = own(state.worker_error.buffers, donate)
    servers = own(tree.leaves(state.server_error), donate)
    labels = [("momentum", layout.label(bucket)) for bucket in range(len(layout.buckets))]
    sent = []
    for bucket, buffers in enumerate(zip(workers, before, grads.buffers, strict=True)):
        rows = zip(*(_views(x, layout, bucket) for x in buffers), strict=True)
        terms = (
            _compensated(worker, momentum, grad, first, group.size)
            for worker, momentum, grad in rows
        )
        sent.append(compression.send_signs(terms, group, *labels[bucket]))
    del before
    numels = [_numels(layout, bucket) for bucket in range(len(layout.buckets))]
    asked = []
    for bucket, pending in enumerate(sent):
        kept = _own_chunks(
            servers[bucket], layout, bucket, group, embedded=isinstance(state.server_error, Flat)
        )
        asked.append(
            compression.answer_signs(pending.wait(), kept, numels[bucket], group, *labels[bucket])
        )
    answers = tuple(pending.wait() for pending in asked)
    whole = [
        _read(packed, layout, bucket, group.size, worker.dtype, mu.dtype)
        for bucket, (packed, worker, mu) in enumerate(
            zip(answers, workers, state.mu.buffers, strict=True)
        )
    ]
    server = tree.unflatten(tree.structure(state.server_error), servers)
    return (
        whole,
        state.worker_error.with_buffers(workers),
        server,
        None if state.answers is None else answers,
    )


def _compensated(worker: Tensor, momentum: Tensor, grad: Tensor, first: float, size: int) -> Tensor:
    """Add a rank's own momentum to the error of its last message, in place."""
    # The gradient is multiplied by the size, because gradients are terms of a sum and messages are
    # averaged. Not add_(alpha=), which may round once or twice.
    return worker.add_(
        momentum.to(worker.dtype).mul(first).add_(grad.to(worker.dtype).mul((1.0 - first) * size))
    )


def _whole_momentum(
    state: OneBitState, params: Flat, size: int, *, is_first: bool
) -> Sequence[Tensor]:
    if params.placement is not S:
        return state.mu.buffers
    if is_first:
        return whole_buffers(state.mu, "momentum")
    assert state.answers is not None
    return [
        _read(packed, params.layout, bucket, size, worker.dtype, mu.dtype)
        for bucket, (packed, worker, mu) in enumerate(
            zip(state.answers, state.worker_error.buffers, state.mu.buffers, strict=True)
        )
    ]


def _read(
    packed: Tensor, layout: Layout, bucket: int, size: int, dtype: torch.dtype, out: torch.dtype
) -> Tensor:
    """Decode the answers of a bucket into a whole buffer."""
    whole = torch.zeros(layout.buckets[bucket].padded_numel, dtype=out, device=packed.device)
    means = compression.read_signs(packed, _numels(layout, bucket), size, dtype, out)
    for view, mean in zip(_views(whole, layout, bucket), means, strict=True):
        view.copy_(mean)
    return whole


def _own_chunks(
    server: Tensor, layout: Layout, bucket: int, group: Any, *, embedded: bool
) -> list[Tensor]:
    """View the errors of this rank's answers, as consecutive chunks or inside whole leaves."""
    chunks = [compression.own_chunk(numel, group) for numel in _numels(layout, bucket)]
    if embedded:
        return [
            view[chunk] for view, chunk in zip(_views(server, layout, bucket), chunks, strict=True)
        ]
    return list(server.split([chunk.stop - chunk.start for chunk in chunks]))
