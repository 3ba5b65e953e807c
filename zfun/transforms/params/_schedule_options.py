"""The options of a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from zfun.collectives import Group, Mesh, data_axes
from zfun.errors import OptionError
from zfun.options import BOOL, GROUP, instance, integer, takes
from zfun.transforms.call._trace import TracedBucket


@takes(
    prefetch=integer(0),
    max_live=integer(0) | None,
    reuse_distance=integer(0) | None,
    persistence=integer(0),
    max_persistent=integer(0) | None,
    secondary=BOOL,
    read_ahead=integer(0),
)
@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """When stage 3 gathers and releases buckets. No option changes a bit of the result.

    Attributes:
        prefetch: how many buckets are gathered ahead of use, forward and backward. Each costs the
            memory of a bucket.
        max_live: the largest number of elements gathered at once, padding included; ``None`` sets
            no bound. A gather ahead of use waits until there is room. A gather that cannot wait
            evicts the bucket that is needed latest, which is then gathered again.
        reuse_distance: a bucket stays gathered after a use if fewer elements than this number are
            used before the next use of the bucket, from forward into backward too. By default a
            bucket that is used again in the same pass stays, and from forward to backward only the
            last buckets, ``prefetch + 1`` at most: backward begins with these, so without staying
            they would be released and gathered again at once. With 0 no bucket stays.
        persistence: a bucket of which no leaf has more elements than this stays gathered until the
            parameters change. Give :func:`zfun.shard` the same number, so that small leaves lie in
            buckets of their own.
        max_persistent: the largest number of elements that stay so, counted in the order of the
            layout; ``None`` sets no bound.
        secondary: over a mesh, each rank keeps a part of the buckets that forward has gathered, and
            backward gathers these parts over the inner axis alone, so that parameters cross between
            rows once in a step. Costs the memory of ``1/mesh.inner.size`` of the parameters during
            a step (hpZ; Wang et al., "ZeRO++", 2023).
        read_ahead: how many shards in a store are read ahead of the gather, forward and backward.
            Each costs the memory of a shard. With 0 the gather waits for the whole read.

    Raises:
        OptionError: a number is negative or not an integer.

    Example:
        >>> ScheduleOptions(prefetch=2).max_live is None
        True
    """

    prefetch: int = 1
    max_live: int | None = None
    reuse_distance: int | None = None
    persistence: int = 0
    max_persistent: int | None = None
    secondary: bool = False
    read_ahead: int = 1

    def persistent(self, buckets: tuple[TracedBucket, ...]) -> frozenset[int]:
        """Return the indices of the buckets that stay gathered until the parameters change."""
        chosen, total = set(), 0
        for index, bucket in enumerate(buckets):
            is_small = self.persistence > 0 and all(
                numel <= self.persistence for _, numel in bucket.leaves
            )
            if is_small and (
                self.max_persistent is None or total + bucket.numel <= self.max_persistent
            ):
                chosen.add(index)
                total += bucket.numel
        return frozenset(chosen)


OPTIONS = instance(ScheduleOptions, "a zf.ScheduleOptions", "zf.ScheduleOptions(prefetch=2)")


@takes(group=GROUP, options=OPTIONS)
def secondary_of(group: Group, options: ScheduleOptions) -> Group | None:
    """Return the group over which backward gathers parameters of ``group``; ``None`` for ``group``.

    Raises:
        OptionError: ``options.secondary`` is set, and the group is no mesh.

    Example:
        >>> import zfun as zf
        >>> mesh = zf.split(zf.collectives.abstract_group(8), inner=2)
        >>> secondary_of(mesh, ScheduleOptions(secondary=True)) is mesh.inner
        True
    """
    if not options.secondary:
        return None
    group = data_axes(group)
    if not isinstance(group, Mesh):
        raise OptionError(
            f"secondary=True gathers over the inner axis of a mesh; got {group!r}; shard the "
            "parameters over a mesh, as zf.split(group, inner=n) makes it, or leave secondary out"
        )
    return group.inner
