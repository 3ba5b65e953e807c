"""Tensor parallelism as a transform of a loss, and the cross entropy of logits that it cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zfun import collectives, ops, tree
from zfun.collectives import Group, LeafRecord, check_same, gather_values
from zfun.errors import OptionError, PlacementError
from zfun.flat import Flat
from zfun.options import FUNCTION, GROUP, Kind, instance, integer, one_of, takes
from zfun.parallel._cuts import ModelAxis, ParallelLoss, call_with, model_axes
from zfun.parallel._tensor_leaf import leaf_for, own_rows
from zfun.parallel._tensor_region import Region, are_alike
from zfun.parallel._tensor_styles import StylePlan, TensorStyle, glob_of, styles_of
from zfun.placement import Cut
from zfun.transforms.call._lazy import check_graph
from zfun.transforms.grads._value import WeightedMean

_use_count = Tensor._use_count  # pyrefly: ignore[missing-attribute]
_SEQUENCE = TensorStyle("sequence_parallel")
_ENTROPY = "cross entropy"
_LOGITS = Kind(
    lambda x: isinstance(x, Tensor) and x.is_floating_point(),
    ("a floating tensor",),
    "torch.zeros(2, 8)",
)


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
    ``replicated``                        R            any, on values that all ranks have alike
    ``sequence_parallel``                 R            a norm of this rank's tokens, whose
                                                       results are joined, or an embedding;
                                                       gradients are added
    ====================================  ===========  =========================================

    Other leaves are ``replicated``. A value that all ranks have, used on their parts, gets a part
    of its gradient on each; ranks compare these in the first backward pass.

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
        PlacementError: from the returned loss: a function that a style does not know; or, in the
            first step, losses or gradients that differ where all ranks should have the same.
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
        self._known: dict[tuple[tree.Spec, bool], list[tuple[str, TensorStyle | None]]] = {}

    @ops.uncompiled
    def __call__(self, params: tree.Tree, *batch: Any) -> Any:
        if isinstance(params, Flat):
            raise PlacementError(
                "tensor_parallel() takes a loss of whole leaves; got sharded parameters; put "
                "shard_params() around it: zf.shard_params(zf.tensor_parallel(loss, ...), group)"
            )
        leaves, spec = tree.flatten(params)
        key = spec, torch.is_grad_enabled()
        styles = self._known.get(key)
        is_first = styles is None
        if styles is None:
            styles = self._known[key] = self._matched(params, leaves)
        region = Region(self.axis, self.sequence_dim, compares=is_first)
        # By style too, because tied leaves may have one each.
        made: dict[tuple[int, TensorStyle | None], Tensor] = {}
        for place, (leaf, (path, style)) in enumerate(zip(leaves, styles, strict=True)):
            if isinstance(leaf, Tensor) and (style is not None or region.compares):
                tied = id(leaf), style
                if tied not in made:
                    made[tied] = leaf_for(region, leaf, path, style)
                leaves[place] = made[tied]
        try:
            out = call_with(self.loss, params, spec, leaves, *batch)
        except RuntimeError as error:
            if self.sequence_dim is not None and type(error) is RuntimeError:
                error.add_note(
                    "in a loss of tensor_parallel(sequence_dim=): results of a norm have all "
                    "tokens, and those of an embedding or a rowwise matrix the tokens of a rank; "
                    "zf.collectives.enter(x, axis, dim) and leave(x, axis, dim) change one to other"
                )
            raise
        if region.compares:
            self._check_whole(out)
        region.forget()
        # A graph holds a styled leaf only where an autograd.Function lost its gradient.
        if max(map(_use_count, made.values()), default=0) > 1:
            check_graph(out)
        return out

    def _check_whole(self, out: Any) -> None:
        """Refuse a loss that differs between ranks, as one of the tokens of a rank does."""
        value = out[0] if type(out) is tuple else out
        total = value.total if isinstance(value, WeightedMean) else value
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if not isinstance(total, Tensor) or total.numel() != 1 or is_transformed:
            return  # a stage of a pipeline
        with torch.no_grad():
            mine = total.detach().reshape(()).double()
            found = gather_values(mine, self.axis, "loss of tensor_parallel()")
        if are_alike(found, total):
            return
        if self.sequence_dim is None:
            raise PlacementError(
                "all ranks of a tensor axis compute one loss of one batch; got "
                f"{found.tolist()}; give a sampler the rank among the data ranks, seed dropout of "
                "whole activations by that rank, and end cut activations by a 'rowwise' leaf or "
                "zf.collectives.leave()"
            )
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
        # The tree of a stage of a pipeline has holes for the leaves of others. (``None in`` would
        # compare values, for which stage 3 gathers all leaves.)
        is_part = any(x is None for x in tree.leaves(params, is_leaf=lambda x: x is None))
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


@takes(logits=_LOGITS, vocab_size=integer(1), reduction=one_of("mean", "sum", "none"))
def vocab_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Group,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy of logits that are cut over the vocabulary: ``S -> R``.

    No rank ever holds the whole logits: the ranks exchange three numbers per token, in two
    messages, and nothing in backward::

        rank               0           1               0     1
        logits         [.1 .2]     [.3 .4]     ->     1.3   1.3

    Cut logits come from a head of style ``colwise``. The caller shifts labels.

    Args:
        logits: this rank's columns, ``[..., vocabulary / size]``; equal numbers on all ranks.
        labels: of the whole vocabulary, ``[...]``, equal on all ranks.
        axis: the ranks.
        vocab_size: columns of the whole logits; refuses logits that a head has joined.
        ignore_index: the label of tokens that do not count.
        reduction: ``"mean"`` over the tokens that count, ``"sum"``, or ``"none"``.

    Returns:
        The loss, equal on all ranks; in float32 where logits have fewer bits.

    Raises:
        OptionError: labels and logits have other shapes than said, or logits are whole.
        IndexError: a label is not in the vocabulary.

    Example:
        >>> import zfun as zf
        >>> logits, label = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.tensor([2])
        >>> def main(group):
        ...     mine = logits.chunk(group.size, -1)[group.rank]
        ...     return vocab_cross_entropy(mine, label, group, vocab_size=4)
        >>> zf.simulate(2, main), torch.nn.functional.cross_entropy(logits, label)
        ([tensor(1.3425), tensor(1.3425)], tensor(1.3425))
    """
    if logits.shape[:-1] != labels.shape or logits.dim() == 0:
        raise OptionError(
            "labels have the shape of logits without the vocabulary; got logits of shape "
            f"{tuple(logits.shape)} and labels of shape {tuple(labels.shape)}; reshape one of them"
        )
    if logits.shape[-1] * axis.size != vocab_size:
        raise OptionError(
            f"a rank has 1/{axis.size} of the vocabulary; got {logits.shape[-1]} columns of "
            f"{vocab_size}; give the head the style 'colwise', because a tied head and "
            "'colwise_gather_output' join the logits"
        )
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    largest = _largest(logits.detach(), axis)
    ignored = labels == ignore_index
    own, is_elsewhere = own_rows(labels.masked_fill(ignored, 0), logits.shape[-1], axis)
    shifted = logits - largest.unsqueeze(-1)
    mine = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0)
    parts = torch.stack([shifted.exp().sum(-1), mine])
    total, label = collectives.leave(parts, axis, name=_ENTROPY).unbind()
    losses = (total.log() - label).masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def _largest(logits: Tensor, axis: Group) -> Tensor:
    """Return the largest logit of each token, over all ranks."""
    mine = logits.amax(-1).unsqueeze(0)
    return collectives.all_gather(mine, axis, name=_ENTROPY).amax(0)
