"""Run a function tile by tile, so that the activations of one tile are in memory at one time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import LeafError, OptionError
from zfun.options import FUNCTION, integer, takes
from zfun.transforms import WeightedMean, remat


@takes(fn=FUNCTION, num_tiles=integer(1), dim=integer())
def tiled(fn: Callable[..., Any], num_tiles: int, dim: int = 1) -> Callable[..., Any]:
    """Run a function on tiles of its tensors, and recompute each tile in backward; exact.

    For an MLP, or for logits with their loss, which work token by token. Backward holds the
    activations of one tile at a time. Each tile adds its part to the gradients of parameters. At
    stage 3 all tiles of a pass share one gather of each bucket.

    Args:
        fn: ``(*tensors, **others)`` of one tile. Parameters may be those of a module, come in the
            closure or by name.
        num_tiles: into how many tiles to cut; as many as there are places along ``dim``, if these
            are fewer.
        dim: the dim along which positional tensors are cut, all of the same length there.

    Returns:
        A function of the same arguments. Arguments by name go to every tile whole. Tensors of the
        results are joined along ``dim``, and the sums and weights of a
        :func:`zfun.weighted_mean` are added.

    Raises:
        LeafError: from the returned function: tensors of other lengths, or a result that is neither
            joined nor added nor equal for all tiles.

    Example:
        >>> import zfun as zf
        >>> up, down = torch.randn(8, 32), torch.randn(32, 8)
        >>> mlp = lambda x: torch.relu(x @ up) @ down
        >>> x = torch.randn(2, 6, 8)
        >>> torch.allclose(zf.parallel.tiled(mlp, 3)(x), mlp(x), atol=1e-5)
        True
    """
    # In the closure of a function, so that zf.functional() finds the modules.
    again = remat(fn)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree.flatten(args)
        length = _length(leaves, dim)
        count = max(min(num_tiles, length), 1)
        # One node of autograd cuts a tensor: its gradient is joined once.
        cuts = [
            leaf.tensor_split(count, dim) if isinstance(leaf, Tensor) else (leaf,) * count
            for leaf in leaves
        ]
        results = [
            again(*tree.unflatten(spec, [cut[tile] for cut in cuts]), **kwargs)
            for tile in range(count)
        ]
        sizes = [length // count + (tile < length % count) for tile in range(count)]
        return _joined(results, sizes, dim)

    return run


def _length(leaves: Sequence[Any], dim: int) -> int:
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    if not shapes:
        raise OptionError(
            "tiled() cuts the positional tensors of a function; got none; pass tensors by "
            "position, and what every tile needs whole by name"
        )
    lengths = {shape[dim] if -len(shape) <= dim < len(shape) else None for shape in shapes}
    length = lengths.pop()
    if lengths or length is None:
        raise LeafError(
            f"the positional tensors of a tiled function have one length along dim {dim}; got "
            f"shapes {', '.join(map(str, shapes))}; pass what every tile needs whole by name",
            leaf=None,
        )
    return length


def _joined(results: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    """Join the results of all tiles."""
    if isinstance(results[0], WeightedMean):
        totals, weights = zip(*results, strict=True)
        return WeightedMean(sum(totals[1:], totals[0]), sum(weights[1:], weights[0]))
    columns = zip(*map(tree.leaves, results), strict=True)
    named = zip(columns, tree.paths(results[0]), strict=True)
    joined = [_column(column, sizes, dim, path) for column, path in named]
    return tree.unflatten(tree.structure(results[0]), joined)


def _column(column: Sequence[Any], sizes: Sequence[int], dim: int, path: str) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        if not all(x == first for x in column[1:]):
            raise LeafError(
                "a result of a tiled function that is no tensor is equal for all tiles; got "
                f"{first!r} and others for {path!r}; leave it out, or return a tensor",
                leaf=path,
            )
        return first
    fits = -first.dim() <= dim < first.dim() and [x.shape[dim] for x in column] == [*sizes]
    if not fits:
        raise LeafError(
            f"a tiled function returns tensors that are as long as the tile along dim {dim}, or "
            f"zf.weighted_mean(sum, count); got a result {path!r} of shape {tuple(first.shape)} "
            f"for a tile of length {sizes[0]}; of a mean, return the sum and the count",
            leaf=path,
        )
    return torch.cat([*column], dim)
