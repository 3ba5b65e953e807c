"""A tree of tensors as a few flat buffers that know their placement.

[Note: flats]
``Flat(buffers, placement, layout, group)`` is a tree node whose children are
1-D tensors, one for each bucket of the layout. Under ``R`` and ``P`` a buffer has the bucket's
padded length, under ``S`` the ``size``-th part: rank r holds elements
``[r * n, (r + 1) * n)``. So an element-wise function written for trees runs unchanged on a flat, on
a few long vectors instead of many short ones. Padding stays zero, because element-wise optimizers
map a zero parameter with a zero gradient to zero.

The dtypes of the layout are those of the parameters. Buffers may have other dtypes (gradients and
moments of half parameters are float32), and views have the dtype of the buffer.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, allocate, axis_of, is_symmetric
from zfun.errors import DonatedStateError, OptionError, PlacementError, SpecMismatch, check_process
from zfun.layout import Layout
from zfun.options import each, instance, takes
from zfun.placement import P, Placement, R, S
from zfun.typing import Params


class Life:
    """The ownership of buffers: the one part of a :class:`Flat` that changes.

    Attributes:
        buffers: one for each bucket; none after ``discard``.
        cached: tensors that transforms made from the buffers and keep while the value lives.
        consumed_by: the step that took the buffers over, if one did.
        process: the process that made the value.
    """

    __slots__ = ("buffers", "cached", "consumed_by", "process")

    def __init__(self, buffers: tuple[Any, ...], cached: dict[Any, Any] | None = None) -> None:
        self.buffers = buffers
        self.cached: dict[Any, Any] = {} if cached is None else cached
        self.consumed_by: str | None = None
        self.process = os.getpid()

    def consume(self, consumed_by: str) -> None:
        """Give the buffers to a new value: any later use of the old one raises."""
        self.consumed_by = consumed_by
        self.cached = {}

    def discard(self, consumed_by: str) -> None:
        """Drop the buffers, so that the caller can free each while making a new value."""
        self.consume(consumed_by)
        self.buffers = ()

    def check(self) -> None:
        """Raise :class:`DonatedStateError` if the buffers have been taken over."""
        if self.consumed_by is not None:
            raise DonatedStateError(
                "a donated value must not be used again; its buffers were taken over by "
                f"{self.consumed_by}; use the value which that call returned, or pass donate=False"
            )


def call_site() -> str:
    """Name the innermost line outside zfun that led here."""
    # With the separator, because the path of another folder may begin like that of the package.
    package = f"{Path(__file__).parent.parent}{os.sep}"
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_NONE_MISSED: Mapping[str, int | None] = MappingProxyType({})


class Flat(Generic[Params]):
    """A tree of tensors as flat buffers with a placement.

    ``Flat[T]`` is the type of a value that :func:`zfun.unshard` returns as a ``T``. A Flat never
    changes, except that a donating step takes the buffers over. ``copy.deepcopy`` copies the
    buffers, and keeps the group.

    Args:
        buffers: one 1-D tensor for each bucket (or, when offloaded, one handle of a store).
        placement: the part of the value that each rank holds.
        layout: the place of each leaf.
        group: the ranks that share the value. A value over the inner axis of a mesh is replicated
            over the outer one.
        codec: of a sum or a gather of the buffers; ``None`` sends exact values.
        missed: for gradients, by path: ``None`` for a leaf that was not used, whose gradient of
            zeros takes no step; for a used leaf the number of steps that the leaf has missed
            before. A leaf that is not named takes every step.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     return zf.shard({"w": torch.arange(4.0)}, group)
        >>> zf.simulate(2, main)[1]
        Flat(S, rank 1 of 2: 1 leaf, 4 elements in 1 bucket; here 32 of 64 padded elements)
    """

    __slots__ = ("codec", "group", "layout", "life", "missed", "placement")

    def __init__(
        self,
        buffers: Iterable[Any],
        placement: Placement,
        layout: Layout,
        group: Group,
        *,
        codec: Any = None,
        missed: Mapping[str, int | None] = _NONE_MISSED,
        life: Life | None = None,
    ) -> None:
        if placement not in (R, P, S):
            raise PlacementError(
                f"a placement is zf.R, zf.P or zf.S; got {placement!r}; pass one of the three"
            )
        self._fix(life or Life(tuple(buffers)), placement, layout, group, codec, missed)

    def _fix(self, *values: Any) -> None:
        for name, value in zip(
            ("life", "placement", "layout", "group", "codec", "missed"), values, strict=True
        ):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"a Flat does not change; got .{name} = {value!r}; make another one with with_buffers()"
        )

    @property
    def buffers(self) -> tuple[Any, ...]:
        """One 1-D tensor for each bucket."""
        life = self.life
        life.check()
        if life.process != os.getpid() and is_symmetric(self.group):
            check_process(life.process, "a value in shared memory")
        return life.buffers

    def with_buffers(
        self, buffers: Iterable[Any], placement: Placement | None = None, group: Group | None = None
    ) -> Flat:
        """Return the same layout over other buffers, by default with this placement and group."""
        life = Life(tuple(buffers), self.life.cached if buffers is self.life.buffers else None)
        codec = self.codec if placement is None or placement is self.placement else None
        return Flat(
            (),
            placement or self.placement,
            self.layout,
            group or self.group,
            codec=codec,
            missed=self.missed,
            life=life,
        )

    def with_missed(self, missed: Mapping[str, int | None]) -> Flat:
        """Return the same value, as gradients of which some leaves have missed steps."""
        return Flat(
            (),
            self.placement,
            self.layout,
            self.group,
            codec=self.codec,
            missed=missed,
            life=self.life,
        )

    def select(self, buckets: Sequence[int]) -> Flat:
        """Return some of the buckets, given by ascending indices; the tree has holes for the rest.

        Example:
            >>> import zfun as zf
            >>> params = {"w": torch.ones(3), "scale": torch.ones(1, dtype=torch.float64)}
            >>> zf.simulate(1, lambda group: zf.unshard(zf.shard(params, group).select([1])))
            [{'w': None, 'scale': tensor([1.], dtype=torch.float64)}]
        """
        held = self.buffers
        return Flat(
            (held[index] for index in buckets),
            self.placement,
            self.layout.select(buckets),
            self.group,
            codec=self.codec,
            missed=self.missed,
        )

    def span(self, bucket: int, rank: int | None = None) -> tuple[int, int]:
        """Return the range of a whole bucket that a rank holds, by default this one."""
        slot = self.layout.buckets[bucket]
        if self.placement is not S:
            return 0, slot.padded_numel
        return slot.span(self.group.rank if rank is None else rank, self.group.size)

    def __repr__(self) -> str:
        layout = self.layout
        leaves, buckets = len(layout.leaves), len(layout.buckets)
        padded = sum(bucket.padded_numel for bucket in layout.buckets)
        here = sum(stop - start for start, stop in map(self.span, range(buckets)))
        over = f" over the {axis_of(self.group)} axis" if axis_of(self.group) else ""
        return (
            f"Flat({self.placement!r}{over}, rank {self.group.rank} of {self.group.size}: "
            f"{leaves} {'leaf' if leaves == 1 else 'leaves'}, "
            f"{sum(leaf.numel for leaf in layout.leaves)} elements in {buckets} "
            f"bucket{'' if buckets == 1 else 's'}; here {here} of {padded} padded elements)"
        )

    def _refuse(self, what: str) -> NoReturn:
        remedy = "unshard() it" if self.placement is S else "unravel it with unshard()"
        wrap = (
            "; a loss that takes sharded parameters is wrapped in shard_params()"
            if self.placement is S
            else ""
        )
        raise PlacementError(
            f"a Flat is not a tensor or a dict; got {what} on a Flat with placement "
            f"{self.placement!r}; {remedy} to reach its leaves{wrap}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Flat:
        """Copy the buffers. The copy has the same layout and the same group."""
        return self.with_buffers(
            self._copy(buffer) if isinstance(buffer, Tensor) else copy.deepcopy(buffer, memo)
            for buffer in self.buffers
        )

    def _copy(self, buffer: Tensor) -> Tensor:
        if self.placement is not S:
            return buffer.detach().clone()
        copied = allocate(self.group, buffer.numel(), buffer.dtype, buffer.device)
        return copied.copy_(buffer.detach())

    def __reduce__(self) -> NoReturn:
        raise OptionError(
            "a Flat cannot be pickled or saved, because the group belongs to this process; got "
            f"{self!r}; save it with zf.save(), which every rank calls, or make a copy in this "
            "process with copy.deepcopy()"
        )

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse(f"[{key!r}]")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("iteration")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(f".{name}")


FLAT = instance(Flat, "a Flat", "zf.shard(params, group)")


@dataclass(frozen=True, slots=True)
class _Beside:
    """All that a flat has beside its buffers, so that a map over a tree keeps it.

    Codec and missed steps do not count in a comparison, because maps take gradients together with
    parameters, and then the result is like the first of the two.
    """

    placement: Placement
    layout: Layout
    group: Group
    codec: Any = field(compare=False, repr=False)
    missed: Mapping[str, int | None] = field(compare=False, repr=False)


tree.register(
    Flat,
    lambda x: (x.buffers, _Beside(x.placement, x.layout, x.group, x.codec, x.missed)),
    lambda x, buffers: Flat(
        buffers, x.placement, x.layout, x.group, codec=x.codec, missed=x.missed
    ),
)


@takes(values=each(FLAT, "a list of Flats", "[flat]"))
def consume(values: Sequence[Flat], consumed_by: str) -> None:
    """Mark values whose buffers a step has taken over, so that any later use raises."""
    for flat in values:
        flat.life.consume(consumed_by)


def flats(value: tree.Tree) -> list[Flat]:
    """Return the flats in a tree, which may itself be one."""
    return [
        leaf
        for leaf in tree.leaves(value, is_leaf=lambda x: isinstance(x, Flat))
        if isinstance(leaf, Flat)
    ]


@takes(first=FLAT, second=FLAT)
def check_same_layout(first: Flat, second: Flat, what: str) -> None:
    """Raise :class:`SpecMismatch` if two flats do not lie alike."""
    if first.layout != second.layout:
        raise SpecMismatch(
            f"{what} must have one layout; got {len(first.layout.buckets)} buckets for "
            f"{len(first.layout.leaves)} leaves on {first.layout.size} ranks and "
            f"{len(second.layout.buckets)} buckets for {len(second.layout.leaves)} leaves on "
            f"{second.layout.size} ranks; use the same tree, group and bucket_bytes"
        )


def empty_like(flat: Flat, dtypes: Iterable[torch.dtype], device: Any) -> Flat:
    """Return a flat of uninitialised buffers with the placement, layout and group of another."""
    spans = map(flat.span, range(len(flat.layout.buckets)))
    return flat.with_buffers(
        torch.empty(stop - start, dtype=dtype, device=device)
        for (start, stop), dtype in zip(spans, dtypes, strict=True)
    )
