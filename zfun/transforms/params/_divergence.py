"""Ranks that leave the schedule: how all ranks find out, and how a released bucket comes back.

[Note: divergence]
The ranks of a step may take different branches, so a rank may use a bucket that the schedule has
released, or none that it has gathered. Three rules keep every rank in step:

* Gathers are started in the order of the schedule on every rank. A rank that needs a bucket early
  first starts every gather scheduled before it, and at the end of a pass it starts those it
  skipped. A rank that has left the schedule releases nothing more in its pass.
* A bucket that was released in forward and is used again must be gathered again by all ranks of
  its group. The rank that needs it asks in a *round*, one all-gather of one number from each rank.
  Every rank comes to a round at the end of its forward, or earlier when it asks itself; rounds go
  on until no rank asks. All ranks gather the buckets that were asked for, in ascending order.
* In backward no rank may have to ask. So a rank says in its last round whether it has used, and
  kept for backward, what the schedule says. If any rank has diverged, backward gathers each bucket
  that forward has not gathered ahead once, in one order, and keeps all of them until no use can
  follow.

The numbers of a round are facts of the host, so a round waits for no computation but that of the
group's own stream. It is the only wait of the host between forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zfun.collectives import AllGather, Collective, Group, Stream, global_ranks
from zfun.transforms.params._buckets import BucketShard

__all__ = ["Divergence"]

# The words of a rank that asks for no bucket.
_FOLLOWED, _DIVERGED = -1, -2


class Divergence:
    """The rounds of one call of a loss on sharded parameters; see [Note: divergence].

    Args:
        group: the ranks that share the parameters.
        callers: the ranks that call the loss together: ``group``, or the mesh that it is an axis
            of.
        shards: the buckets, which are gathered over ``group``.
        alone: there is no other rank to ask, or no values to ask with (fake tensors).
    """

    def __init__(
        self, group: Group, callers: Group, shards: Sequence[BucketShard], *, alone: bool
    ) -> None:
        self._callers = callers
        self._shards = shards
        self._alone = alone
        # The places of this rank's group in a round.
        self._mine = (
            range(group.size)
            if callers is group
            else [global_ranks(callers).index(n) for n in global_ranks(group)]
        )

    def regather(self, bucket: int) -> Tensor:
        """Gather a bucket that was released in forward; the others take part in their next round."""
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

    def _round(self, word: int) -> tuple[list[int], dict[int, Tensor]]:
        call = Collective(AllGather(), "gather again", stream=Stream.CONTROL)
        words = self._callers.start(call, torch.tensor([word])).wait().tolist()
        asked = sorted({words[place] for place in self._mine if words[place] >= 0})
        return words, {bucket: self._shards[bucket].start().wait() for bucket in asked}
