"""The sequence axis: which tokens each rank holds, batches cut along it, and the loss over it.

[Note: the sequence axis]
The ranks of a sequence axis have the same samples, and each holds a piece of every sequence. In a
transformer only attention relates tokens to each other, so only attention communicates
(:func:`zfun.parallel.ulysses`, :func:`zfun.parallel.ring_attention`). Parameters are the same on
all ranks, and the gradients of pieces add up as those of samples do: the axis belongs to the group
that ZeRO gets, ``mesh["dp", "sp"]``, and ZeRO does not know it. The loss is a mean over tokens, so
it returns a sum and a count.

Two orders, here of 8 tokens over 2 ranks::

    rank               0            1
    contiguous      0 1 2 3      4 5 6 7
    zigzag          0 1 6 7      2 3 4 5

Under a causal mask the first tokens have the least to attend to. In zigzag order rank r holds the
chunks r and ``2 * size - 1 - r``, so that every rank of a ring has the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfun import ops
from zfun.collectives import Group
from zfun.errors import LeafError, OptionError
from zfun.options import ANY, BOOL, GROUP, TENSOR, integer, shown, takes
from zfun.transforms import WeightedMean, weighted_mean

IGNORED = -100
_KEYS = ("input_ids", "labels", "position_ids", "attention_mask")


@takes(x=TENSOR, axis=GROUP, dim=integer(), zigzag=BOOL)
def sequence_piece(x: Tensor, axis: Group, dim: int = 1, *, zigzag: bool = False) -> Tensor:
    """Keep this rank's piece of a sequence: ``R -> S`` along a dim.

    Args:
        x: equal on all ranks of the axis.
        axis: the sequence axis.
        dim: the dim of the sequence.
        zigzag: whether rank r holds the chunks r and ``2 * size - 1 - r`` of twice as many.

    Returns:
        The piece; a view, unless ``zigzag``.

    Raises:
        OptionError: the ranks do not divide the sequence.

    Example:
        >>> import zfun as zf
        >>> tokens = torch.arange(8)
        >>> zf.simulate(2, lambda group: sequence_piece(tokens, group, 0, zigzag=True).tolist())
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if not -x.dim() <= dim < x.dim():
        raise OptionError(
            f"a sequence lies along a dim of its tensor; got dim {dim} of shape {tuple(x.shape)}"
        )
    length, chunks = x.shape[dim], num_chunks(axis, zigzag)
    if length % chunks:
        raise OptionError(
            f"the ranks of a sequence axis hold equal pieces; got a sequence of {length} tokens "
            f"for {chunks} chunks on {axis.size} ranks; pad it, as sequence_batch(pad_id=0) does"
        )
    pieces = x.chunk(chunks, dim)
    if not zigzag:
        return pieces[axis.rank] if length else x
    return torch.cat([pieces[axis.rank], pieces[-1 - axis.rank]], dim) if length else x


def num_chunks(axis: Group, zigzag: bool) -> int:
    """Return into how many chunks a sequence is cut."""
    return axis.size * (2 if zigzag else 1)


def positions(length: int, axis: Group, zigzag: bool, device: Any = None) -> Tensor:
    """Return the places in the whole sequence of a rank's piece of ``length`` tokens."""
    places = torch.arange(length * axis.size, device=device)
    return sequence_piece(places, axis, 0, zigzag=zigzag)


@takes(batch=ANY, axis=GROUP, zigzag=BOOL, pad_id=integer(0) | None, ignore_index=integer())
def sequence_batch(
    batch: Mapping[str, Tensor],
    axis: Group,
    *,
    zigzag: bool = False,
    pad_id: int | None = None,
    ignore_index: int = IGNORED,
) -> dict[str, Tensor]:
    """Cut a batch of whole sequences for a causal model: ``R -> S`` along the tokens.

    Labels move one token to the left before the cut, so that the last token of a piece predicts the
    first token of the next piece.

    Args:
        batch: equal on all ranks of the axis. ``input_ids``, ``[samples, tokens]``; ``labels``, one
            for each token, as a Hugging Face model takes them; ``position_ids``, which count from 0
            in every row; ``attention_mask``, of rows that are padded on the right. Later tokens
            alone see such padding, so no mask is needed: the tokens become ``ignore_index`` in the
            labels.
        axis: the sequence axis.
        zigzag: whether the pieces are those of a balanced ring; see :func:`sequence_piece`.
        pad_id: the token with which sequences grow to a length that the ranks divide; ``None``
            refuses others.
        ignore_index: the label of tokens that count nothing.

    Returns:
        ``input_ids``, ``position_ids`` (of the whole sequence), and, where there are labels,
        ``shift_labels``: the token that follows each token.

    Raises:
        LeafError: a tensor of another name or shape, packed sequences, or padding that is not on
            the right; the message names the tensor.
        OptionError: the ranks do not divide the sequence, and there is no ``pad_id``.

    Example:
        >>> import zfun as zf
        >>> ids = torch.arange(6).view(1, 6) * 10
        >>> def main(group):
        ...     batch = zf.parallel.sequence_batch({"input_ids": ids, "labels": ids}, group)
        ...     return [leaf.tolist()[0] for leaf in batch.values()]
        >>> for piece in zf.simulate(2, main):
        ...     print(*piece)
        [0, 10, 20] [0, 1, 2] [10, 20, 30]
        [30, 40, 50] [3, 4, 5] [40, 50, -100]
    """
    ids = _checked(batch)
    whole = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1], device=ids.device)}
    whole["position_ids"] = whole["position_ids"].expand(ids.shape)
    _check_positions(batch.get("position_ids"), whole["position_ids"])
    labels = _labels(batch, ignore_index)
    padding = -ids.shape[1] % num_chunks(axis, zigzag)
    if labels is not None:
        whole["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    if padding:
        whole = _padded(whole, padding, pad_id, ignore_index)
    return {
        name: sequence_piece(leaf, axis, zigzag=zigzag).contiguous() for name, leaf in whole.items()
    }


@takes(logits=TENSOR, labels=TENSOR, ignore_index=integer())
def token_mean(logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORED) -> WeightedMean:
    """Return the cross-entropy as a mean over the tokens of all ranks and micro-batches.

    Args:
        logits: ``[..., classes]``, on a rank those of its tokens.
        labels: the class of each token, already shifted, as :func:`sequence_batch` returns them.
        ignore_index: the label of tokens that count nothing.

    Returns:
        The sum and the count, for a loss to return; see :func:`zfun.weighted_mean`.

    Raises:
        OptionError: labels that are no integers, or not one for each row of logits.

    Example:
        >>> loss = token_mean(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))
        >>> round(float(loss), 4), float(loss.weight)
        (0.6931, 2.0)
    """
    if (
        not logits.dtype.is_floating_point
        or labels.dtype.is_floating_point
        or labels.dtype.is_complex
        or logits.shape[:-1] != labels.shape
        or not logits.dim()
    ):
        raise OptionError(
            "token_mean() takes floating logits [..., classes] and an integer label for each row; "
            f"got {shown(logits)}, and labels: {shown(labels)}; pass the shift_labels of the batch"
        )
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(ops.wide(logits.dtype)),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return weighted_mean(total, (labels != ignore_index).sum())


def _checked(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the ids, and refuse tensors of other names or shapes."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise LeafError(
            "sequence_batch() takes a mapping with input_ids; got "
            f"{sorted(map(str, batch)) if isinstance(batch, Mapping) else shown(batch)}; cut other "
            "tensors with sequence_piece()",
            leaf="input_ids",
        )
    length = batch["input_ids"].shape[-1:] if isinstance(batch["input_ids"], Tensor) else ()
    for name, leaf in batch.items():
        if name not in _KEYS:
            raise LeafError(
                f"sequence_batch() cuts {', '.join(_KEYS)}; got {name!r}; take it out of the "
                "batch, and cut it with sequence_piece()",
                leaf=str(name),
            )
        if not isinstance(leaf, Tensor) or leaf.dim() != 2 or leaf.shape[1:] != length:
            raise LeafError(
                f"the tensors of a batch have the shape [samples, tokens]; got {shown(leaf)} for "
                f"{name!r}; give all as many tokens as input_ids",
                leaf=str(name),
            )
    return batch["input_ids"]


def _check_positions(given: Tensor | None, expected: Tensor) -> None:
    if given is not None and not bool((given == expected).all()):
        raise LeafError(
            "position_ids of a sequence that is cut count from 0 in every row, because one causal "
            "mask covers the row; got others, such as those of packed sequences; put each sequence "
            "into a row of its own, and leave position_ids out",
            leaf="position_ids",
        )


def _labels(batch: Mapping[str, Tensor], ignore_index: int) -> Tensor | None:
    """Return the labels, without those of tokens that the mask leaves out."""
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if mask is None:
        return labels
    mask = mask.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise LeafError(
            "an attention_mask of a sequence that is cut pads rows on the right, because no causal "
            "mask hides padding before a token; got padding on the left or in between; pad on the "
            'right (tokenizer.padding_side = "right")',
            leaf="attention_mask",
        )
    if labels is not None:
        return labels.masked_fill(~mask, ignore_index)
    if not bool(mask.all()):
        raise LeafError(
            "a batch with padding has labels, because a loss must not count padding; got an "
            "attention_mask with zeros and no labels; add labels",
            leaf="attention_mask",
        )
    return None


def _padded(
    whole: dict[str, Tensor], padding: int, pad_id: int | None, ignore_index: int
) -> dict[str, Tensor]:
    length = whole["input_ids"].shape[1]
    if pad_id is None or "shift_labels" not in whole:
        raise OptionError(
            f"the ranks of a sequence axis hold equal pieces; got sequences of {length} tokens, "
            f"{padding} too few; pass pad_id=0 and a batch with labels, or pad the batch"
        )
    fill = {"input_ids": pad_id, "shift_labels": ignore_index}
    grown = {name: F.pad(whole[name], (0, padding), value=value) for name, value in fill.items()}
    places = torch.arange(length + padding, device=whole["input_ids"].device)
    return {"position_ids": places.expand(grown["input_ids"].shape), **grown}
