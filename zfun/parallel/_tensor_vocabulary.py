"""The cross entropy of logits that are cut over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from zfun import collectives
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.options import Kind, integer, one_of, takes
from zfun.parallel._tensor_leaf import own_rows

_NAME = "cross entropy"
_LOGITS = Kind(
    lambda x: isinstance(x, Tensor) and x.is_floating_point(),
    ("a floating tensor",),
    "torch.zeros(2, 8)",
)


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
    total, label = collectives.leave(parts, axis, name=_NAME).unbind()
    losses = (total.log() - label).masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def _largest(logits: Tensor, axis: Group) -> Tensor:
    """Return the largest logit of each token, over all ranks."""
    mine = logits.amax(-1).unsqueeze(0)
    return collectives.all_gather(mine, axis, name=_NAME).amax(0)
