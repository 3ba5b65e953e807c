"""A run over model axes: the logical tree goes in and comes out, and wrong programs are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zfun as zf
from zfun import optim
from zfun.errors import LeafError, OptionError, SpecMismatch
from zfun.parallel import Cut, Held, ModelAxis, ParallelLoss

RULES: dict[str, Cut | Held] = {"up": Cut(0), "down": Cut(1), "first": Held((0,))}


def params(seed: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shapes = {"up": (8, 3), "down": (3, 8), "norm": (3,), "first": (4,)}
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def loss_fn(held: Any, batch: torch.Tensor) -> torch.Tensor:
    leaves = [leaf for leaf in zf.tree.leaves(held) if leaf is not None]
    return sum((((leaf - batch) ** 2).sum() for leaf in leaves), torch.zeros(()))


def zero_of(group: zf.Group, *, stage: int = 2, rule: Any = RULES.get, **options: Any) -> Any:
    mesh = zf.mesh(group, dp=-1, tp=2)
    rule_of_path = rule if callable(rule) else rule.get
    loss = ParallelLoss(
        options.pop("loss", loss_fn), [ModelAxis(mesh["tp"], lambda path, leaf: rule_of_path(path))]
    )
    optimizer = options.pop("optimizer", optim.adamw(0.1))
    return zf.zero(stage, loss, optimizer, mesh["dp"], **options), mesh


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_keeps_its_part_and_params_returns_the_whole(stage: int) -> None:
    def main(group: zf.Group) -> Any:
        z, mesh = zero_of(group, stage=stage)
        state = z.init(params())
        shapes = {slot.path: slot.shape for slot in state.params.layout.leaves}
        return mesh.coordinates["tp"], shapes, z.params(state)

    for place, shapes, whole in zf.simulate(4, main):
        assert shapes == {"up": (4, 3), "down": (3, 4), "norm": (3,)} | (
            {} if place else {"first": (4,)}
        )
        assert list(whole) == list(params())
        for name, leaf in params().items():
            assert torch.equal(whole[name], leaf)


def test_chosen_leaves_are_chosen_by_their_logical_shape() -> None:
    def main(group: zf.Group) -> Any:
        z, _ = zero_of(group)
        seen: dict[str, tuple[int, ...]] = {}

        def select(path: str, leaf: torch.Tensor) -> bool:
            seen[path] = tuple(leaf.shape)
            return path in ("up", "first")

        found = z.params(z.init(params()), select)
        return seen["up"], [name for name, leaf in found.items() if leaf is not None]

    assert zf.simulate(2, main) == [((8, 3), ["up", "first"])] * 2


def test_tied_leaves_stay_tied() -> None:
    def main(group: zf.Group) -> Any:
        z, _ = zero_of(group, rule={"a": Cut(0), "b": Cut(0)})
        weight = torch.ones(4, 2)
        state = z.init({"a": weight, "b": weight})
        state, info = z.step(state, torch.tensor(0.0))
        whole = z.params(state)
        return len(state.params.layout.leaves), float(info.grad_norm), whole["a"] is whole["b"]

    # Each of the 8 elements is used twice.
    assert zf.simulate(2, main) == [(1, pytest.approx((8 * 16) ** 0.5), True)] * 2


def test_a_bad_gradient_of_one_part_skips_the_step_everywhere() -> None:
    def main(group: zf.Group) -> Any:
        def loss(held: Any, batch: torch.Tensor) -> torch.Tensor:
            factor = float("inf") if group.rank == 1 else 1.0
            return loss_fn(held, batch) + (held["down"] * factor).sum()

        z, _ = zero_of(group, loss=loss)
        state = z.init(params())
        state, info = z.step(state, torch.tensor(0.0))
        return info.skipped, info.bad_leaf, torch.equal(z.params(state)["norm"], params()["norm"])

    assert zf.simulate(4, main) == [(True, "down", True)] * 4


def test_deferred_leaves_are_cut_as_they_are_made() -> None:
    def main(group: zf.Group) -> Any:
        z, _ = zero_of(group)
        shapes = {name: torch.empty_like(x, device="meta") for name, x in params().items()}
        made = zf.sources.initialised(shapes, lambda path, leaf: params()[path])
        return z.params(z.init(made))

    for whole in zf.simulate(2, main):
        assert all(torch.equal(whole[name], x) for name, x in params().items())


def refused(match: str, kind: type[Exception], body: Callable[[zf.Group], Any]) -> None:
    with pytest.raises(kind, match=match):
        zf.simulate(2, body)


def test_ranks_of_an_axis_start_from_one_logical_tree() -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group)
        z.init(params() | {"up": params(group.rank)["up"]})

    refused("must hold the same logical parameters; leaf up has other values", SpecMismatch, main)


def test_ranks_of_an_axis_share_the_options() -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group, max_skipped=5 + group.rank)
        z.init(params())

    refused("option max_skipped is 5 on rank 0 and 6 on rank 1", SpecMismatch, main)


@pytest.mark.parametrize(
    ("shape", "cut", "match"),
    [
        ((7, 3), Cut(0), r"divide what they cut; got leaf 'up' of shape \(7, 3\)"),
        ((8, 3), Cut(0, (3, 5)), "in parts of 3, 5, over 2 ranks"),
        ((8,), Cut(1), r"got dim 1 for leaf 'up' of shape \(8,\)"),
    ],
)
def test_an_axis_divides_what_it_cuts(shape: tuple[int, ...], cut: Cut, match: str) -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group, rule={"up": cut})
        z.init({"up": torch.ones(shape)})

    refused(match, LeafError, main)


def test_tied_leaves_have_one_style() -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group, rule={"a": Cut(0), "b": Cut(1)})
        weight = torch.ones(4, 2)
        z.init({"a": weight, "b": weight})

    refused("tied leaves are spread over an axis in one way; .* for 'a', 'b'", OptionError, main)


def test_ranks_that_hold_a_leaf_are_ranks_of_the_axis() -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group, rule={"up": Held((2,))})
        z.init(params())

    refused(r"got ranks \(2,\) for leaf 'up' on an axis of 2", OptionError, main)


def test_values_of_rank_0_are_no_logical_tree() -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group)
        z.init(params(), init="broadcast")

    refused("got init='broadcast'; start all ranks from one seed", OptionError, main)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [(optim.lamb(0.1), "lamb"), (optim.muon(0.1, optim.adamw(0.1)), "muon")],
)
def test_rules_of_whole_leaves_are_refused(optimizer: Any, name: str) -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group, optimizer=optimizer)
        z.init(params())

    refused(f"looks at whole leaves .* got {name}", OptionError, main)


def test_an_axis_is_for_data_or_for_a_model() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.mesh(group, tp=2)
        loss = ParallelLoss(loss_fn, [ModelAxis(mesh["tp"], lambda path, leaf: None)])
        zf.zero(2, loss, optim.sgd(0.1), mesh["tp"])

    refused("different axes of one mesh; got two that share ranks", OptionError, main)
