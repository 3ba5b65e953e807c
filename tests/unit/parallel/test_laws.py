"""Laws over drawn model axes: how leaves are spread changes no bit of the parameters.

The loss is one that no leaf shares with another, so that each rank can compute its part alone. A
norm adds the squares of 32 neighbours with rounding and the rest without, and a cut moves
neighbours, so norms may differ in the last digit, and parameters whose gradients were clipped.
"""

from __future__ import annotations

import math
import tempfile
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

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    def compare(self, found: Any, expected: Any, what: str) -> None:
        """Compare parameters."""
        if self.optimizer == "clipped":
            rtol = 1e-5 if self.precision is None else 1e-2
            torch.testing.assert_close(found["params"], expected["params"], rtol=rtol, atol=rtol)
        else:
            assert_same_bits(found["params"], expected["params"], what)

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

    def steps(
        self, z: zf.recipes.Zero, rank: int, path: str = "", save: str = ""
    ) -> dict[str, Any]:
        """Take three steps, or two that are saved under a path, or one from there."""
        state, norms = z.init(self.params()), []
        if path:
            state = zf.load(path, state).state
        for step in range(state.step, 2 if save else 3):
            batch = torch.arange(1.0, 1 + self.num_micro_batches) * (rank + 1) / (step + 2)
            state, info = z.step(state, batch)
            norms.append(info.grad_norm)
        if save:
            zf.save(save, state)
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


def over_mesh(group: zf.Group, run: Run, **options: str) -> dict[str, Any]:
    mesh = zf.mesh(group, **run.sizes)
    names = [name for name in run.sizes if name != "dp"]

    def rule_of(place: int) -> Callable[[str, Any], Kind]:
        return lambda path, leaf: run.leaves[path][1][place]

    axes = [ModelAxis(mesh[name], rule_of(place)) for place, name in enumerate(names)]
    z = run.zero(ParallelLoss(loss_fn, axes), mesh["dp"])
    return run.steps(z, mesh.coordinates["dp"], **options)


def over_data(group: zf.Group, run: Run, **options: str) -> dict[str, Any]:
    return run.steps(run.zero(loss_fn, group), group.rank, **options)


@st.composite
def kinds(draw: Any, shape: tuple[int, ...], sizes: list[int]) -> tuple[Kind, ...]:
    """Draw how a leaf of a shape is spread over axes of these sizes."""
    local, found = [*shape], list[Kind]()
    for size in sizes:
        ranks = st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(sorted)
        choices: list[Any] = [st.none(), ranks.map(lambda x: Held(tuple(x)))]
        for dim, length in enumerate(local):
            if length % size == 0:
                choices.append(st.just(Cut(dim)))
            if length % size == 0 and length > size:
                first = st.integers(1, length // size - 1)
                choices.append(
                    first.map(
                        lambda x, dim=dim, length=length, size=size: Cut(
                            dim, (x * size, length - x * size)
                        )
                    )
                )
        kind = draw(st.one_of(choices))
        if isinstance(kind, Cut):
            local[kind.dim] //= size
        found.append(kind)
    return tuple(found)


def _stages_like(like: Run | None) -> list[int]:
    """Return the stages that add micro-batches and ranks in the order of another run."""
    if like is None or like.num_micro_batches == 1:
        return [0, 1, 2, 3]
    return [0, 1] if like.stage < 2 else [2, 3]


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=2).map(tuple)


@st.composite
def runs(draw: Any, like: Run | None = None) -> Run:
    """Draw a run, or one with the leaves, batches and optimizer of another."""
    sizes = {"dp": draw(st.integers(1, 3)) if like is None else like.sizes["dp"]}
    sizes |= dict(
        zip(["tp", "ep"], draw(st.sampled_from([(2,), (3,), (2, 2), (1, 2)])), strict=False)
    )
    order = draw(st.permutations([*sizes]))
    axes = [sizes[name] for name in order if name != "dp"]
    if like is None:
        shapes = {f"h.{i}": draw(SHAPES) for i in range(draw(st.integers(1, 6)))}
        # A rank without any leaf has nothing to train.
        leaves = {"all": ((5,), (None,) * len(axes))}
        options = (
            draw(st.sampled_from([*OPTIMIZERS])),
            draw(st.sampled_from([None, torch.bfloat16])),
            draw(st.sampled_from([1, 2])),
        )
    else:
        shapes = {name: shape for name, (shape, _) in like.leaves.items() if name != "all"}
        leaves = {"all": ((5,), (None,) * len(axes))}
        options = like.optimizer, like.precision, like.num_micro_batches
    optimizer, precision, num_micro_batches = options
    return Run(
        {name: sizes[name] for name in order},
        {name: (shape, draw(kinds(shape, axes))) for name, shape in shapes.items()} | leaves,
        draw(st.sampled_from(_stages_like(like))),
        optimizer,
        draw(st.sampled_from([*OFFLOADS])),
        draw(st.sampled_from([1, 400, 1 << 20])),
        precision,
        num_micro_batches,
    )


@given(runs())
@settings(max_examples=examples(32))
def test_the_spread_of_leaves_changes_no_bit(run: Run) -> None:
    expected = zf.simulate(run.sizes["dp"], over_data, run)[0]
    for rank, found in enumerate(zf.simulate(run.num_ranks, over_mesh, run)):
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-14, atol=0)
        run.compare(found, expected, f"rank {rank} of {run.sizes} and one data axis")


@given(st.data())
@settings(max_examples=examples(16))
def test_a_checkpoint_crosses_between_meshes(data: Any) -> None:
    """Two steps on one mesh and the third on another give the bits of three on one data axis."""
    run = data.draw(runs())
    other = data.draw(runs(like=run))
    expected = zf.simulate(run.sizes["dp"], over_data, run)[0]
    with tempfile.TemporaryDirectory() as folder:
        zf.simulate(run.num_ranks, over_mesh, run, save=folder)
        for found in zf.simulate(other.num_ranks, over_mesh, other, path=folder):
            run.compare(found, expected, f"{run.sizes}, then {other.sizes}")
        for found in zf.simulate(run.sizes["dp"], over_data, run, path=folder):
            run.compare(found, expected, f"{run.sizes}, then data alone")


@given(runs())
@settings(max_examples=examples(12))
def test_a_checkpoint_of_a_mesh_has_the_leaves_of_one_process(run: Run) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        zf.simulate(run.num_ranks, over_mesh, run, save=one)
        zf.simulate(run.sizes["dp"], over_data, run, save=two)
        found, expected = (zf.checkpoint.leaves(folder) for folder in (one, two))
        assert sorted(found) == sorted(expected)
        for key in expected:
            leaf = {"params": {key: found[key].load()}}
            run.compare(leaf, {"params": {key: expected[key].load()}}, key)
