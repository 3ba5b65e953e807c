"""Tensor parallelism as a transform of a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.collectives import Group, LeafRecord, check_same, gather_values
from zfun.errors import OptionError, PlacementError
from zfun.flat import Flat
from zfun.options import FUNCTION, GROUP, instance, integer, takes
from zfun.parallel._cuts import ModelAxis, ParallelLoss, call_with, model_axes
from zfun.parallel._tensor_leaf import Region, StyledLeaf
from zfun.parallel._tensor_styles import StylePlan, TensorStyle, glob_of, styles_of
from zfun.placement import Cut
from zfun.transforms.call._lazy import check_graph
from zfun.transforms.grads._value import WeightedMean

_use_count = Tensor._use_count  # pyrefly: ignore[missing-attribute]
# The same operations on all ranks give the same bits, and almost the same on some devices.
_ALIKE = 1e-6
_SEQUENCE = TensorStyle("sequence_parallel")


@takes(
    loss=FUNCTION,
    axis=GROUP,
    plan=instance(Mapping, "a mapping of globs to styles", "{'*.q_proj': 'colwise'}"),
    sequence_dim=integer(0) | None,
)
def tensor_parallel(
    loss: Callable[..., Any], axis: Group, plan: StylePlan, *, sequence_dim: int | None = None
) -> ParallelLoss:
    """Cut matrices over the ranks of an axis, which compute one loss together.

    All ranks of the axis receive the same batch and return the same loss. Each rank holds a piece
    of every leaf of a style::

        rank                 0        1
        colwise            W[:h]    W[h:]      rows of [out, in]: the output is cut
        rowwise            W[:, :h] W[:, h:]   the input is cut, and outputs add up

    A leaf knows its style, and ``F.linear`` and ``F.embedding`` on it communicate, so the loss
    needs no change, nor does a module under :func:`zfun.functional`:

    ====================================  ===========  =========================================
    style                                 the leaf     the functions of the leaf
    ====================================  ===========  =========================================
    ``colwise``                           S            input ``R``, output ``S`` on the last dim
    ``packed_colwise``                    S, by parts  the same; gate and up, or q, k and v, in
                                                       one
    ``colwise_gather_output``             S            the same, and the output is joined: ``R``
    ``rowwise``, ``packed_rowwise``       S            input ``S``, outputs ``P`` are added:
                                                       ``R``; the bias is whole
    ``rowwise_split_input``               S            the same, and the input is cut here:
                                                       ``R -> S``
    ``embedding_rowwise``                 S            a rank looks up the ids that it has,
                                                       ``P -> R``
    ``replicated_with_grad_allreduce``    R            any, on values that differ between ranks,
                                                       such as a norm of each head; gradients
                                                       are added
    ``sequence_parallel``                 R            a norm of this rank's tokens, whose
                                                       results are joined, or an embedding;
                                                       gradients are added
    ====================================  ===========  =========================================

    Other leaves are whole, and used on whole values. Gradients of whole leaves are equal on all
    ranks of the axis.

    Args:
        loss: ``(params, batch) -> scalar`` or ``(scalar, aux)``, written for whole parameters.
        axis: the ranks that share the matrices, such as ``mesh["tp"]``; of a mesh, another axis
            than the data's.
        plan: styles, by names or as :class:`zfun.parallel.TensorStyle`, by globs of paths of leaves
            or of the modules that have them. The first glob that matches counts.
        sequence_dim: cut activations between the matrices along this dimension, where the sequence
            lies, so that a rank holds ``1/size`` of them and of the norms' work. Sums become
            reduce-scatters, and norms end in all-gathers; together these send as much. Leaves
            without a style are ``sequence_parallel``. A loss without an embedding cuts its input by
            :func:`zfun.collectives.enter`.

    Returns:
        A loss of this rank's pieces; :func:`zfun.zero` cuts the whole tree for it.

    Raises:
        OptionError: a style that does not exist or, from the returned loss, one that no leaf has;
            or an axis along which the loss is cut already.
        LeafError: where leaves are cut: an axis that does not divide a leaf or its heads.
        PlacementError: from the returned loss: a function that a style does not know.
        SpecMismatch: from the returned loss: ranks have different plans.

    Example:
        >>> import zfun as zf
        >>> from torch.nn.functional import linear
        >>> def loss(params, x):
        ...     return linear(torch.relu(linear(x, params["up"])), params["down"]).sum()
        >>> whole = {"up": torch.ones(4, 2), "down": torch.ones(2, 4)}
        >>> def main(group):
        ...     cut = tensor_parallel(loss, group, {"up": "colwise", "down": "rowwise"})
        ...     pieces = {
        ...         path: cut.model_axes[0].rule(path, leaf).piece(leaf, group.rank, group.size)
        ...         for path, leaf in whole.items()
        ...     }
        ...     return cut(pieces, torch.ones(2)).item()
        >>> zf.simulate(2, main), loss(whole, torch.ones(2)).item()
        ([16.0, 16.0], 16.0)

    After Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism" (2019), and for ``sequence_dim`` Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models" (2022).
    """
    outer = model_axes(loss)
    if any(one.group is axis for one in outer):
        raise OptionError(
            "a loss is cut once along an axis; tensor_parallel() got the axis of another transform "
            f"of this loss, {axis!r}; name another axis of the mesh"
        )
    styles = styles_of(plan)
    if sequence_dim is None and any(x.name == "sequence_parallel" for x in styles.values()):
        raise OptionError(
            "the style 'sequence_parallel' is for activations that are cut along the sequence; got "
            "no sequence_dim; write sequence_dim=1, or 'replicated_with_grad_allreduce'"
        )

    def rule(path: str, leaf: Any) -> Cut | None:
        glob = glob_of(path, styles)
        return None if glob is None else styles[glob].cut(path, leaf.shape, axis.size)

    styled = _StyledLoss(loss, axis, styles, sequence_dim)
    return ParallelLoss(styled, (*outer, ModelAxis(axis, rule)))


class _StyledLoss:
    """A loss whose leaves get their styles in each call."""

    def __init__(
        self,
        loss: Callable[..., Any],
        axis: Group,
        styles: dict[str, TensorStyle],
        sequence_dim: int | None,
    ) -> None:
        self.loss = self.__wrapped__ = loss
        self.axis = axis
        self.styles = styles
        self.sequence_dim = sequence_dim
        self._known: dict[tree.Spec, list[tuple[str, TensorStyle | None]]] = {}

    @ops.uncompiled
    def __call__(self, params: tree.Tree, *batch: Any) -> Any:
        if isinstance(params, Flat):
            raise PlacementError(
                "tensor_parallel() takes a loss of whole leaves; got sharded parameters; put "
                "shard_params() around it: zf.shard_params(zf.tensor_parallel(loss, ...), group)"
            )
        leaves, spec = tree.flatten(params)
        styles = self._known.get(spec)
        is_first = styles is None
        if styles is None:
            styles = self._known[spec] = self._matched(params, leaves)
        region = Region(self.axis, self.sequence_dim)
        # By style too, because tied leaves may have one each.
        made: dict[tuple[int, TensorStyle], StyledLeaf] = {}
        for place, (leaf, (path, style)) in enumerate(zip(leaves, styles, strict=True)):
            if style is not None and isinstance(leaf, Tensor):
                key = id(leaf), style
                if key not in made:
                    made[key] = StyledLeaf.over(leaf, path, style, region)
                leaves[place] = made[key]
        out = call_with(self.loss, params, spec, leaves, *batch)
        if is_first and self.sequence_dim is not None and self.axis.size > 1:
            self._check_whole(out)
        region.forget()
        # A graph holds a styled leaf only where an autograd.Function lost its gradient.
        if max(map(_use_count, made.values()), default=0) > 1:
            check_graph(out)
        return out

    def _check_whole(self, out: Any) -> None:
        """Refuse a loss of cut activations: each rank would have that of its tokens alone."""
        value = out[0] if type(out) is tuple else out
        total = value.total if isinstance(value, WeightedMean) else value
        if not isinstance(total, Tensor) or total.numel() != 1:
            return  # a stage of a pipeline
        with torch.no_grad():
            mine = total.detach().reshape(()).double()
            found = gather_values(mine, self.axis, "loss of tensor_parallel()")
        if ops.is_abstract(found) or torch.allclose(found, found[:1], _ALIKE, 0.0, equal_nan=True):
            return
        raise PlacementError(
            "with sequence_dim activations between the matrices are cut, and a loss is of all "
            f"tokens, so equal on all ranks of the axis; got {found.tolist()}; take it of the "
            "result of a norm, or join tokens with zf.collectives.leave(x, axis, sequence_dim)"
        )

    def _matched(
        self, params: tree.Tree, leaves: list[Any]
    ) -> list[tuple[str, TensorStyle | None]]:
        """Return the path and the style of each leaf, which all ranks must agree on."""
        paths = tree.paths(params)
        globs = [glob_of(path, self.styles) for path in paths]
        default = None if self.sequence_dim is None else _SEQUENCE
        unused = [glob for glob in self.styles if glob not in globs]
        # The tree of a stage of a pipeline has holes for the leaves of others.
        is_part = None in tree.leaves(params, is_leaf=lambda x: x is None)
        if unused and not is_part and not model_axes(self.loss):
            raise OptionError(
                f"each style of a plan has a leaf; got {unused[0]!r}: "
                f"{self.styles[unused[0]].name!r}, which matches none of {', '.join(paths[:4])}"
                f"{', ...' if len(paths) > 4 else ''}; leave it out, or mend the glob"
            )
        found = [default if glob is None else self.styles[glob] for glob in globs]
        entries = [
            LeafRecord(path, f"{style} {tuple(leaf.shape)}")
            for path, style, leaf in zip(paths, found, leaves, strict=True)
            if isinstance(leaf, Tensor)
        ]
        if self.axis.size > 1:
            with torch.no_grad():
                check_same(entries, self.axis, "plan of tensor_parallel()")
        return list(zip(paths, found, strict=True))
