"""Functions of a whole sharded value: they need values of every rank, and so communicate.

An optimizer rule that looks at whole leaves or at a norm calls these, and needs no collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import collectives, ops, stores, tree
from zfun.collectives import (
    AllGather,
    Collective,
    Group,
    agreement_group,
    all_reduce,
    exchange_values,
    start_gather,
    sum_group,
)
from zfun.errors import LeafError, OptionError, PlacementError, SpecMismatch
from zfun.flat import FLAT, Flat, leaf_spans, own_piece, ravel, unravel
from zfun.layout import LabelFn, Layout, aligned, labels_of, layout_of, split_by_label
from zfun.options import (
    ANY,
    BOOL,
    FUNCTION,
    GROUP,
    ITERABLE,
    OF_LEAVES,
    TENSOR,
    TEXT,
    integer,
    takes,
)
from zfun.placement import P, S, is_first

# ``rule(path, leaf)`` returns "mean", "rank 0" or "by rank"; None for a leaf that is no buffer. The
# leaf may be a meta tensor.
BufferRule: TypeAlias = Callable[[str, Any], str | None]

__all__ = [
    "BufferRule",
    "Spent",
    "all_ranks",
    "any_rank",
    "checked_rule",
    "gather_values",
    "global_norm",
    "map_leaves",
    "mean_metrics",
    "merge_buffers",
    "norm_and_counts",
]


@takes(flat=FLAT)
def all_ranks(flat: Flat) -> Group:
    """Return the group of all ranks: the whole mesh if the group of a value is an axis of a mesh.

    Args:
        flat: with any placement.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     flat = zf.shard({"w": torch.ones(4)}, zf.split(group, inner=2).inner)
        ...     return flat.group.size, all_ranks(flat).size
        >>> zf.simulate(4, main)[0]
        (2, 4)
    """
    return sum_group(flat.group)


@takes(flat=FLAT, x=TENSOR, name=TEXT)
def gather_values(flat: Flat, x: Tensor, name: str = "values") -> Tensor:
    """Return a small tensor of every rank, stacked in rank order, for by-leaf rules.

    Args:
        flat: the value whose group gathers.
        x: of one shape, dtype and type of device on all ranks.
        name: the name of ``x`` in messages and logs.

    Returns:
        ``[size, *x.shape]``, over the group of ``flat``.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     flat = zf.shard({"w": torch.ones(4)}, group)
        ...     return gather_values(flat, torch.tensor(group.rank)).tolist()
        >>> zf.simulate(2, main)
        [[0, 1], [0, 1]]
    """
    return collectives.gather_values(x, flat.group, name)


def whole_buffers(flat: Flat, name: str) -> list[Tensor]:
    """Gather the buffers of a sharded value (``S -> R``), for rules that need whole buckets.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return whole_buffers(zf.shard({"w": torch.ones(96)}, group), "w")[0].sum().item()
        >>> zf.simulate(2, main)
        [96.0, 96.0]
    """
    found = []
    for buffer, slot in zip(flat.buffers, flat.layout.buckets, strict=True):
        call = Collective(AllGather(), name)
        pending = (
            start_gather(flat.group, call, buffer, slot.pieces)
            if slot.pieces
            else flat.group.start(call, buffer)
        )
        found.append(pending.wait())
    return found


@takes(flat=FLAT, fn=FUNCTION, cost=FUNCTION)
def map_leaves(
    flat: Flat, fn: Callable[[Tensor], Tensor], cost: Callable[[tuple[int, ...]], float]
) -> Flat:
    """Apply a function that needs whole leaves, and gives one of the same shape, to every leaf.

    A leaf that lies whole on one rank stays there, and nothing is sent. Each cut leaf goes to one
    rank, which applies the function and sends the parts of the result back: two all-to-alls of the
    shards, padded to the largest message. Cut leaves are assigned so that costs are about even.

    Args:
        flat: with placement ``R`` or ``S``.
        fn: ``fn(leaf) -> result``, of fresh contiguous tensors.
        cost: the cost of the function for a leaf of a shape.

    Returns:
        A flat with the placement, layout and dtypes of ``flat``.
    """
    if flat.placement is not S:
        out = flat.with_buffers(torch.zeros_like(buffer) for buffer in flat.buffers)
        for slot in flat.layout.leaves:
            view = flat.buffers[slot.bucket][slot.offset : slot.offset + slot.numel]
            out.buffers[slot.bucket][slot.offset : slot.offset + slot.numel] = fn(
                view.clone().view(slot.shape)
            ).reshape(-1)
        return out
    out = flat.with_buffers(torch.zeros_like(buffer) for buffer in flat.buffers)
    for dtype in dict.fromkeys(buffer.dtype for buffer in flat.buffers):
        _map_shards(
            flat,
            out,
            fn,
            [i for i, buffer in enumerate(flat.buffers) if buffer.dtype == dtype],
            cost,
        )
    return out


def _map_shards(
    flat: Flat,
    out: Flat,
    fn: Callable[[Tensor], Tensor],
    buckets: Sequence[int],
    cost: Callable[..., float],
) -> None:
    group, layout, rank = flat.group, flat.layout, flat.group.rank
    spans = [leaf_spans(flat, holder) for holder in range(group.size)]
    leaves: list[int] = []
    loads = [0.0] * group.size
    for leaf in [leaf for bucket in buckets for leaf in layout.buckets[bucket].leaves]:
        slot, here = layout.leaves[leaf], spans[rank][leaf]
        numels = [held[leaf].stop - held[leaf].start for held in spans]
        if slot.numel not in numels:
            leaves.append(leaf)
            continue
        loads[numels.index(slot.numel)] += cost(slot.shape)
        if here.start < here.stop:
            whole = flat.buffers[slot.bucket][here.start : here.stop].clone().view(slot.shape)
            out.buffers[slot.bucket][here.start : here.stop] = fn(whole).reshape(-1)
    owners = _shared_out([cost(layout.leaves[leaf].shape) for leaf in leaves], loads)

    def piece(leaf: int, holder: int) -> tuple[int, int]:
        return spans[holder][leaf].start, spans[holder][leaf].stop

    def length(holder: int, owner: int) -> int:
        pieces = [
            piece(leaf, holder) for leaf, its in zip(leaves, owners, strict=True) if its == owner
        ]
        return sum(stop - start for start, stop in pieces)

    longest = max(
        (length(holder, owner) for holder in range(group.size) for owner in range(group.size)),
        default=0,
    )
    if not longest:
        return
    sent = flat.buffers[buckets[0]].new_zeros(group.size, longest)
    ends = [0] * group.size
    for leaf, owner in zip(leaves, owners, strict=True):
        start, stop = piece(leaf, rank)
        sent[owner, ends[owner] : ends[owner] + stop - start] = flat.buffers[
            layout.leaves[leaf].bucket
        ][start:stop]
        ends[owner] += stop - start
    received = exchange_values(sent, group, "leaves")
    answers = torch.zeros_like(received)
    ends = [0] * group.size
    for leaf, owner in zip(leaves, owners, strict=True):
        if owner != rank:
            continue
        slot = layout.leaves[leaf]
        lengths = [
            stop - start for start, stop in (piece(leaf, holder) for holder in range(group.size))
        ]
        parts = [
            received[holder, ends[holder] : ends[holder] + numel]
            for holder, numel in enumerate(lengths)
        ]
        # The pieces of a leaf need not lie in the order of the ranks.
        holders = sorted(range(group.size), key=lambda holder: spans[holder][leaf].first)
        result = fn(torch.cat([parts[holder] for holder in holders]).view(slot.shape)).reshape(-1)
        split = result.split([lengths[holder] for holder in holders])
        for holder, part in zip(holders, split, strict=True):
            answers[holder, ends[holder] : ends[holder] + part.numel()] = part
            ends[holder] += part.numel()
    returned = exchange_values(answers, group, "leaves")
    ends = [0] * group.size
    for leaf, owner in zip(leaves, owners, strict=True):
        start, stop = piece(leaf, rank)
        out.buffers[layout.leaves[leaf].bucket][start:stop] = returned[
            owner, ends[owner] : ends[owner] + stop - start
        ]
        ends[owner] += stop - start


def _shared_out(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Give each task to the rank with the least load, the dearest task first."""
    owners, loads = [0] * len(costs), list(loads)
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
        owners[task] = loads.index(min(loads))
        loads[owners[task]] += costs[task]
    return owners


@takes(squares=TENSOR)
@dataclass(frozen=True, slots=True)
class Spent:
    """The place of a bucket of finite gradients whose memory holds other values by now.

    A step that begins in backward gives the memory of gradients to new parameters. Such a bucket
    has a norm, and no values to read.

    Attributes:
        squares: the sums of squares of this rank's part, from ``zfun.ops.squares_in_bins``.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     grads = zf.shard({"w": torch.tensor([3.0, 4.0])}, group)
        ...     spent = Spent(zf.ops.squares_in_bins(grads.buffers[0]))
        ...     return global_norm(grads.with_buffers([spent])).item()
        >>> zf.simulate(2, main)
        [5.0, 5.0]
    """

    squares: Tensor


def global_norm(value: tree.Tree) -> Tensor:
    """Return the L2 norm of a whole tree over all ranks.

    Padding is never counted, a replicated or a tied element once. Every rank sums the squares of
    the local pieces in exact integers, so the result has the same bits for a replicated value, a
    sharded value and a plain tree, and for all sizes of buckets and group.

    Args:
        value: a tree of tensors, or of flats with placement ``R`` or ``S``. Of buffers in a
            store, a few at a time are in memory.

    Returns:
        A 0-dim float64 tensor on the CPU, equal on all ranks. The host waits for the device once.

    Raises:
        PlacementError: a flat is partial.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return global_norm(zf.shard({"w": torch.tensor([3.0, 4.0])}, group)).item()
        >>> zf.simulate(2, main)
        [5.0, 5.0]
    """
    if isinstance(value, Flat):
        versions, norm = value.life.cached.get(global_norm, (None, None))
        if versions is not None and versions == _versions(value):
            return norm
    rows = []
    leaves = tree.leaves(value, is_leaf=lambda x: isinstance(x, Flat))
    # The gradient of tied leaves is one tensor, and counts once.
    for leaf in {id(leaf): leaf for leaf in leaves}.values():
        if isinstance(leaf, Flat):
            rows.append(_squares(leaf))
        elif not isinstance(leaf, Tensor):
            raise LeafError(
                f"a norm is that of tensors; got a leaf of class {type(leaf).__name__}; leave the "
                "leaf out with zf.partition()"
            )
        else:
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            rows.append(ops.squares_in_bins(real.reshape(-1))[None])
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    return ops.total_of_bins(torch.cat(rows)).sqrt()


def _versions(flat: Flat) -> list[int] | None:
    """Return numbers that change when a buffer is written; ``None`` if torch does not tell."""
    # Other buffers are not written.
    tensors = [x for x in flat.buffers if isinstance(x, Tensor)]
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def _squares(flat: Flat) -> Tensor:
    if flat.placement is P:
        raise PlacementError(
            "a norm needs the sum over the ranks; got a Flat with placement P; redistribute() it "
            "to R or S first"
        )
    return _over_model_axes(gather_values(flat, _own_squares(flat), "norm"), flat.group)[0]


def _over_model_axes(rows: Tensor, group: Group) -> tuple[Tensor, int]:
    """Return the rows of the ranks along all model axes, and the place of the first given one."""
    start = 0
    for axis in collectives.model_groups(group):
        start += axis.rank * len(rows)
        rows = collectives.gather_values(rows, axis, "norm").flatten(0, 1)
    return rows, start


def _own_squares(flat: Flat) -> Tensor:
    row = flat.life.cached.get(_squares)
    if row is None:
        row = _local_squares(flat)
        if any(isinstance(buffer, stores.Stored) for buffer in flat.buffers):
            # Stored tensors do not change, and to read the tensors once more costs time.
            flat.life.cached[_squares] = row
    return row


@takes(grads=FLAT, count=integer(0))
def norm_and_counts(grads: Flat, count: int) -> tuple[Tensor, list[int]]:
    """Return the norm of gradients, and an integer of each rank, in one message and one read.

    Args:
        grads: with any placement. The norm of terms (``P``) is the sum of the norms of the ranks'
            terms, which is an upper bound.
        count: of this rank.

    Returns:
        The norm, as :func:`global_norm` returns it; the integers of all ranks, on a mesh of all
        ranks of the mesh.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     grads = zf.shard({"w": torch.tensor([3.0, 4.0])}, group)
        ...     return norm_and_counts(grads, 10 + group.rank)
        >>> zf.simulate(2, main)[0]
        (tensor(5., dtype=torch.float64), [10, 11])
    """
    mesh = all_ranks(grads)
    is_term = grads.placement is P
    row = global_norm(unravel(grads)).view(1) if is_term else _own_squares(grads)
    rows = collectives.gather_values(torch.cat([row, row.new_full((1,), count)]), mesh, "norm")
    rows, start = _over_model_axes(rows, mesh)
    is_abstract = ops.is_abstract(rows)
    rows = rows if is_abstract else rows.cpu()
    own = rows[start : start + mesh.size, -1]
    counts = [count] * mesh.size if is_abstract else [int(x) for x in own.tolist()]
    if is_term:
        return rows[:, 0].sum(), counts
    # The rows of a mesh hold equal shards, so one row is counted.
    norm = ops.total_of_bins(rows[:: mesh.size // grads.group.size, :-1]).sqrt()
    # An optimizer that clips asks for the norm once more.
    grads.life.cached[global_norm] = _versions(grads), norm
    return norm, counts


def _local_squares(flat: Flat) -> Tensor:
    """Return the sums of bins, and a last element for infinities and NaNs, of this rank's part."""
    device = flat.layout.device
    spent = [buffer.squares for buffer in flat.buffers if isinstance(buffer, Spent)]
    left = [i for i, buffer in enumerate(flat.buffers) if not isinstance(buffer, Spent)]
    kept = flat.select(left) if spent else flat
    pieces = [squares.to(device) for squares in spent]
    counted = _counted(kept)
    for index, buffer in enumerate(stores.reading(kept)):
        slot = kept.layout.buckets[index]
        piece = buffer if flat.placement is S else own_piece(buffer, slot, flat.group)
        for start, stop in [(0, len(piece))] if counted is None else counted[index]:
            pieces.append(ops.squares_in_bins(piece[start:stop]).to(device))
    mine = torch.stack(pieces or [ops.squares_in_bins(torch.zeros(0, device=device))])
    return torch.cat(
        [
            mine[:, :-1].sum(0),
            mine[:, -1].contiguous().view(torch.float64).sum().view(1).view(torch.int64),
        ]
    )


def _counted(flat: Flat) -> list[list[tuple[int, int]]] | None:
    """Return the spans of each bucket of this rank's part that this rank counts; ``None`` for all.

    A leaf that several ranks of a model axis hold counts on the first of them.
    """
    axes = collectives.model_groups(flat.group)
    if not axes:
        return None

    ranks = [axis.rank for axis in axes]
    spans: list[list[tuple[int, int]]] = [[] for _ in flat.layout.buckets]
    for slot in sorted(flat.layout.leaves, key=lambda slot: slot.offset):
        begin, end = flat.layout.buckets[slot.bucket].span(flat.group.rank, flat.group.size)
        start = max(slot.offset, begin)
        stop = min(slot.offset + slot.numel, end)
        if start < stop and is_first(slot.spread, ranks):
            found = spans[slot.bucket]
            # Between neighbours there are zeros alone.
            joins = bool(found) and aligned(found[-1][1]) == start - begin
            first = found.pop()[0] if joins else start - begin
            found.append((first, stop - begin))
    return spans


@functools.lru_cache(maxsize=64)
def checked_rule(rule: BufferRule) -> LabelFn:
    """Return the rule of buffers by path and leaf, for leaves that are buffers."""

    def checked(path: str, leaf: Any) -> str:
        name = rule(path, leaf)
        if name not in ("mean", "rank 0", "by rank"):
            raise OptionError(
                "a rule for buffers is 'mean', 'rank 0' or 'by rank', and None for a leaf that is "
                f"no buffer; got {name!r} for leaf {path!r}; return one of these"
            )
        has_mean = leaf.is_floating_point() or leaf.is_complex()
        return "rank 0" if name == "mean" and not has_mean else name

    return checked


def _bucket_rules(layout: Layout, rule: BufferRule) -> list[str]:
    """Return the rule of each bucket of a layout whose buckets mix no rules."""
    rules = labels_of(layout, checked_rule(rule))
    return [str(rules[bucket.leaves[0]]) for bucket in layout.buckets]


@takes(buffers=ANY, group=GROUP, rule=OF_LEAVES)
def merge_buffers(buffers: tree.Tree, group: Group, rule: BufferRule) -> tree.Tree:
    """Merge the buffers that the loss of each rank has left, by a rule for each leaf.

    One all-reduce merges all leaves. Values with the rule ``"rank 0"`` keep all bits.

    Args:
        buffers: a tree of tensors, or a ``Flat`` with placement ``R``, alike on all ranks but for
            the values.
        group: the ranks; with a mesh, all of them.
        rule: ``rule(path, leaf)`` returns ``"mean"`` for the mean over the ranks (of integers and
            booleans, which have none, the values of rank 0), ``"rank 0"`` for the values of rank 0,
            or ``"by rank"`` for the values of each rank.

    Returns:
        The merged buffers: new tensors, but for the leaves that each rank keeps.

    Raises:
        OptionError: another rule.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     found = {"mean": torch.tensor([2.0 * group.rank]), "seen": torch.tensor(7)}
        ...     return merge_buffers(found, group, lambda path, leaf: "mean")
        >>> zf.simulate(2, main)[1]
        {'mean': tensor([1.]), 'seen': tensor(7)}
    """
    if not isinstance(buffers, Flat):
        layout = split_by_label(layout_of(buffers), checked_rule(rule))
        return unravel(merge_buffers(ravel(buffers, layout, group), group, rule))
    rules = _bucket_rules(buffers.layout, rule)
    merged, sent = list(buffers.buffers), dict[int, Tensor]()
    for index, (buffer, name) in enumerate(zip(merged, rules, strict=True)):
        if name == "mean":
            sent[index] = buffer.to(torch.float64)
        elif name == "rank 0":
            # A sum of one integer and zeros is exact, whatever the bits stand for.
            words = buffer.view(torch.int32).to(torch.float64)
            sent[index] = words if group.rank == 0 else torch.zeros_like(words)
    if not sent or group.size == 1:
        return buffers
    sums = all_reduce(torch.cat([*sent.values()]), group, name="buffers")
    for index, total in zip(sent, sums.split([len(x) for x in sent.values()]), strict=True):
        dtype = merged[index].dtype
        merged[index] = (
            (total / group.size).to(dtype)
            if rules[index] == "mean"
            else total.to(torch.int32).view(dtype)
        )
    return buffers.with_buffers(merged)


@takes(metrics=ITERABLE, group=GROUP)
def mean_metrics(metrics: Iterable[tuple[tree.Tree, float | Tensor]], group: Group) -> tree.Tree:
    """Return the weighted mean of trees of metrics, over micro-batches and ranks.

    One all-gather, of sums in float64 that are added in rank order, so the result has the same bits
    on every rank.

    Args:
        metrics: pairs of a tree of numbers and tensors, and a weight, such as the number of
            examples: one pair for each batch of this rank. Ranks may have different numbers of
            batches, but at least one; a rank without data passes one with weight 0, whose values
            do not count. A value is a mean over the batch, or a sum with weight 1.
        group: the ranks; all must call.

    Returns:
        A tree like one of ``metrics``, of float64 tensors.

    Raises:
        OptionError: there are no metrics, or all weights of all ranks are 0.
        SpecMismatch: trees differ in structure or shapes.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     batches = [({"accuracy": 1.0 - group.rank}, 3), ({"accuracy": 0.5}, 1)]
        ...     return mean_metrics(batches, group)["accuracy"].item()
        >>> zf.simulate(2, main)
        [0.5, 0.5]
    """
    pairs = [*metrics]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and _is_number(pair[1])):
            raise OptionError(
                "mean_metrics() takes pairs of metrics and a weight; got "
                f"{type(pair).__name__}; write mean_metrics([(metrics, num_examples)], group)"
            )
    found = [(tree.flatten(values), float(weight)) for values, weight in pairs]
    if not found:
        raise OptionError(
            "mean_metrics() takes at least one pair of metrics and weight from each rank; got "
            "none; pass the metrics of any batch with weight 0"
        )
    (first, spec), _ = found[0]
    shapes = [torch.as_tensor(value).shape for value in first]
    tensors = (value for value in first if isinstance(value, Tensor))
    device = next((x.device for x in tensors), torch.device("cpu"))
    total = torch.zeros(
        sum(shape.numel() for shape in shapes) + 1, dtype=torch.float64, device=device
    )
    for (values, its), weight in found:
        if its != spec or [torch.as_tensor(value).shape for value in values] != shapes:
            raise SpecMismatch(
                f"metrics of all batches have one structure; got {its} after {spec}, or other "
                "shapes; return the same metrics for every batch"
            )
        if weight:
            parts = [torch.as_tensor(x, device=device).detach().double().view(-1) for x in values]
            total += weight * torch.cat([*parts, total.new_ones(1)])
    *sums, weight = (
        # On the host, because a rank without data may have numbers where others have tensors.
        collectives.gather_values(total.cpu(), sum_group(group), "metrics")
        .sum(0)
        .to(device)
        .split([*(shape.numel() for shape in shapes), 1])
    )
    if not float(weight):
        raise OptionError(
            "metrics have a weight above 0 on some rank; got 0 on all; pass the number of examples"
        )
    means = (part.view(shape) / weight for part, shape in zip(sums, shapes, strict=True))
    return tree.unflatten(spec, means)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1)


@takes(flag=BOOL, group=GROUP)
def any_rank(flag: bool, group: Group) -> bool:
    """Return whether the flag is set on any rank: the same answer on all, so that all stop alike.

    Args:
        flag: a decision of this rank, such as "the time is over".
        group: the ranks; all must call.

    Example:
        >>> import zfun as zf
        >>> zf.simulate(3, lambda group: any_rank(group.rank == 1, group))
        [True, True, True]
    """
    mine = torch.tensor([flag], dtype=torch.uint8)
    return bool(collectives.gather_values(mine, agreement_group(group), "flag").any())
