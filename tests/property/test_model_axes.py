"""Laws over drawn model axes: how leaves are spread changes no bit of norms and parameters.

The loss is one that no leaf shares with another, so that each rank can compute its part alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests.conftest import examples
from zfun import optim, stores
from zfun.parallel import Cut, Held, ModelAxis, ParallelLoss
from zfun.testing import assert_same_bits

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(0.01, weight_decay=0.1),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1, momentum=0.9)),
    "labels": lambda: optim.by_label(
        {"matrix": optim.lion(0.01), "rest": optim.sgd(0.1)},
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "rest",
    ),
}
OFFLOADS: dict[str, Any] = {
    "none": None,
    "host": stores.Offload(optimizer=stores.host(), grads=stores.host()),
}
Kind = Cut | Held | None


@dataclass(frozen=True)
class Run:
    """A composition, a mesh, and how each leaf is spread over each of its model axes."""

    sizes: dict[str, int]
    leaves: dict[str, tuple[tuple[int, ...], tuple[Kind, ...]]]
    stage: int
    optimizer: str
    offload: str
    bucket_bytes: int
    precision: torch.dtype | None
    num_micro_batches: int

    def params(self) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(shape, generator=chance) for name, (shape, _) in self.leaves.items()
        }

    def zero(self, loss: Any, group: zf.Group) -> zf.recipes.Zero:
        return zf.zero(
            self.stage,
            loss,
            OPTIMIZERS[self.optimizer](),
            group,
            bucket_bytes=self.bucket_bytes,
            offload=OFFLOADS[self.offload],
            precision=self.precision,
            num_micro_batches=self.num_micro_batches,
        )

    def steps(self, z: zf.recipes.Zero, rank: int) -> dict[str, Any]:
        state, norms = z.init(self.params()), []
        for step in range(3):
            batch = torch.arange(1.0, 1 + self.num_micro_batches) * (rank + 1) / (step + 2)
            state, info = z.step(state, batch)
            norms.append(info.grad_norm)
        return {"norms": norms, "params": z.params(state)}


def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return sum(
        (
            (0.5 * (leaf - batch.mean().to(leaf.dtype)) ** 2).sum()
            for leaf in params.values()
            if leaf is not None
        ),
        torch.zeros(()),
    )


def over_mesh(group: zf.Group, run: Run) -> dict[str, Any]:
    mesh = zf.mesh(group, **run.sizes)
    names = [name for name in run.sizes if name != "dp"]

    def rule_of(place: int) -> Callable[[str, Any], Kind]:
        return lambda path, leaf: run.leaves[path][1][place]

    axes = [ModelAxis(mesh[name], rule_of(place)) for place, name in enumerate(names)]
    z = run.zero(ParallelLoss(loss_fn, axes), mesh["dp"])
    return run.steps(z, mesh.coordinates["dp"])


def over_data(group: zf.Group, run: Run) -> dict[str, Any]:
    return run.steps(run.zero(loss_fn, group), group.rank)


@st.composite
def spreads(draw: Any, sizes: list[int]) -> tuple[tuple[int, ...], tuple[Kind, ...]]:
    """Draw a leaf: first its piece on a rank, then the axes that make it larger."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))
    kinds: list[Kind] = []
    for size in reversed(sizes):
        kind = draw(st.sampled_from(["whole", "cut", "packed", "held"]))
        if kind == "held":
            ranks = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
            kinds.append(Held(tuple(sorted(ranks))))
            continue
        if kind == "whole":
            kinds.append(None)
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        part = draw(st.integers(0, shape[dim] - 1)) if kind == "packed" else 0
        parts = (part * size, (shape[dim] - part) * size) if part else ()
        shape[dim] *= size
        kinds.append(Cut(dim, parts))
    return tuple(shape), tuple(reversed(kinds))


@st.composite
def runs(draw: Any) -> Run:
    dp, *others = draw(
        st.sampled_from([(1, 2), (2, 2), (3, 2), (2, 3), (1, 2, 2), (2, 2, 2), (2, 1, 2)])
    )
    sizes = dict(zip(["dp", "tp", "ep"], (dp, *others), strict=False))
    order = draw(st.permutations([*sizes]))
    names = [name for name in order if name != "dp"]
    count = draw(st.integers(1, 6))
    stage = draw(st.integers(0, 3))
    return Run(
        {name: sizes[name] for name in order},
        {f"h.{i}": draw(spreads([sizes[name] for name in names])) for i in range(count)}
        # A rank without any leaf has nothing to train.
        | {"all": ((5,), (None,) * len(names))},
        stage,
        draw(st.sampled_from([*OPTIMIZERS])),
        draw(st.sampled_from([*OFFLOADS])),
        draw(st.sampled_from([1, 400, 1 << 20])),
        draw(st.sampled_from([None, torch.bfloat16])),
        draw(st.sampled_from([1, 2])),
    )


@given(runs())
@settings(max_examples=examples(120))
def test_the_spread_of_leaves_changes_no_bit(run: Run) -> None:
    num_ranks = 1
    for size in run.sizes.values():
        num_ranks *= size
    expected = zf.simulate(run.sizes["dp"], over_data, run)[0]
    for rank, found in enumerate(zf.simulate(num_ranks, over_mesh, run)):
        assert_same_bits(found, expected, f"rank {rank} of {run.sizes} and one data axis")
