"""A table of the leaves and bytes of a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zfun import stores, tree
from zfun.collectives import axis_of
from zfun.flat import Flat
from zfun.placement import S


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf of a described value.

    Attributes:
        path: the tree path.
        shape: the shape of the whole leaf.
        dtype: the dtype of the buffer that holds the leaf.
        placement: ``"R"``, ``"P"`` or ``"S"``, or the cut (``"Owned()"``), with the axis of a mesh
            (``"S (inner)"``); ``"local"`` for a tensor of this rank alone.
        bucket: index of the bucket, or ``None``.
        here: the elements that this rank holds, as a slice ``(start, stop)`` of the ravelled leaf.
        where: the device or the store.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    bucket: int | None
    here: tuple[int, int]
    where: str


@dataclass(frozen=True, slots=True)
class Description:
    """The result of :func:`describe`; ``str()`` gives a table.

    Attributes:
        rows: one for each leaf.
        bytes_by_place: bytes on this rank, padding included, for each device and store.
    """

    rows: tuple[Row, ...]
    bytes_by_place: dict[str, int]

    def __str__(self) -> str:
        header = ("leaf", "shape", "dtype", "placement", "bucket", "here", "where")
        table = [header] + [
            (
                row.path,
                "x".join(map(str, row.shape)) or "scalar",
                str(row.dtype).removeprefix("torch."),
                row.placement,
                "" if row.bucket is None else str(row.bucket),
                f"{row.here[0]}:{row.here[1]}",
                row.where,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in table) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        totals = ", ".join(
            f"{count:,} bytes in {where}" for where, count in self.bytes_by_place.items()
        )
        return "\n".join([*lines, f"on this rank, padding included: {totals or 'nothing'}"])

    __repr__ = __str__


def describe(value: tree.Tree) -> Description:
    """List shape, dtype, placement and local slice of every leaf, and the bytes on this rank.

    Args:
        value: a tree of tensors, flats and handles of stores, such as parameters, gradients and
            the state of an optimizer.

    Returns:
        The description, to print.

    Example:
        >>> import zfun as zf
        >>> params = {"w": torch.ones(5, 8), "b": torch.ones(3)}
        >>> print(zf.simulate(2, lambda group: zf.describe(zf.shard(params, group)))[0])
        leaf  shape  dtype    placement  bucket  here  where
        w     5x8    float32  S          0       0:40  cpu
        b     3      float32  S          0       0:0   cpu
        on this rank, padding included: 256 bytes in cpu
    """
    rows: list[Row] = []
    totals: dict[str, int] = {}
    is_flat = lambda x: isinstance(x, Flat)
    for path, leaf in zip(
        tree.paths(value, is_leaf=is_flat), tree.leaves(value, is_leaf=is_flat), strict=True
    ):
        prefix = "" if path == "." else path + "."
        if isinstance(leaf, Flat):
            rows += _rows_of(leaf, prefix)
            for buffer in leaf.buffers:
                _count(totals, buffer)
        elif isinstance(leaf, Tensor | stores.Stored):
            shape, here = tuple(leaf.shape), (0, leaf.shape.numel())
            rows.append(Row(path, shape, leaf.dtype, "local", None, here, _place(leaf)))
            _count(totals, leaf)
    return Description(tuple(rows), totals)


def _rows_of(flat: Flat, prefix: str) -> list[Row]:
    rows = []
    for path, position in zip(flat.layout.paths, flat.layout.positions, strict=True):
        slot = flat.layout.leaves[position]
        buffer = flat.buffers[slot.bucket]
        first, last = 0, slot.numel
        if flat.placement is S:
            first, last = (
                min(max(edge - slot.offset, 0), slot.numel) for edge in flat.span(slot.bucket)
            )
        name = prefix + path if path == slot.path else f"{prefix}{path} (tied to {slot.path})"
        dtype = buffer.dtype.to_complex() if slot.dtype.is_complex else buffer.dtype
        cut = flat.layout.buckets[slot.bucket].placement if flat.placement is S else flat.placement
        placement = f"{cut!r} ({axis_of(flat.group)})" if axis_of(flat.group) else repr(cut)
        rows.append(
            Row(name, slot.shape, dtype, placement, slot.bucket, (first, last), _place(buffer))
        )
    return rows


def _place(buffer: Any) -> str:
    return repr(buffer.store) if isinstance(buffer, stores.Stored) else str(buffer.device)


def _count(totals: dict[str, int], buffer: Any) -> None:
    where = _place(buffer)
    totals[where] = totals.get(where, 0) + buffer.shape.numel() * buffer.dtype.itemsize
