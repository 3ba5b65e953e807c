"""Attention over a sequence that is cut, by sending keys and values around a ring.

[Note: ring attention]
Each rank keeps its queries, and sees the keys and values of one rank after the other, while the
next ones are under way. The softmax is *online*: for each query the largest score so far, the sum
of exponentials and the weighted sum of values, all corrected when a larger score appears. Backward
sends keys and values around again, computes the scores again from the logarithm of the sum that
forward has kept, and sends the gradients of keys and values along, one rank behind, until they are
home. So each rank sends ``size - 1`` messages forward, and twice as many backward.

Forward-mode derivatives, transforms of torch.func and second derivatives gather all keys and values
instead, by collectives that torch can differentiate.

After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023);
zigzag order is that of Llama 3 (2024), and the online softmax of Milakov and Gimelshein (2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from zfun import ops
from zfun.collectives import Collective, Group, Permute, Work, all_gather
from zfun.errors import OptionError
from zfun.options import BOOL, GROUP, TENSOR, number, takes
from zfun.parallel._sequence import positions

_NAME = "ring attention"
# Queries and keys whose scores are in memory at one time.
_TILE = 1024


@takes(q=TENSOR, k=TENSOR, v=TENSOR, axis=GROUP, causal=BOOL, scale=number() | None, zigzag=BOOL)
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Group,
    *,
    causal: bool = False,
    scale: float | None = None,
    zigzag: bool = False,
) -> Tensor:
    """Attend to a sequence that is cut: ``S -> S`` along the tokens; exact, for any heads.

    See [Note: ring attention]. A rank sends k and v ``size - 1`` times forward; backward sends k, v
    and their gradients as often. No more than 1,024 x 1,024 scores of a head are in memory.

    Args:
        q: ``[batch, heads, tokens, head_dim]`` of this rank's tokens.
        k: as q; may have fewer heads, of which each serves equally many of q.
        v: as k, with a ``head_dim`` of its own.
        axis: the sequence axis.
        causal: whether a token attends to itself and to tokens before it alone.
        scale: the factor of the scores; by default ``1 / sqrt(head_dim)``.
        zigzag: whether the pieces are in zigzag order; see :func:`zfun.parallel.sequence_piece`. A
            causal ring of contiguous pieces waits for its last rank, which has the most work.

    Returns:
        The attention of this rank's tokens, ``[batch, heads, tokens, head_dim of v]``.

    Raises:
        OptionError: shapes that do not fit.

    Example:
        >>> import zfun as zf
        >>> q = torch.randn(1, 2, 8, 4)
        >>> def main(group):
        ...     mine = zf.parallel.sequence_piece(q, group, 2, zigzag=True)
        ...     out = ring_attention(mine, mine, mine, group, causal=True, zigzag=True)
        ...     whole = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        ...     expected = zf.parallel.sequence_piece(whole, group, 2, zigzag=True)
        ...     return torch.allclose(out, expected, atol=1e-6)
        >>> zf.simulate(2, main)
        [True, True]
    """
    q, k, v = _autocasted(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    ring = KeyRing(axis, causal, scale, causal and zigzag)
    ring.check(q, k, v)
    with _without_autocast(q):
        if _needs_derivatives(q, k, v):
            return _gathered(q, k, v, ring)
        return _RingAttention.apply(q, k, v, ring)[0]  # type: ignore[no-any-return]


class Tile(NamedTuple):
    """Queries and keys whose scores are computed at one time.

    Attributes:
        queries: places in this rank's piece.
        keys: places in the other rank's piece.
        diagonal: whether query i sees the keys up to i alone, both counted in the tile.
    """

    queries: slice
    keys: slice
    diagonal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class KeyRing:
    """The ranks and options of one call.

    Attributes:
        axis: the ranks.
        causal: whether tokens see earlier ones alone.
        scale: the factor of the scores.
        zigzag: whether a piece is two chunks of a causal sequence.
    """

    axis: Group
    causal: bool
    scale: float
    zigzag: bool

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuse shapes that do not fit."""
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == 4:
            raise OptionError(
                "ring_attention() takes tensors of shape [batch, heads, tokens, head_dim]; got "
                f"{shapes}; unsqueeze() or transpose() them"
            )
        if (
            k.shape[:3] != v.shape[:3]
            or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])
            or q.shape[1] % k.shape[1]
        ):
            raise OptionError(
                "q, k and v of ring_attention() have one batch, k and v have the same tokens and "
                f"heads, which divide those of q, and q and k the same head_dim; got {shapes}"
            )
        if self.causal and (q.shape[2] != k.shape[2] or (self.zigzag and q.shape[2] % 2)):
            raise OptionError(
                "causal ring_attention() has a key for each query, and two chunks of equal length "
                f"in zigzag order; got {shapes}; cut them with sequence_piece()"
            )
        if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
            raise OptionError(
                "q, k and v of ring_attention() have one floating dtype; got "
                f"{q.dtype}, {k.dtype} and {v.dtype}; convert them"
            )

    def tiles(self, source: int, queries: int, keys: int) -> Iterator[Tile]:
        """Yield the tiles of this rank's queries and the keys of rank ``source``."""
        first_query, last_key = 0, keys
        if self.causal and source != self.axis.rank:
            before = source < self.axis.rank
            if self.zigzag:
                # The first chunk of an earlier rank is before both of mine; the second one of mine
                # is after both of a later rank.
                first_query, last_key = (0, keys // 2) if before else (queries // 2, keys)
            elif not before:
                return
        for i in range(first_query, queries, _TILE):
            rows = slice(i, min(i + _TILE, queries))
            for j in range(0, last_key, _TILE):
                diagonal = self.causal and source == self.axis.rank
                if not diagonal or j <= i:
                    columns = slice(j, min(j + _TILE, last_key))
                    yield Tile(rows, columns, diagonal and i == j)

    def around(self, *tensors: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Yield each rank and its tensors, this rank's first, while the next are under way."""
        size, rank = self.axis.size, self.axis.rank
        flat = torch.cat([x.reshape(-1) for x in tensors]) if size > 1 else None
        for step in range(size):
            if flat is None:
                yield rank, tensors
                return
            pending = self.send(flat, "keys and values") if step + 1 < size else None
            yield (rank - step) % size, _views(flat, tensors)
            if pending is not None:
                flat = pending.wait()

    def send(self, flat: Tensor, part: str) -> Work:
        """Start to send a vector to the next rank, and to receive that of the rank before."""
        size = self.axis.size
        onward = Permute(tuple((rank + 1) % size for rank in range(size)))
        return self.axis.start(Collective(onward, _NAME, part), flat)


class _RingAttention(torch.autograd.Function):
    """``q, k, v -> attention, logarithm of the sum of exponentials``."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, ring: KeyRing) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _forward(q, k, v, ring)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.ring = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @ops.uncompiled
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return None, None, None, None
        q, k, v, out, log_sum = ctx.saved_tensors
        with _without_autocast(q):
            if not torch.is_grad_enabled():
                return (*_backward(grad, q, k, v, out, log_sum, ctx.ring), None)
            # A second derivative.
            wanted: list[Tensor] = [x for x in (q, k, v) if x.requires_grad]
            again = _gathered(q, k, v, ctx.ring)
            found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
        return (*(next(found) if x.requires_grad else None for x in (q, k, v)), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: KeyRing) -> tuple[Tensor, Tensor]:
    wide = ops.wide(q.dtype)
    grouped = _grouped(q, k.shape[1])
    shape = grouped.shape[:-1]
    out = q.new_zeros((*shape, v.shape[-1]), dtype=wide)
    total = q.new_zeros((*shape, 1), dtype=wide)
    top = torch.full_like(total, -math.inf)
    for source, (keys, values) in ring.around(k, v):
        for tile in ring.tiles(source, shape[-1], keys.shape[2]):
            rows = (..., tile.queries, slice(None))
            scores = _scores(grouped, keys, tile, ring.scale)
            before, now = top[rows], torch.maximum(top[rows], scores.amax(-1, keepdim=True))
            weights, shrink = (scores - now).exp_(), (before - now).exp_()
            total[rows] = total[rows] * shrink + weights.sum(-1, keepdim=True)
            out[rows] = out[rows] * shrink + _times(weights, values[:, :, tile.keys].to(wide))
            top[rows] = now
    log_sum = top + total.log()
    return (out / total).to(q.dtype).flatten(1, 2), log_sum


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, ring: KeyRing
) -> tuple[Tensor, Tensor, Tensor]:
    wide, kv_heads = ops.wide(q.dtype), k.shape[1]
    grouped, grads = _grouped(q, kv_heads), _grouped(grad, kv_heads)
    mean = (grads.to(wide) * _grouped(out, kv_heads).to(wide)).sum(-1, keepdim=True)
    of_q = torch.zeros_like(grouped, dtype=wide)
    home, under_way = None, None
    for source, (keys, values) in ring.around(k, v):
        flat = q.new_zeros(k.numel() + v.numel(), dtype=wide)
        of_k, of_v = _views(flat, (k, v))
        for tile in ring.tiles(source, grouped.shape[-2], keys.shape[2]):
            rows, columns = (..., tile.queries, slice(None)), (..., tile.keys, slice(None))
            weights = (_scores(grouped, keys, tile, ring.scale) - log_sum[rows]).exp_()
            mine, key = grads[rows].to(wide), keys[columns].to(wide)
            of_v[columns] += _sum_times(weights, mine)
            change = _times(mine, values[columns].to(wide).transpose(-1, -2))
            change = change.sub_(mean[rows]).mul_(weights).mul_(ring.scale)
            of_q[rows] += _times(change, key)
            of_k[columns] += _sum_times(change, grouped[rows].to(wide))
        if home is None:
            home = flat
        else:
            # The sum of the ranks before this one, which have seen the same keys.
            if under_way is not None:
                flat += under_way.wait()
            under_way = ring.send(flat, "gradients")
    assert home is not None
    if under_way is not None:
        home += under_way.wait()
    of_k, of_v = _views(home, (k, v))
    return of_q.flatten(1, 2).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def _gathered(q: Tensor, k: Tensor, v: Tensor, ring: KeyRing) -> Tensor:
    """Attend with all keys and values in memory, by operations that torch can differentiate."""
    keys, values = (
        all_gather(x, ring.axis, 2, name=_NAME, part=part) for x, part in ((k, "k"), (v, "v"))
    )
    grouped = _grouped(q, k.shape[1])
    scores = grouped @ keys.unsqueeze(2).transpose(-1, -2) * ring.scale
    if ring.causal:
        rows = positions(q.shape[2], ring.axis, ring.zigzag, q.device)
        columns = all_gather(rows, ring.axis, name=_NAME, part="positions")
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    weights = scores.softmax(-1, dtype=ops.wide(q.dtype)).to(q.dtype)
    return (weights @ values.unsqueeze(2)).flatten(1, 2)


def _is_autocast(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as torch's attention does under ``torch.autocast``."""
    if not _is_autocast(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    casts = lambda x: x.is_floating_point() and x.dtype != torch.float64
    return tuple(x.to(dtype) if casts(x) else x for x in tensors)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Keep the sums of the online softmax in the dtype that they have."""
    return torch.autocast(x.device.type, enabled=False) if _is_autocast(x) else nullcontext()


def _needs_derivatives(*tensors: Tensor) -> bool:
    """Whether something other than one backward pass differentiates the call."""
    return torch._C._functorch.maybe_current_level() is not None or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """``[batch, heads, ...] -> [batch, heads of k, heads of q for each, ...]``."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def _scores(grouped: Tensor, keys: Tensor, tile: Tile, scale: float) -> Tensor:
    wide = ops.wide(grouped.dtype)
    rows = grouped[..., tile.queries, :].to(wide)
    scores = _times(rows, keys[:, :, tile.keys].to(wide).transpose(-1, -2)).mul_(scale)
    if tile.diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Multiply ``[b, h, g, m, n]`` by ``[b, h, n, o]``, without copies of ``y`` for each g."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _sum_times(x: Tensor, y: Tensor) -> Tensor:
    """Multiply the transpose of ``[b, h, g, m, n]`` by ``[b, h, g, m, o]``, summed over g."""
    return x.flatten(2, 3).transpose(-1, -2) @ y.flatten(2, 3)


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
