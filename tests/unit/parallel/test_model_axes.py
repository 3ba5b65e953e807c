"""A run over model axes: the logical tree goes in and comes out, and wrong programs are refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
from zfun import optim, tree
from zfun.errors import LeafError, OptionError, SpecMismatch
from zfun.evaluation import evaluate
from zfun.parallel import Cut, Held, ModelAxis, ParallelLoss
from zfun.testing import assert_same_bits

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


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["no axis", "an axis", "a pipeline"])
def test_a_run_does_not_keep_the_leaves_that_it_started_from(kind: str, stage: int) -> None:
    def main(group: zf.Group) -> list[str]:
        mesh = zf.mesh(group, tp=2, dp=1)
        if kind == "a pipeline":
            fns = [TiedStages.first, TiedStages.last]
            loss = zf.pipeline(fns, mesh["tp"], num_micro_batches=2)
            z = zf.zero(stage, loss, optim.adamw(0.1), mesh["dp"])
            arrays = tree.map(lambda leaf: leaf.clone().numpy(), TiedStages.params())
        else:
            plain = zf.zero(stage, loss_fn, optim.adamw(0.1), mesh["dp"])
            z = plain if kind == "no axis" else zero_of(group, stage=stage)[0]
            arrays = tree.map(lambda leaf: leaf.clone().numpy(), params())
        # An array lives as long as any tensor that shows its memory.
        pairs = zip(tree.paths(arrays), tree.leaves(arrays), strict=True)
        alive = {path: weakref.ref(array) for path, array in pairs}
        state = z.init(tree.map(torch.from_numpy, arrays))
        del arrays, pairs
        gc.collect()
        assert state.step == 0  # the run is alive
        return [path for path, array in alive.items() if array() is not None]

    assert zf.simulate(2, main) == [[], []]


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


@pytest.mark.parametrize(("max_skipped", "leaf"), [(9, "down"), (None, None)])
def test_a_bad_gradient_of_one_part_skips_the_step_everywhere(
    max_skipped: int | None, leaf: str | None
) -> None:
    def main(group: zf.Group) -> Any:
        def loss(held: Any, batch: torch.Tensor) -> torch.Tensor:
            factor = float("inf") if group.rank == 1 else 1.0
            return loss_fn(held, batch) + (held["down"] * factor).sum()

        z, _ = zero_of(group, loss=loss, max_skipped=max_skipped)
        state = z.init(params())
        state, info = z.step(state, torch.tensor(0.0))
        return (
            bool(info.skipped),
            info.bad_leaf,
            torch.equal(z.params(state)["norm"], params()["norm"]),
        )

    assert zf.simulate(4, main) == [(True, leaf, True)] * 4


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


def test_a_norm_of_a_label_is_refused() -> None:
    clipped = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))

    def main(group: zf.Group) -> None:
        rule = optim.by_label({"all": clipped}, lambda path, leaf: "all")
        z, _ = zero_of(group, optimizer=rule)
        z.init(params())

    refused("clip_by_global_norm.. inside of by_label", OptionError, main)


def test_params_of_another_run_needs_the_logical_tree() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.mesh(group, dp=1, tp=2)
        loss = ParallelLoss(loss_fn, [ModelAxis(mesh["tp"], lambda path, leaf: RULES.get(path))])
        first, second = (zf.zero(2, loss, optim.sgd(0.1), mesh["dp"]) for _ in range(2))
        state = first.init(params())
        state, _ = second.step(state, torch.tensor(1.0))
        second.params(state)

    refused("knows the logical tree from init", SpecMismatch, main)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_is_evaluated_over_the_data_axes(stage: int) -> None:
    def main(group: zf.Group) -> float:
        z, mesh = zero_of(group, stage=stage)
        state = z.init(params())
        return float(evaluate(loss_fn, mesh["dp"])(state, torch.tensor(0.0)))

    squares = {name: float(x.square().sum()) for name, x in params().items()}
    first, second = zf.simulate(2, main)
    assert first + second == pytest.approx(sum(squares.values()) + squares["norm"], rel=1e-5)


def test_steps_that_stages_have_missed_are_saved(tmp_path: Path) -> None:
    """Each rank misses a leaf of its own; a run without model axes goes on from all of these."""
    whole = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3), "d": torch.ones(3)}
    rule = {"a": Held((0,)), "b": Held((0,)), "c": Held((1,)), "d": Held((1,))}

    def used(held: Any, batch: torch.Tensor) -> torch.Tensor:
        names = ["a", "c"] if float(batch) < 2.0 else ["a", "b", "c", "d"]
        return loss_fn([held.get(name) for name in names], batch)

    def steps(z: Any, count: int, path: Path | None) -> Any:
        state = z.init(whole)
        if path is not None:
            state = zf.load(path, state).state
        for step in range(state.step, state.step + count):
            state, _ = z.step(state, torch.tensor(0.5 + step))
        return state, z.params(state)

    def over_axis(group: zf.Group, count: int, path: Path | None = None) -> Any:
        z, _ = zero_of(group, rule=rule, loss=used)
        state, found = steps(z, count, path)
        if path is None:
            zf.save(tmp_path, state)
        return found

    def plain(group: zf.Group, count: int, path: Path | None = None) -> Any:
        return steps(zf.zero(2, used, optim.adamw(0.1), group), count, path)[1]

    expected = zf.simulate(1, plain, 4)[0]
    zf.simulate(2, over_axis, 2)
    for found in (zf.simulate(1, plain, 2, tmp_path)[0], *zf.simulate(2, over_axis, 2, tmp_path)):
        assert_same_bits(found, expected)


class TiedStages:
    """Two stages with one tensor, ``0.embed`` and ``1.head``; alone, or each on a rank.

    Without ``used`` in the batch a step leaves this tensor out.
    """

    @staticmethod
    def first(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["own"]
        return x @ params["embed"] if batch["used"] else x

    @staticmethod
    def last(params: Any, x: Any, batch: Any) -> Any:
        x = x @ params["own"]
        return (x @ params["head"].T if batch["used"] else x).square().mean()

    @staticmethod
    def params() -> Any:
        tied = torch.linspace(0.1, 1.0, 16).view(4, 4)
        return [{"embed": tied, "own": torch.eye(4)}, {"head": tied, "own": torch.eye(4) + 0.1}]

    @classmethod
    def whole(cls, params: Any, batch: Any) -> Any:
        return cls.last(params[1], cls.first(params[0], batch), batch)

    @classmethod
    def steps(cls, group: zf.Group, used: str, path: Path | None = None, **options: Any) -> Any:
        """Take a step for each letter of ``used``; return the whole parameters and the state."""
        mesh = zf.mesh(group, pp=group.size, dp=1)
        micro: dict[str, Any] = {"num_micro_batches": 2} if group.size == 1 else {}
        fns = [cls.first, cls.last]
        loss = cls.whole if micro else zf.pipeline(fns, mesh["pp"], num_micro_batches=2)
        optimizer = options.pop("optimizer", optim.adamw(0.1))
        z = zf.zero(1, loss, optimizer, mesh["dp"], **micro, **options)
        state = z.init(cls.params())
        state = state if path is None else zf.load(path, state).state
        for letter in used:
            x = torch.linspace(0.0, 1.0, 16).view(4, 4) + state.step
            state, _ = z.step(state, {"x": x, "used": letter == "u"})
        return z.params(state), state, z


def copies(state: Any, group: zf.Group) -> Any:
    """Return this rank's own copy of the tied tensor."""
    return zf.unshard(state.params)[group.rank]["head" if group.rank else "embed"]


LABELLED = {
    "by_label": lambda by: optim.by_label(
        {"decays": optim.adamw(0.1, weight_decay=0.5), "rest": optim.adamw(0.1)},
        lambda path, leaf: "decays" if by(path) else "rest",
    ),
    "mask": lambda by: optim.chain(
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.5, mask=lambda path, leaf: by(path)),
        optim.scale(-0.1),
    ),
}


@pytest.mark.parametrize("kind", LABELLED)
@pytest.mark.parametrize("decayed", ["embed", "head"])
def test_copies_of_a_tied_leaf_have_the_label_of_its_first_path(kind: str, decayed: str) -> None:
    optimizer = LABELLED[kind](lambda path: decayed in path)

    def main(group: zf.Group) -> Any:
        whole, state, _ = TiedStages.steps(group, "uuu", optimizer=optimizer)
        return whole, copies(state, group)

    (expected, _), *_ = zf.simulate(1, main)
    for whole, copy in zf.simulate(2, main):
        torch.testing.assert_close(whole, expected)
        assert torch.equal(copy, whole[0]["embed"])


def test_rules_are_asked_for_the_first_path_of_tied_leaves() -> None:
    def main(group: zf.Group) -> Any:
        seen = set[str]()

        def rule(path: str, leaf: torch.Tensor) -> Any:
            seen.add(path)
            return zf.S

        optimizer = optim.by_label({"S": optim.sgd(0.1)}, lambda path, leaf: repr(rule(path, leaf)))
        TiedStages.steps(group, "u", optimizer=optimizer, placement=rule)
        return sorted(seen)

    assert zf.simulate(2, main) == [["0.embed", "0.own"], ["0.embed", "1.own"]]


def test_missed_steps_of_a_tied_leaf_count_under_its_first_path(tmp_path: Path) -> None:
    """A checkpoint of either form, with two missed steps, goes on in either."""

    def begun(group: zf.Group) -> Any:
        state = TiedStages.steps(group, "u--")[1]
        zf.save(tmp_path / str(group.size), state)
        return state.missed.counts

    assert zf.simulate(1, begun) + zf.simulate(2, begun) == [{"0.embed": 2}] * 3

    def ended(group: zf.Group, path: Path | None = None) -> Any:
        if path is None:
            return TiedStages.steps(group, "u--uu")[0]
        whole, state, _ = TiedStages.steps(group, "uu", path)
        assert torch.equal(copies(state, group), whole[0]["embed"])
        return whole

    expected = zf.simulate(1, ended)[0]
    for size in (1, 2):
        path = tmp_path / str(size)
        for found in zf.simulate(1, ended, path) + zf.simulate(2, ended, path):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rule", ["mean", "rank 0", "by rank"])
def test_buffers_are_saved(rule: str, tmp_path: Path) -> None:
    """A whole buffer, and one of the rank that holds it."""
    whole = params() | {"seen": torch.zeros(2), "own": torch.zeros(2)}
    spread = {"up": Cut(0), "own": Held((1,))} if rule != "by rank" else {"up": Cut(0)}

    def counting(held: Any, batch: torch.Tensor) -> torch.Tensor:
        for name in ("seen", "own"):
            if held.get(name) is not None:
                held[name].add_(1.0)
        trained = [x for name, x in held.items() if x is not None and name not in ("seen", "own")]
        return loss_fn(trained, batch)

    def main(group: zf.Group) -> Any:
        z, _ = zero_of(
            group,
            rule=spread,
            loss=counting,
            buffers=lambda path, leaf: rule if path in ("seen", "own") else None,
        )
        state = z.init(whole)
        for step in range(2):
            state, _ = z.step(state, torch.tensor(0.5 + step))
        zf.save(tmp_path, state)
        found = z.params(zf.load(tmp_path, z.init(whole)).state)
        return found["seen"].tolist(), found["own"].tolist()

    assert zf.simulate(4, main) == [([2.0, 2.0], [2.0, 2.0])] * 4


def trained(group: zf.Group, whole: Any, rule: Any, select: Any = None, **options: Any) -> Any:
    """Take two steps, over a model axis if there is a rule; return parameters, all or some."""
    if rule is None:
        z = zf.zero(2, loss_fn, options.pop("optimizer", optim.adamw(0.1)), group, **options)
    else:
        z, _ = zero_of(group, rule=rule, **options)
    state = z.init(whole)
    for step in range(2):
        state, _ = z.step(state, torch.tensor(0.5 + step))
    return z.params(state), z.params(state, select or (lambda path, leaf: True))


@pytest.mark.parametrize("chosen", ["a", "b"])
@pytest.mark.parametrize("kind", ["trainable", "buffers"])
@pytest.mark.parametrize(
    "rule", [{}, {"a": Cut(0), "b": Cut(0)}, {"a": Held((0,)), "b": Held((1,))}]
)
def test_leaves_are_tied_within_one_part_of_the_state(rule: Any, kind: str, chosen: str) -> None:
    """One that is trained and one that is not have their own values, as in one process."""
    rules: dict[str, Any] = {
        "trainable": lambda path, leaf: path == chosen,
        "buffers": lambda path, leaf: "mean" if path == chosen else None,
    }

    def main(group: zf.Group, rule: Any) -> Any:
        tied = torch.linspace(0.0, 1.0, 8).view(4, 2)
        return trained(group, {"a": tied, "b": tied}, rule, **{kind: rules[kind]})

    expected = zf.simulate(1, main, None)[0]
    assert not torch.equal(expected[0]["a"], expected[0]["b"])
    assert_same_bits(zf.simulate(2, main, rule), [expected] * 2)


@pytest.mark.parametrize("chosen", ["a", "b"])
@pytest.mark.parametrize("rule", [{}, {"a": Held((0,)), "b": Held((1,))}])
def test_one_of_two_tied_leaves_is_selected(rule: Any, chosen: str) -> None:
    def main(group: zf.Group, rule: Any) -> Any:
        z = zf.zero(2, loss_fn, optim.sgd(0.1), group)
        if rule is not None:
            z, _ = zero_of(group, rule=rule)
        tied = torch.ones(2)
        found = z.params(z.init({"a": tied, "b": tied}), lambda path, leaf: path == chosen)
        return [path for path, leaf in found.items() if leaf is not None]

    assert zf.simulate(1, main, None) + zf.simulate(2, main, rule) == [[chosen]] * 3


BY_LEAF: dict[str, Any] = {
    "labels": {
        "optimizer": optim.by_label(
            {"large": optim.sgd(0.1), "small": optim.sgd(0.01)},
            lambda path, leaf: "large" if leaf.numel() > 12 else "small",
        )
    },
    "mask": {
        "optimizer": optim.chain(
            optim.add_decayed_weights(0.5, mask=lambda path, leaf: leaf.shape[0] > 4),
            optim.scale(-0.1),
        )
    },
    "trainable": {"trainable": lambda path, leaf: leaf.numel() > 12},
    "requires_grad": {"trainable": lambda path, leaf: leaf.requires_grad},
    "buffers": {"buffers": lambda path, leaf: "mean" if leaf.numel() > 12 else None},
    "select": {"select": lambda path, leaf: leaf.numel() > 12},
}


@pytest.mark.parametrize("name", BY_LEAF)
def test_functions_of_leaves_get_those_of_the_logical_tree(name: str) -> None:
    """A rank has 12 of the 24 elements of a leaf that is cut."""

    def main(group: zf.Group, rule: Any) -> Any:
        whole = params()
        whole["down"].requires_grad_()
        return trained(group, whole, rule, **BY_LEAF[name])

    assert_same_bits(zf.simulate(2, main, RULES), zf.simulate(1, main, None) * 2)


@pytest.mark.parametrize("path", ["up", "first"])
def test_values_of_each_rank_are_whole(path: str) -> None:
    """Also ranks without the leaf raise, and no rank waits."""

    def main(group: zf.Group) -> None:
        z, _ = zero_of(group, buffers=lambda name, leaf: "by rank" if name == path else None)
        with pytest.raises(OptionError, match=f"is whole on every rank; got .* spread .* '{path}'"):
            z.init(params())

    zf.simulate(2, main)


def test_masters_of_parts_load_into_a_run_without_masters(tmp_path: Path) -> None:
    def main(group: zf.Group, precision: Any) -> Any:
        z, _ = zero_of(group, precision=precision)
        state = z.init(params())
        if precision is not None:
            state, _ = z.step(state, torch.tensor(1.0))
            zf.save(tmp_path, state)
            return None
        return z.params(zf.load(tmp_path, state).state)

    zf.simulate(2, main, torch.bfloat16)
    saved = zf.checkpoint.training_state(tmp_path).params
    for found in zf.simulate(2, main, None):
        for name, leaf in found.items():
            assert torch.equal(leaf, saved[name].load())


def test_a_leaf_that_cannot_be_made_ends_all_ranks() -> None:
    def main(group: zf.Group) -> None:
        z, _ = zero_of(group)
        shapes = {name: torch.empty_like(x, device="meta") for name, x in params().items()}

        def make(path: str, leaf: torch.Tensor) -> torch.Tensor:
            if path == "first":  # held by rank 0 alone
                raise ValueError("no such file")
            return params()[path]

        with pytest.raises(Exception, match="no such file"):
            z.init(zf.sources.initialised(shapes, make))

    zf.simulate(2, main)


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
