"""Compositions over the axes of meshes, which advice chooses from.

[Note: one batch for all meshes]
Ranks along model and sequence axes work on the batch of one data rank, so a mesh with more of them
has fewer data ranks. All meshes should get the same rows: each rank brings some, and the batch of a
data rank has those of all ranks that work on it. So the batch is a function of the mesh.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import optim, tree
from zfun.collectives import NamedMesh
from zfun.options import ANY, FUNCTION, instance, integer, one_of, takes
from zfun.planner.plans._plan import plan
from zfun.planner.plans._record import Plan
from zfun.recipes import zero
from zfun.transforms import open_batch
from zfun.typing import Loss

# The axes whose ranks have batches of their own, over which zero() shards.
_DATA = ("dp", "sp")


@takes(
    loss=FUNCTION,
    params=ANY,
    batch=FUNCTION,
    meshes=instance(Sequence, "the sizes of each mesh", "zf.planner.mesh_sizes(8, {'tp': 4})"),
    optimizer=ANY,
    recomputed=FUNCTION | None,
    precision=one_of(torch.bfloat16, torch.float16) | None,
    stages=instance(Sequence, "stages of ZeRO", "(1, 3)"),
    micro_batches=integer(1) | None,
)
@dataclass(frozen=True)
class MeshModel:
    """A model whose loss is made for a mesh, for :func:`advise`; remembers its plans.

    Attributes:
        loss: ``loss(mesh, num_micro_batches)`` returns the loss over the axes of
            :func:`zfun.mesh`; the number is that of a pipeline. The axes ``dp`` and ``sp`` have
            batches of their own, and :func:`zfun.zero` shards over them.
        params: the logical tree; ``meta`` tensors will do.
        batch: ``batch(sizes)`` returns the batch of a data rank for a mesh of these sizes; see
            [Note: one batch for all meshes].
        meshes: the size of each axis, the slowest first, for each mesh: :func:`mesh_sizes` lists
            all.
        optimizer: the optimizer.
        recomputed: as ``loss``, with recomputed blocks, if there are any. Tried on a mesh where
            nothing fits without.
        precision: of all compositions.
        stages: of :func:`zfun.zero`; pipelines take the first one only.
        micro_batches: of a step; by default one for each row in a pipeline, else 1.

    Example:
        >>> import zfun as zf
        >>> linear = torch.nn.functional.linear
        >>> def loss_over(mesh, micro_batches):
        ...     loss = lambda p, x: linear(torch.tanh(linear(x, p["up"])), p["down"]).sum()
        ...     if mesh.sizes.get("tp", 1) == 1:
        ...         return loss
        ...     return zf.tensor_parallel(loss, mesh["tp"], {"up": "colwise", "down": "rowwise"})
        >>> empty = lambda *shape: torch.empty(shape, device="meta")
        >>> params = {"up": empty(1024, 256), "down": empty(256, 1024)}
        >>> rows = lambda sizes: empty(8 * 4 // sizes["dp"], 256)
        >>> model = MeshModel(loss_over, params, rows, mesh_sizes(4, {"tp": 4}))
        >>> machine = zf.planner.Hardware(flops_per_s=1e12, network=1e9, device_bytes=9e6)
        >>> print(zf.planner.advise(model, machine, 4).best.composition)
        dp=1, tp=4, ZeRO-1
    """

    loss: Callable[[NamedMesh, int], Loss]
    params: tree.Tree
    batch: Callable[[Mapping[str, int]], Any]
    meshes: Sequence[Mapping[str, int]]
    optimizer: Any = dataclasses.field(default_factory=lambda: optim.adamw(1e-4))
    recomputed: Callable[[NamedMesh, int], Loss] | None = None
    precision: torch.dtype | None = None
    stages: Sequence[int] = (1, 3)
    micro_batches: int | None = None
    known: dict[Any, Plan] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def candidates(self) -> Iterator[MeshCandidate]:
        """Yield every mesh with every stage, without recomputation."""
        for sizes in self.meshes:
            for stage in self.stages[:1] if sizes.get("pp", 1) > 1 else self.stages:
                yield MeshCandidate(tuple(sizes.items()), stage, False, self.precision)


class MeshCandidate(NamedTuple):
    """The choices of a composition over the axes of a mesh.

    Attributes:
        sizes: the name and the size of each axis, the slowest first.
        stage: of :func:`zfun.zero`.
        recomputed: whether blocks are recomputed.
        precision: mixed precision.
    """

    sizes: tuple[tuple[str, int], ...]
    stage: int = 1
    recomputed: bool = False
    precision: torch.dtype | None = None

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes)
        return f"{sizes}, ZeRO-{self.stage}{', recomputed' if self.recomputed else ''}"

    @property
    def num_ranks(self) -> int:
        """The ranks of the mesh."""
        return math.prod(size for _, size in self.sizes)

    @property
    def num_shards(self) -> int:
        """The ranks that the state of a leaf is sharded over."""
        return math.prod(size for axis, size in self.sizes if axis in _DATA)

    def plan(self, model: MeshModel, batch: Any, num_ranks: int | None = None) -> Plan:
        """Plan a step with the batch of a data rank; by default the mesh has all ranks."""
        sizes = dict(self.sizes)
        if not {*_DATA} & sizes.keys():
            sizes = {"dp": 1, **sizes}
        is_pipeline = sizes.get("pp", 1) > 1
        count = model.micro_batches or (_rows_of(batch) if is_pipeline else 1)
        make_loss = model.recomputed if self.recomputed and model.recomputed else model.loss

        def make(mesh: Any) -> Any:
            return zero(
                self.stage,
                make_loss(mesh, count),
                model.optimizer,
                mesh[tuple(name for name in mesh.names if name in _DATA)],
                precision=self.precision,
                num_micro_batches=1 if is_pipeline else count,
            )

        size = num_ranks or self.num_ranks
        return plan(make, model.params, batch, size, mesh=sizes, device="meta", fold=True)


@takes(num_ranks=integer(1), divides=instance(Mapping, "a number for each axis", "{'tp': 8}"))
def mesh_sizes(num_ranks: int, divides: Mapping[str, int]) -> list[dict[str, int]]:
    """List the meshes of a number of ranks whose axes divide given numbers; ``dp`` has the rest.

    Args:
        num_ranks: the ranks.
        divides: the axes beside ``dp``, in the order of the mesh, and for each a number that its
            size divides: heads for ``tp``, tokens for ``sp``, layers for ``pp``.

    Returns:
        The size of each axis of more than one rank, and of ``dp``, which comes after ``pp``.

    Example:
        >>> mesh_sizes(4, {"tp": 4})
        [{'dp': 4}, {'dp': 2, 'tp': 2}, {'dp': 1, 'tp': 4}]
        >>> mesh_sizes(8, {"pp": 2, "tp": 2})[-1]
        {'pp': 2, 'dp': 2, 'tp': 2}
    """
    parts = [[n for n in range(1, num_ranks + 1) if number % n == 0] for number in divides.values()]
    found = []
    for sizes in itertools.product(*parts):
        if num_ranks % math.prod(sizes) == 0:
            cut = {axis: n for axis, n in zip(divides, sizes, strict=True) if n > 1}
            pipes = {axis: n for axis, n in cut.items() if axis == "pp"}
            found.append({**pipes, "dp": num_ranks // math.prod(sizes), **cut})
    return found


def stages_of(found: Plan) -> Iterable[Plan]:
    """Return the plans of the ranks along a pipeline."""
    return found.stages or (found,)


def _rows_of(batch: Any) -> int:
    return next((len(x) for x in open_batch(batch).leaves if isinstance(x, Tensor) and x.ndim), 1)
