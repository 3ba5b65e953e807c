"""The compositions that advice chooses from."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import optim, stores, tree
from zfun.collectives import Group, Mesh, split
from zfun.compression import Compression, int8
from zfun.layout import DEFAULT_BUCKET_BYTES, FUSED_BYTES
from zfun.options import ANY, BOOL, FUNCTION, instance, integer, one_of, takes
from zfun.recipes import Precision, zero
from zfun.transforms import ScheduleOptions
from zfun.typing import Loss

_LEAN_BYTES = 2**20
_MOST_MICRO_BATCHES = 8
_PRECISION = instance(Precision, "a zf.Precision", "zf.Precision(...)") | one_of(
    torch.bfloat16, torch.float16
)


@takes(
    loss=FUNCTION,
    params=ANY,
    batch=ANY,
    optimizer=ANY,
    recomputed=FUNCTION | None,
    precision=_PRECISION | None,
)
@dataclass(frozen=True)
class Model:
    """A model to be trained, for :func:`advise`; remembers its plans, so that later advice is fast.

    Attributes:
        loss: the loss.
        params: a tree of tensors; ``meta`` tensors will do.
        batch: the batch of a rank.
        optimizer: the optimizer.
        recomputed: the same loss with recomputed blocks, if there is one.
        precision: of all compositions; by default mixed precision is tried where nothing else fits.
    """

    loss: Loss
    params: tree.Tree
    batch: Any
    optimizer: Any = dataclasses.field(default_factory=lambda: optim.adamw(1e-4))
    recomputed: Loss | None = None
    precision: torch.dtype | Precision | None = None
    known: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @takes(self=ANY, num_ranks=integer(1), ranks_per_host=integer(1) | None, lossy=BOOL)
    def candidates(
        self, num_ranks: int, *, ranks_per_host: int | None = None, lossy: bool = True
    ) -> list[Candidate]:
        """List the compositions that :func:`advise` chooses from: every choice with every other.

        Args:
            num_ranks: the ranks of the group.
            ranks_per_host: the ranks of a row; ``None`` for no mesh.
            lossy: whether messages may be rounded to int8.

        Returns:
            The compositions.

        Raises:
            OptionError: no rank.

        Example:
            >>> params = {"w": torch.ones(4)}
            >>> model = Model(lambda p, x: (p["w"] * x).sum(), params, torch.ones(4, 4))
            >>> len(model.candidates(8)), len(model.candidates(8, ranks_per_host=4, lossy=False))
            (240, 276)
        """
        return [*candidates(self, num_ranks, ranks_per_host, self.precision, lossy)]


class Candidate(NamedTuple):
    """The choices of a composition.

    Attributes:
        stage: of :func:`zfun.zero`.
        recomputed: whether blocks are recomputed.
        offloaded: the parts in a store.
        on_disk: whether the store is a disk, not host memory.
        lean: whether buckets have 1 MiB at most, and nothing is gathered ahead.
        precision: mixed precision.
        num_micro_batches: the parts that the batch is split in.
        inner: ranks of a row of the mesh; 1 for a group without axes.
        hybrid: whether the state is sharded over a row alone.
        secondary: whether a row keeps a part of the gathered parameters for backward.
        compressed: the messages in int8, which rounds: of ``"params"`` and ``"grads"``.
        bucket_bytes: the most bytes of a bucket, unless a single leaf has more.
    """

    stage: int
    recomputed: bool = False
    offloaded: tuple[str, ...] = ()
    on_disk: bool = False
    lean: bool = False
    precision: torch.dtype | Precision | None = None
    num_micro_batches: int = 1
    inner: int = 1
    hybrid: bool = False
    secondary: bool = False
    compressed: tuple[str, ...] = ()
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage}"]
        if self.recomputed:
            words.append("recomputed")
        if self.offloaded:
            place = "on disk" if self.on_disk else "in host memory"
            words.append(f"{' and '.join(self.offloaded)} {place}")
        if self.lean:
            words.append("small buckets")
        elif self.bucket_bytes != DEFAULT_BUCKET_BYTES:
            words.append(f"buckets of {self.bucket_bytes >> 20} MiB")
        if self.num_micro_batches > 1:
            words.append(f"{self.num_micro_batches} micro-batches")
        if self.inner > 1:
            words.append(f"{'sharded over' if self.hybrid else 'rows of'} {self.inner} ranks")
        if self.secondary:
            words.append("secondary shards")
        if self.compressed:
            words.append(f"{' and '.join(self.compressed)} in int8")
        if self.precision is not None:
            words.append("mixed precision")
        return ", ".join(words)

    @property
    def closes_at(self) -> int:
        """The most bytes of a bucket."""
        return min(self.bucket_bytes, _LEAN_BYTES) if self.lean else self.bucket_bytes

    @property
    def prefetch(self) -> int:
        """How many buckets are gathered ahead."""
        return 0 if self.lean and self.stage == 3 else 1

    def placed(self, group: Group) -> Group:
        """Return the group, the mesh, or the axis of the mesh that the state is sharded over."""
        if self.inner == 1:
            return group
        mesh: Mesh = split(group, self.inner)
        return mesh.inner if self.hybrid else mesh

    def of(self, model: Model, group: Group) -> Any:
        """Return the functions of a model under these choices."""
        loss = model.recomputed if self.recomputed and model.recomputed else model.loss
        # An abstract tensor is not written, so that any directory will do.
        store: Any = stores.nvme(tempfile.gettempdir()) if self.on_disk else stores.host(pin=False)
        return zero(
            self.stage,
            loss,
            model.optimizer,
            self.placed(group),
            precision=self.precision,
            num_micro_batches=self.num_micro_batches,
            offload=stores.Offload(**dict.fromkeys(self.offloaded, store)),
            compression=Compression(**dict.fromkeys(self.compressed, int8())),
            schedule=ScheduleOptions(prefetch=self.prefetch, secondary=self.secondary),
            bucket_bytes=self.closes_at,
        )


def candidates(
    model: Model,
    num_ranks: int,
    ranks_per_host: int | None,
    precision: torch.dtype | Precision | None,
    lossy: bool,
) -> Iterator[Candidate]:
    """Yield every choice with every other that goes with it; see :meth:`Model.candidates`."""
    buckets: list[dict[str, Any]] = [{}, {"lean": True}]
    leaves = [leaf for leaf in tree.leaves(model.params) if isinstance(leaf, Tensor)]
    if sum(leaf.numel() * leaf.dtype.itemsize for leaf in leaves) > FUSED_BYTES:
        # Else all leaves of a dtype lie in one bucket already.
        buckets.append({"bucket_bytes": FUSED_BYTES})
    for stage, is_recomputed, num_micro_batches in itertools.product(
        (1, 2, 3), (False, True)[: 1 + (model.recomputed is not None)], _splits(model.batch)
    ):
        shared = Candidate(
            stage,
            is_recomputed,
            precision=precision,
            num_micro_batches=num_micro_batches,
        )
        for tier, row, codec, bucket in itertools.product(
            _tiers(stage),
            _rows(stage, num_ranks, ranks_per_host),
            _codecs(stage, lossy),
            buckets,
        ):
            choices: dict[str, Any] = {**tier, **row, **codec, **bucket}
            yield shared._replace(**choices)


def _tiers(stage: int) -> Iterator[dict[str, Any]]:
    yield {}
    parts = [("optimizer",), ("params",), ("params", "optimizer")]
    for offloaded, on_disk in itertools.product(parts if stage == 3 else parts[:1], (False, True)):
        yield {"offloaded": offloaded, "on_disk": on_disk}


def _rows(stage: int, num_ranks: int, ranks_per_host: int | None) -> Iterator[dict[str, Any]]:
    yield {}
    if ranks_per_host is None or ranks_per_host == 1 or ranks_per_host >= num_ranks:
        return
    if num_ranks % ranks_per_host == 0:
        yield {"inner": ranks_per_host, "hybrid": True}
        yield {"inner": ranks_per_host}
        if stage == 3:
            yield {"inner": ranks_per_host, "secondary": True}


def _codecs(stage: int, lossy: bool) -> Iterator[dict[str, Any]]:
    yield {}
    if lossy:
        yield {"compressed": ("grads",)}
        if stage == 3:
            yield {"compressed": ("params",)}
            yield {"compressed": ("params", "grads")}


def _splits(batch: Any) -> list[int]:
    """Return the numbers of equal micro-batches; 1 where the rows of a batch are not known."""
    lengths = {len(x) for x in tree.leaves(batch) if isinstance(x, Tensor) and x.ndim}
    if len(lengths) != 1 or isinstance(batch, list):
        return [1]
    rows = lengths.pop()
    return [2**n for n in range(_MOST_MICRO_BATCHES.bit_length()) if rows % 2**n == 0 and rows]
