"""Buffers of a module, such as running means, merged over the ranks by a rule for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, all_reduce
from zfun.errors import OptionError
from zfun.flat import Flat, ravel, unravel
from zfun.layout import LabelFn, Layout, labels_of, layout_of, split_by_label
from zfun.options import OF_LEAVES, takes

# ``rule(path, leaf)`` returns "mean", "rank 0" or "by rank"; None for a leaf that is no buffer. The
# leaf may be a meta tensor.
BufferRule: TypeAlias = Callable[[str, Any], str | None]


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


@takes(rule=OF_LEAVES)
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
