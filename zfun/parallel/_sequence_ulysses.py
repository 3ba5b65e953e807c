"""Attention over a sequence that is cut, by exchanging tokens for heads.

Each head attends to whole sequences and needs no other head. So the ranks exchange: for the time of
attention a rank has all tokens of some heads. For 2 ranks, 2 heads and 4 tokens::

    rank                  0              1
    before           a0 a1  b0 b1   a2 a3  b2 b3        all heads of some tokens
    attention        a0 a1  a2 a3   b0 b1  b2 b3        all tokens of some heads
    after            a0 a1  b0 b1   a2 a3  b2 b3

After Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from zfun import ops
from zfun.collectives import Group, all_to_all, start_all_to_all
from zfun.errors import OptionError
from zfun.options import FUNCTION, GROUP, takes

_NAME = "ulysses"
_HEADS, _TOKENS = 1, 2


@takes(attention=FUNCTION, axis=GROUP)
def ulysses(attention: Callable[..., Tensor], axis: Group) -> Callable[..., Tensor]:
    """Let attention run on sequences that are cut: ``S -> S`` along the tokens.

    Four all-to-alls, of q, k, v and the result; backward has four as well. Each sends
    ``(size - 1) / size`` of a tensor. The ranks divide the heads of q. Heads of k and v are
    repeated until the ranks divide them too.

    Args:
        attention: ``(q, k, v, ...)`` of ``[batch, heads, tokens, head_dim]`` to a tensor of the
            same form, such as ``torch.nn.functional.scaled_dot_product_attention``. It sees whole
            sequences and some of the heads. Where k and v have fewer heads than q, they may have
            fewer here too (``enable_gqa=True``).
        axis: the sequence axis, with contiguous pieces.

    Returns:
        A function of q, k and v of this rank's tokens, which passes other arguments on. A mask
        among them is that of the whole sequence, for all heads alike.

    Raises:
        OptionError: from the returned function: the ranks do not divide the heads, or a mask is not
            that of the whole sequence.

    Example:
        >>> import torch, zfun as zf
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> q = torch.randn(1, 2, 6, 4)
        >>> def main(group):
        ...     mine = zf.parallel.sequence_piece(q, group, 2)
        ...     out = zf.parallel.ulysses(attention, group)(mine, mine, mine, is_causal=True)
        ...     whole = attention(q, q, q, is_causal=True)
        ...     return torch.allclose(out, zf.parallel.sequence_piece(whole, group, 2), atol=1e-6)
        >>> zf.simulate(2, main)
        [True, True]
    """

    @ops.uncompiled
    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        repeats = _repeats(q, k, v, axis.size)
        _check_masks((*args, *kwargs.values()), q.shape[_TOKENS] * axis.size, axis.size)
        if axis.size == 1:
            return attention(q, k, v, *args, **kwargs)
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, _HEADS) for x in (k, v))
        under_way = [
            start_all_to_all(x, axis, _HEADS, _TOKENS, name=_NAME, part=part)
            for part, x in (("q", q), ("k", k), ("v", v))
        ]
        q, k, v = (pending.wait() for pending in under_way)
        out = attention(q, k, v, *args, **kwargs)
        return all_to_all(out, axis, _TOKENS, _HEADS, name=_NAME, part="out")

    return attend


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Refuse heads that the ranks of an axis do not divide."""
    if heads % size:
        raise OptionError(
            f"the ranks of ulysses() divide the heads; got {heads} heads of q over {size} ranks; "
            "use an axis whose size divides the heads, or ring attention"
        )
    if heads % kv_heads:
        raise OptionError(
            f"each head of k and v serves equally many heads of q; got {heads} heads of q and "
            f"{kv_heads} of k and v; repeat heads of k and v before"
        )


def _repeats(q: Tensor, k: Tensor, v: Tensor, size: int) -> int:
    """Return how often each head of k and v is repeated, so that the ranks divide them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise OptionError(
                "ulysses() takes tensors of shape [batch, heads, tokens, head_dim]; got "
                f"{name} of shape {tuple(x.shape)}; unsqueeze() or transpose() it"
            )
    heads, kv_heads = q.shape[_HEADS], k.shape[_HEADS]
    check_heads(heads, kv_heads, size)
    # Divides heads / kv_heads, because size divides heads. So the groups of heads stay together.
    return size // math.gcd(size, kv_heads)


def _check_masks(others: tuple[Any, ...], length: int, size: int) -> None:
    for mask in others:
        if not isinstance(mask, Tensor) or mask.dim() < 2 or size == 1:
            continue
        heads = mask.shape[-3] if mask.dim() > 2 else 1
        if mask.shape[-1] != length or mask.shape[-2] not in (1, length) or heads != 1:
            raise OptionError(
                "a mask that ulysses() passes on covers the whole sequence, for all heads alike; "
                f"got shape {tuple(mask.shape)} for {length} tokens over {size} ranks; pass the "
                "mask of the whole sequence, or is_causal=True"
            )
