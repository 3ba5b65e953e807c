"""A group whose ranks compare the collectives that they start."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from zfun.collectives._group import Group, Wrapper, global_ranks
from zfun.collectives._ops import AllGather, Collective, Stream, check_collective, describe
from zfun.collectives._roles import axis_of, sum_group
from zfun.collectives._work import Work
from zfun.errors import CollectiveMismatch, OptionError
from zfun.options import takes

_LABEL_BYTES = 256


@final
class _CheckedGroup(Wrapper):
    """Before each collective the ranks send each other a label of fixed size.

    Made by :func:`checked`.
    """

    is_checked = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._counts = [0] * len(Stream)

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        label = f"collective {self._counts[call.stream]}: {describe(call, x.numel(), x.dtype)}"
        self._counts[call.stream] += 1
        # The labels go through the stream of the call, just before the call. wait() compares the
        # labels, because comparing here would make streams wait for each other.
        labels = self.wrapped.start(
            Collective(AllGather(), "label", stream=call.stream), _encoded(label)
        )
        pending = self.wrapped.start(call, x, out)

        def wait() -> Tensor:
            self._compare(labels.wait().view(self.size, _LABEL_BYTES))
            return pending.wait()

        return Work(wait)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        return _CheckedGroup(self.wrapped.subgroup(parts, name))

    def __repr__(self) -> str:
        return f"checked({self.wrapped!r})"

    def _compare(self, labels: Tensor) -> None:
        if bool((labels == labels[0]).all()):
            return
        texts = [_decoded(label) for label in labels]
        # Messages name the global ranks.
        known = global_ranks(self)
        ranks_of: dict[str, list[int]] = {}
        for rank, text in zip(known, texts, strict=True):
            ranks_of.setdefault(text, []).append(rank)
        sides = "; ".join(
            f"rank {', '.join(map(str, ranks[:8]))} started {text}"
            for text, ranks in ranks_of.items()
        )
        raise CollectiveMismatch(
            f"all ranks must start the same collectives in the same order; {sides}",
            rank=known[self.rank],
            collective=texts[self.rank],
        )


def _encoded(text: str) -> Tensor:
    # A long text is cut off, so the label ends with a checksum of the whole text.
    data = (
        f"{text.encode()[: _LABEL_BYTES - 16].decode(errors='ignore')} "
        f"#{zlib.crc32(text.encode()):08x}"
    ).encode()
    return torch.tensor(list(data.ljust(_LABEL_BYTES, b"\0")), dtype=torch.uint8)


def _decoded(label: Tensor) -> str:
    return bytes(label.tolist()).rstrip(b"\0").decode(errors="replace").rpartition(" #")[0]


@takes()
def checked(group: Group) -> Group:
    """Return a group that checks that all ranks start the same collective, every time.

    Number, kind, name, part, length and dtype are compared.

    Each collective costs one more small collective. The check finds collectives of one
    shape in another order, which transports by messages do not notice.

    Args:
        group: any group but an axis of a mesh.

    Returns:
        A group that acts like ``group``; ``wait`` raises on all ranks if they differ.

    Raises:
        CollectiveMismatch: from ``wait``, naming the collective that each rank started.
        OptionError: an axis of a mesh.

    Example:
        >>> import torch
        >>> from zfun.collectives import gather_values, simulate
        >>> def main(group):
        ...     return gather_values(torch.tensor(group.rank), checked(group), "rank").tolist()
        >>> simulate(2, main)
        [[0, 1], [0, 1]]
    """
    if sum_group(group) is not group:
        raise OptionError(
            f"a mesh is made of groups that are checked; got its {axis_of(group)} axis alone; call "
            "split(checked(group), inner=...)"
        )
    return _CheckedGroup(group)
