"""How leaves of a model are spread over a model axis, as data that travels with the loss.

[Note: model axes]
ZeRO cuts flat buckets over the *data* axes of a mesh, and never looks at what is in the leaves. A
*model* axis spreads leaves by meaning: columns of a matrix, experts, layers. Each rank then has a
tree of its own, with smaller or fewer leaves, and ZeRO over the data axes shards this *local* tree.
The *logical* tree is the one that a single process would have.

A transform such as :func:`zfun.tensor_parallel` returns a :class:`ParallelLoss`: a loss of the
local tree, and for each model axis the rule by which the local tree comes from the logical one.
:func:`zfun.zero` reads these rules: ``init`` takes the logical tree and keeps the local one,
``params`` returns the logical tree, and a norm counts each element of the logical tree once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from zfun import tree
from zfun.collectives import DataAxes, Group, global_ranks
from zfun.errors import OptionError
from zfun.placement import Cut, Held

LeafRule: TypeAlias = Callable[[str, Any], Cut | Held | None]
"""``rule(path, leaf)`` says how a leaf of the logical tree is spread, alike on all ranks; the leaf
may be a meta tensor. ``None``: every rank has the whole leaf, with equal values and gradients."""


@dataclass(frozen=True, slots=True)
class ModelAxis:
    """A model axis.

    Attributes:
        group: its ranks.
        rule: how it spreads leaves.
        has_batches: whether its ranks have batches of their own.
    """

    group: Group
    rule: LeafRule
    has_batches: bool = False


class ParallelLoss:
    """A loss of the local tree, which knows its model axes.

    Args:
        fn: ``(params, batch) -> scalar``, of the leaves that this rank holds.
        axes: see :func:`model_axes`; the first one cuts the logical tree, the next one its pieces.
        inner: ``fn`` without a mean over an axis, for a stage of a pipeline that returns no loss.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        axes: Sequence[ModelAxis],
        inner: Callable[..., Any] | None = None,
    ) -> None:
        self.fn = self.__wrapped__ = fn
        self.model_axes = tuple(axes)
        self.inner = inner or fn

    def __call__(self, params: Any, *batch: Any) -> Any:
        known = _known.get()
        for axis in self.model_axes:
            if known is not None and axis.group.size > 1 and axis.group not in known:
                raise OptionError(
                    "zf.zero() cuts leaves over the model axes of the loss that it gets; got a "
                    f"function around a loss over {axis.group!r}, and so whole leaves; put the "
                    "function inside of the transform that cuts, or copy the attributes of its "
                    "result with functools.wraps()"
                )
        return self.fn(params, *batch)


# The model axes of the run that calls a loss; None for calls outside of runs.
_known: ContextVar[tuple[Group, ...] | None] = ContextVar("zfun_parallel_known", default=None)


@contextlib.contextmanager
def knowing(groups: tuple[Group, ...]) -> Iterator[None]:
    """The context of a run that has cut its leaves over some model axes."""
    token = _known.set(groups)
    try:
        yield
    finally:
        _known.reset(token)


def model_axes(loss: Any) -> tuple[ModelAxis, ...]:
    """Return the model axes of a loss; empty for a plain function.

    Args:
        loss: any loss; a ``functools.partial``, and a function with ``__wrapped__``, as
            :func:`zfun.remat` and :func:`zfun.cast` return, have the axes of the loss inside.

    Returns:
        The axes; the first one spreads the logical tree, the next one what is left on a rank.

    Example:
        >>> import zfun as zf
        >>> axis = ModelAxis(zf.process_group(), lambda path, leaf: Cut(0))
        >>> len(model_axes(ParallelLoss(lambda params, batch: params["w"].sum(), [axis])))
        1
        >>> model_axes(lambda params, batch: params["w"].sum())
        ()
    """
    while not hasattr(loss, "model_axes"):
        name = "func" if isinstance(loss, functools.partial) else "__wrapped__"
        loss = getattr(loss, name, None)
        if loss is None:
            return ()
    found: tuple[ModelAxis, ...] = loss.model_axes
    return found


def call_with(
    loss: Callable[..., Any], params: tree.Tree, spec: tree.Spec, leaves: list[Any], *rest: Any
) -> Any:
    """Call a loss with other leaves in place of those of a tree.

    Where the loss assigns to a leaf without a gradient, as a module does to a buffer by ``self.mean
    = ...``, the tree gets the new tensor too.
    """
    given = tree.unflatten(spec, leaves)
    out = loss(given, *rest)
    left, known = tree.leaves_like(spec, given) or leaves, set(map(id, leaves))
    if not known.issuperset(map(id, left)):
        _hand_back(params, given, known)
    return out


def _hand_back(own: Any, left: Any, known: set[int]) -> None:
    """Put the leaves of ``left`` that are not known into a tree of the same form."""
    is_sequence = isinstance(own, (list, tuple))
    for key in range(len(own)) if is_sequence else own if isinstance(own, dict) else ():
        old, new = own[key], left[key]
        if not isinstance(old, Tensor):
            _hand_back(old, new, known)
        elif id(new) not in known and not old.requires_grad:
            own[key] = new


def as_stage(loss: Callable[..., Any], *, is_last: bool) -> Callable[..., Any]:
    """Return the function of a stage of a pipeline; only the last one has a loss to average."""
    return loss.inner if isinstance(loss, ParallelLoss) and not is_last else loss


def axes_inside(
    stages: Sequence[Callable[..., Any]],
    rule: Callable[[Group, str, Any], Cut | Held | None],
) -> list[ModelAxis]:
    """Return the model axes of the stages of a pipeline, each once.

    Args:
        stages: the stages.
        rule: how a leaf is spread over an axis by the stages that use it.

    Raises:
        OptionError: the ranks of an axis have batches of their own in some stages only.
    """
    found = {id(x.group): x for fn in stages for x in model_axes(fn)}
    for axis in found.values():
        for stage, fn in enumerate(stages):
            known = [x.has_batches for x in model_axes(fn) if x.group is axis.group]
            if axis.has_batches and known != [True]:
                raise OptionError(
                    "the ranks of an expert axis have batches of their own, so every stage of a "
                    f"pipeline sums gradients over the axis; got stage {stage} without "
                    f"expert_parallel() over {axis.group!r}; write expert_parallel(stage, axis, "
                    "experts=[]) for a stage without experts"
                )
    return [
        ModelAxis(axis.group, functools.partial(rule, axis.group), axis.has_batches)
        for axis in found.values()
    ]


def beside_model_axes(group: Group, loss: Any) -> Group:
    """Return the data axes of a run that knows the model axes of its loss.

    Raises:
        OptionError: an axis of the mesh is a data axis and a model axis.
    """
    axes = model_axes(loss)
    known = [set(global_ranks(x)) for x in (group, *(axis.group for axis in axes)) if x.size > 1]
    for one, other in itertools.combinations(known, 2):
        if len(one & other) > 1:
            raise OptionError(
                "data axes and model axes are different axes of one mesh; got two that share ranks "
                f"{sorted(one & other)}; pass mesh['dp'] to zf.zero() and mesh['tp'] to the "
                "transform of the loss"
            )
    if not axes:
        return group
    # The same for the same axes, because values of one run are recognised by their group.
    key = (id(group), *(id(axis.group) for axis in axes))
    made = _MADE.get(key)
    if made is None:
        made = _MADE[key] = DataAxes(group, [axis.group for axis in axes])
    return made


# An entry lives as long as a run over these axes, which keeps them alive.
_MADE: weakref.WeakValueDictionary[tuple[int, ...], DataAxes] = weakref.WeakValueDictionary()
