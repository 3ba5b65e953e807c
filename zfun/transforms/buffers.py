"""Leaves that a loss writes: buffers, and frozen leaves that must stay as they are.

[Note: buffers]
A module in training writes its buffers in place, BatchNorm's running statistics for one. A step
stays a pure function of the state, because each call of the loss gets copies of the buffers:
``running`` names the buffers of a step, ``buffered`` passes copies to the loss and takes the values
that the loss left, and the next micro-batch continues with these values. The copies are made twice
for each call, before and after, because activation checkpointing runs a block again in backward,
and writes again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group
from zfun.errors import SpecMismatch
from zfun.flat import Flat
from zfun.layout import Layout, split_by_label
from zfun.placement import R
from zfun.reductions import BufferRule, checked_rule
from zfun.sources.deferred import spec_of
from zfun.transforms.call._buckets import tree_of, views_of
from zfun.transforms.call._written import marks_of, written
from zfun.transforms.values._agreement import check_agreement
from zfun.transforms.values.building import Leaves, build
from zfun.typing import Loss


def views_by_leaf(buffers: Sequence[Tensor], layout: Layout) -> tree.Tree:
    """View whole buffers as a tree; a write to one leaf leaves the versions of the others."""
    slots = [[layout.leaves[leaf] for leaf in bucket.leaves] for bucket in layout.buckets]
    return tree_of(layout, map(views_of, buffers, slots))


def place_buffers(
    buffers: tree.Tree,
    group: Group,
    rule: BufferRule | None,
    init: str,
    placed: Callable[[Layout], Layout] | None = None,
) -> Flat | None:
    """Lay buffers out, each bucket with one rule; ranks may differ in those kept by rank.

    Over model axes ``placed`` says how the leaves are spread.
    """
    if rule is None or not tree.leaves(buffers):
        return None
    label = checked_rule(rule)
    own, shared = tree.partition(
        buffers, lambda path, leaf: label(path, spec_of(leaf)) == "by rank"
    )
    check_agreement(shared, group, compare="values" if init == "check" else "forms")
    layout = check_agreement(tree.combine(own, shared), group, compare="forms")
    if placed is not None:
        layout = placed(layout)
    leaves = Leaves(buffers, group, init, is_own=set(tree.paths(own)).__contains__)
    flat = build(leaves, split_by_label(layout, label), group, R)
    leaves.check()
    return flat


class _CallBuffers:
    """The buffers in the course of a step.

    Args:
        flat: the buffers before the step, which the step leaves as they are.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat

    @property
    def flat(self) -> Flat:
        """The buffers after the calls of the loss so far."""
        return self._flat

    def call(self, loss: Loss, params: tree.Tree, batch: Any) -> Any:
        """Return the loss of parameters and copies of the buffers, and take what the loss left."""
        layout, copies = self._flat.layout, [buffer.clone() for buffer in self._flat.buffers]
        given = views_by_leaf(copies, layout)
        whole = tree.combine(params, given)
        before, spec = tree.flatten(whole)
        out = loss(whole, batch)
        # A module that assigns to a buffer, self.mean = ..., leaves another tensor in the tree.
        with torch.no_grad():
            for old, new in zip(before, tree.leaves_like(spec, whole) or before, strict=True):
                if new is not old:
                    _assign(old, new, tree.leaves(given), layout.paths)
        self._flat = self._flat.with_buffers(copy.detach().clone() for copy in copies)
        return out


def _assign(old: Any, new: Any, given: Sequence[Tensor], paths: Sequence[str]) -> None:
    path = next((path for path, x in zip(paths, given, strict=True) if x is old), None)
    if path is None:
        return
    if not isinstance(new, Tensor) or (new.shape, new.dtype) != (old.shape, old.dtype):
        got = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
        raise SpecMismatch(
            f"a buffer keeps dtype and shape; leaf {path!r} was {old.dtype} {tuple(old.shape)}, "
            f"and the loss left {got}; write the values in place",
            leaf=path,
        )
    old.copy_(new)


_running: ContextVar[_CallBuffers | None] = ContextVar("zfun_transforms_buffers", default=None)


@contextlib.contextmanager
def running(flat: Flat | None) -> Iterator[Callable[[], Flat | None]]:
    """Pass buffers to the losses that this context calls; yield a function that returns the new."""
    buffers = None if flat is None else _CallBuffers(flat)
    token = _running.set(buffers)
    try:
        yield lambda: None if buffers is None else buffers.flat
    finally:
        _running.reset(token)


def buffered(loss: Loss) -> Loss:
    """Let a loss get the buffers of the step beside the parameters."""

    def whole_loss(params: tree.Tree, batch: Any) -> Any:
        buffers = _running.get()
        return loss(params, batch) if buffers is None else buffers.call(loss, params, batch)

    return whole_loss


def unwritten(loss: Loss) -> Loss:
    """Refuse a loss that writes to whole leaves that are not trained, and name the leaf."""
    marks_are_compared = False

    def checked_loss(params: tree.Tree, batch: Any) -> Any:
        nonlocal marks_are_compared
        leaves = tree.leaves(params)
        places = [place for place, leaf in enumerate(leaves) if not leaf.requires_grad]
        frozen = [leaves[place] for place in places]
        versions = [leaf._version for leaf in frozen]
        marks = None if marks_are_compared else marks_of(frozen)
        out = loss(params, batch)
        changed = [leaf._version != old for leaf, old in zip(frozen, versions, strict=True)]
        if marks is not None:
            changed += map(operator.ne, marks_of(frozen), marks)
            marks_are_compared = True
        if True in changed:
            place = places[changed.index(True) % len(places)]
            raise written(tree.paths(params)[place])
        return out

    return checked_loss
