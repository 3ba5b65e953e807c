"""Divergence: the ranks find out that one left the schedule, and regather released buckets.

[Note: divergence]
The ranks of a step may take different branches, so a rank may use a bucket that the schedule has
released, or skip gathered buckets. Three rules keep every rank in step:

* Gathers are started in the order of the schedule on every rank. A rank that needs a bucket early
  first starts all gathers scheduled before, and at the end of a pass starts the skipped gathers. A
  diverged rank releases no more buckets in this pass.
* A bucket that was released in forward and is used again must be regathered by all ranks of
  the group. The rank in need asks in a *round*, one all-gather of one number from each rank. Every
  rank enters a round at the end of forward, or earlier to ask; rounds go on until no rank asks.
  All ranks gather the buckets that were asked for, in ascending order.
* In backward no rank may have to ask. So each rank reports in the last round whether the used
  buckets, and the buckets that backward will use, match the schedule ([Note: what backward will
  use]). If any rank has diverged, backward gathers each bucket that forward has not gathered
  ahead once, in one order, and keeps all buckets until no use can follow.

The numbers of a round are facts of the host, and lie there. So a round waits for the hosts of the
other ranks and for no device, and forward need not be complete when backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.collectives import AllGather, Collective, Group, Stream, Work, global_ranks
from zfun.transforms.call._buckets import BucketShard

# The words of a rank that asks for no bucket.
_FOLLOWED, _DIVERGED = -1, -2


class Divergence:
    """The rounds of one call of a loss on sharded parameters; see [Note: divergence].

    Args:
        group: the ranks that share the parameters.
        callers: the ranks that call the loss together: ``group``, or the mesh of which ``group`` is
            an axis.
        shards: the buckets, which are gathered over ``group``.
        abstract: words have no values (fake tensors); every rank takes the same branches.
    """

    def __init__(
        self, group: Group, callers: Group, shards: Sequence[BucketShard], *, abstract: bool
    ) -> None:
        self._callers = callers
        self._shards = shards
        self._alone = group.size == 1
        self._abstract = abstract
        # The places of this rank's group in a round.
        self._mine = (
            range(group.size)
            if callers is group
            else [global_ranks(callers).index(n) for n in global_ranks(group)]
        )

    def regather(self, bucket: int) -> Tensor:
        """Regather a bucket released in forward; other ranks take part in the next round."""
        if self._alone:
            return self._shards[bucket].start().wait()
        return self._round(bucket)[1][bucket]

    def end_forward(self, *, has_diverged: bool) -> bool:
        """Take part in rounds until no rank asks; return whether any rank has diverged."""
        if self._alone:
            return has_diverged
        word = _DIVERGED if has_diverged else _FOLLOWED
        words, _ = self._round(word)
        while max(words) >= 0:
            words, _ = self._round(word)
        return _DIVERGED in words

    def _start(self, word: int) -> Work:
        call = Collective(AllGather(), "gather again", stream=Stream.CONTROL)
        return self._callers.start(call, torch.tensor([word]))

    def _round(self, word: int) -> tuple[list[int], dict[int, Tensor]]:
        out = self._start(word).wait()
        # Abstract ranks send the word too, so that a plan has every message of a step.
        words = [word] * self._callers.size if self._abstract else out.tolist()
        asked = sorted({words[place] for place in self._mine if words[place] >= 0})
        return words, {bucket: self._shards[bucket].start().wait() for bucket in asked}
