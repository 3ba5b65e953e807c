"""What becomes of a bucket of gradients that is summed over the ranks inside backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zfun.collectives import AllReduce, Call, Group, Lane, Pending, ReduceScatter, start_reduce_scatter_over
from zfun.layout import Layout
from zfun.placement import Placement, S
from zfun.wire import Wire, start, start_over

__all__ = ["SumSink"]


@dataclass(frozen=True, slots=True)
class SumSink:
    """The sink of :func:`shard_grads` and :func:`replicate_grads`: sums a bucket over all ranks, of which each keeps its piece or all."""

    group: Group
    placement: Placement
    wire: Wire | None = None
    borrow: bool = False

    @property
    def borrows(self) -> bool:
        """Whether the sums are borrowed. Then they lie where the terms did, so that who waits for one early has no more room."""
        return self.borrow and self.group.lends and self.placement is not S and self.wire is None

    def start(self, buffer: Tensor, layout: Layout, bucket: int) -> Pending:
        """Start to sum a bucket, which is given up."""
        group = self.group
        op = ReduceScatter() if self.placement is S else AllReduce()
        call = Call(op, "grads", layout.label(bucket), Lane.GRADS, borrow=self.borrows)
        if group.mesh.size == 1:
            return Pending.done(buffer)
        if self.wire is not None:
            return (start_over if self.placement is S else start)(call, buffer, group, self.wire)
        if self.placement is not S:
            return group.start(call, buffer, None if self.borrows else buffer)
        # Over an inner axis the sum over the row is where the sum over the mesh will be.
        out = None if group.axis else group.buffer(layout.shard_numel(bucket), buffer.dtype, buffer.device)
        return start_reduce_scatter_over(group, call, buffer, out)
