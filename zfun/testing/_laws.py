"""The laws as functions that raise AssertionError when a law is broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import stores, tree
from zfun.collectives import Group, gather_values, simulate, sum_group
from zfun.flat import FLAT, Flat, flats, ravel, unravel
from zfun.layout import DEFAULT_BUCKET_BYTES, layout_of, unique_leaves
from zfun.options import FUNCTION, each, instance, integer, takes
from zfun.placement import Placement, R, S
from zfun.testing._compositions import BATCHES, COMPOSITION, Composition, all_compositions
from zfun.testing._train import Run, train
from zfun.transforms import redistribute, shard, unshard
from zfun.typing import Loss


def same_bits(first: tree.Tree, second: tree.Tree) -> bool:
    """Return whether two trees have the same bits; a NaN equals itself, and 0 differs from −0.

    Example:
        >>> same_bits({"w": torch.zeros(1)}, {"w": torch.zeros(1)})
        True
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    return not _differences(first, second)


@takes()
def assert_same_bits(first: tree.Tree, second: tree.Tree, what: str = "the trees") -> None:
    """Raise unless two trees of tensors and numbers are equal to the last bit.

    Args:
        first: a tree.
        second: another tree.
        what: a name for the trees, for the message.

    Raises:
        AssertionError: the trees differ; the message names leaves and differences.

    Example:
        >>> assert_same_bits({"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.5])})
        Traceback (most recent call last):
        ...
        AssertionError: the trees differ: w by 0.5 at most
    """
    found = _differences(first, second)
    if found:
        raise AssertionError(
            f"{what} differ: "
            f"{'; '.join(found[:4])}{f' (and {len(found) - 4} more)' if len(found) > 4 else ''}"
        )


def _differences(first: tree.Tree, second: tree.Tree) -> list[str]:
    if tree.paths(first) != tree.paths(second):
        return [f"one has leaves {tree.paths(first)}, the other {tree.paths(second)}"]
    found = []
    for path, x, y in zip(tree.paths(first), tree.leaves(first), tree.leaves(second), strict=True):
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            if type(x) is not type(y) or x != y:
                found.append(f"{path} is {x!r} and {y!r}")
        elif x.dtype != y.dtype or x.shape != y.shape:
            found.append(f"{path} is {x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}")
        elif not torch.equal(_bits(x), _bits(y)):
            wide = torch.complex128 if x.is_complex() else torch.float64
            found.append(
                f"{path} by {float((x.detach().to(wide) - y.detach().to(wide)).abs().max()):.3g} "
                "at most"
            )
    return found


def _bits(x: Tensor) -> Tensor:
    # Not contiguous(): a one-element tensor counts as contiguous with any stride, and view() fails.
    return (
        x.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
    )


@takes()
def assert_round_trip(
    params: tree.Tree, group: Group, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> None:
    """Check law 1: ravel and unravel are inverses, shards are pieces, and padding is zero.

    Args:
        params: a tree of tensors, equal on all ranks.
        group: the ranks; every rank must call.
        bucket_bytes: the most bytes of a bucket.

    Raises:
        AssertionError: the law is broken; the message names the part.

    Example:
        >>> _ = simulate(3, lambda group: assert_round_trip({"w": torch.arange(5.0)}, group))
    """
    layout = layout_of(params, sum_group(group).size, bucket_bytes)
    whole = ravel(params, layout, group)
    assert_same_bits(unravel(whole), params, "a tree and unravel(ravel(tree))")
    assert_same_bits(
        ravel(unravel(whole), layout, group).buffers,
        whole.buffers,
        "buffers and ravel(unravel(buffers))",
    )
    shards = shard(params, group, bucket_bytes=bucket_bytes)
    _require(shards.layout == layout, "shard() and layout_of() lay one tree out in two ways")
    for index, (piece, buffer) in enumerate(zip(shards.buffers, whole.buffers, strict=True)):
        gathered = gather_values(piece, group, "shards").reshape(-1)
        assert_same_bits(
            gathered, buffer, f"shards, one after the other, and {layout.label(index)}"
        )
    assert_same_bits(unshard(shards), params, "a tree and unshard(shard(tree))")
    assert_padding(whole)
    assert_padding(shards)


def assert_padding(value: tree.Tree) -> None:
    """Check that the padding in all buffers of flats is zero.

    Args:
        value: a tree with flats: parameters, gradients, optimizer state. Every rank must call.

    Raises:
        AssertionError: the padding is not zero; the message names the bucket.

    Example:
        >>> import zfun as zf
        >>> _ = zf.simulate(2, lambda group: assert_padding(zf.shard({"w": torch.ones(5)}, group)))
    """
    for flat in flats(value):
        whole = redistribute(stores.resident(flat), R, flat.group)
        for index, buffer in enumerate(whole.buffers):
            rest = buffer.clone()
            for leaf in flat.layout.buckets[index].leaves:
                slot = flat.layout.leaves[leaf]
                rest[slot.offset : slot.offset + slot.numel] = 0
            _require(
                not rest.any(),
                f"padding must be zero; in {flat.layout.label(index)} it is not, from element "
                f"{_first_nonzero(rest)}",
            )


def _first_nonzero(x: Tensor) -> int:
    return int(torch.nonzero(x)[0]) if x.any() else -1


@takes(
    value=FLAT,
    path=each(
        instance(Placement, "a placement", "zf.R"),
        "a sequence of placements",
        "[zf.R, zf.S]",
        least=1,
    ),
)
def assert_redistribution(value: Flat, path: Sequence[Placement]) -> None:
    """Check law 3: a chain of placements gives the same value as the last placement alone.

    Args:
        value: a flat of any placement.
        path: the placements, one after the other.

    Raises:
        AssertionError: the final buffers or placements differ.

    Example:
        >>> import zfun as zf
        >>> params = {"w": torch.arange(5.0)}
        >>> def main(group):
        ...     assert_redistribution(zf.shard(params, group), [zf.R, zf.P, zf.S])
        >>> _ = zf.simulate(3, main)
    """
    there = value
    for placement in path:
        there = redistribute(there, placement, value.group)
    _require(
        there.placement is path[-1], f"redistribute() to {path[-1]!r} gave {there.placement!r}"
    )
    direct = redistribute(value, path[-1], value.group)
    for placement in (R, S):
        # Compare sums, because the terms of a partial value are not unique.
        assert_same_bits(
            redistribute(there, placement, value.group).buffers,
            redistribute(direct, placement, value.group).buffers,
            f"{value.placement!r} through {list(path)} and at once, as {placement!r},",
        )
    if path[-1] in (R, S):
        assert_same_bits(
            there.buffers, direct.buffers, f"{value.placement!r} through {list(path)} and at once"
        )


@takes(
    loss_fn=FUNCTION,
    batches=BATCHES,
    compositions=each(COMPOSITION, "a sequence of compositions", "[Composition()]", least=1) | None,
    bucket_bytes=each(integer(1), "a sequence of sizes in bytes", "(1024,)", least=1),
)
def assert_same_runs(
    loss_fn: Loss,
    optimizer: Any,
    params: tree.Tree,
    batches: Sequence[Sequence[Any]],
    compositions: Sequence[Composition] | None = None,
    *,
    num_micro_batches: int = 1,
    bucket_bytes: Sequence[int] = (DEFAULT_BUCKET_BYTES,),
) -> Run:
    """Check law 5: every composition gives bitwise the same parameters and losses on every rank.

    Args:
        loss_fn: the loss.
        optimizer: an optimizer, or an ``(init, update)`` pair.
        params: a tree of tensors.
        batches: ``batches[step][rank]``; one simulated rank per batch of a step.
        compositions: the compositions to compare; by default all. Compositions that reduce before
            accumulation are compared only with each other.
        num_micro_batches: number of micro-batches per batch.
        bucket_bytes: bucket sizes in bytes, which the compositions use in turn.

    Returns:
        The run of the first composition.

    Raises:
        AssertionError: two runs differ; the message names the composition and the leaves.

    Example:
        >>> import zfun as zf
        >>> batches = [[torch.tensor(1.0), torch.tensor(2.0)]] * 2
        >>> loss_fn = lambda params, batch: (params["w"] * batch).square().sum()
        >>> some, params = all_compositions()[::20], {"w": torch.ones(3)}
        >>> assert_same_runs(loss_fn, zf.optim.sgd(0.1), params, batches, some).losses
        (7.5, 1.875)
    """
    # A leaf that is no tensor is named here.
    layout_of(params)
    size = len(batches[0])
    before = tree.map(torch.clone, params)
    first: dict[bool, tuple[Composition, Run]] = {}
    if compositions is None:
        compositions = all_compositions(num_micro_batches=num_micro_batches)
    for turn, composition in enumerate(compositions):
        bucket = bucket_bytes[turn % len(bucket_bytes)]

        def main(group: Group, composition: Composition = composition, bucket: int = bucket) -> Run:
            run = train(
                composition,
                group,
                loss_fn,
                optimizer,
                params,
                batches,
                num_micro_batches=num_micro_batches,
                bucket_bytes=bucket,
            )
            assert_padding(run.final)
            return run

        runs = simulate(size, main)
        name = f"{composition} with bucket_bytes={bucket}"
        for rank, run in enumerate(runs):
            assert_same_bits(run[:2], runs[0][:2], f"ranks 0 and {rank} under {name}")
        # With micro-batches the two orders of summation round differently.
        other, run = first.setdefault(
            num_micro_batches > 1 and composition.reduces_first, (composition, runs[0])
        )
        assert_same_bits(runs[0][:2], run[:2], f"{name} and {other}")
        assert_same_bits(params, before, f"the caller's parameters before and after {name}")
    if first:
        unique_leaves(next(iter(first.values()))[1].params, layout_of(params))
    return next(iter(first.values()))[1]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
