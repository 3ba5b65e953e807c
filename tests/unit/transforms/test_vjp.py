"""zf.vjp: outputs of any tree, pullbacks that are dropped, and ranks that differ."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests import models, vjps
from zfun import tree
from zfun.errors import (
    CollectiveMismatch,
    DonatedStateError,
    PlacementError,
    SpecMismatch,
    ZfunError,
)
from zfun.testing import assert_same_bits

X = models.mlp_batches(1, 1)[0][0]
EACH_STAGE = pytest.mark.parametrize("stage", [0, 2, 3])


def hidden(params: Any, x: Tensor) -> Any:
    """An MLP that returns its hidden values."""
    outs = []
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
        outs.append(x)
    return {"hidden": outs, "out": x @ params["out"]}


def gradient(stage: int, group: zf.Group, fn: Any) -> Any:
    vg = zf.data_parallel(
        zf.value_and_grad(zf.shard_params(fn, group) if stage == 3 else fn),
        group,
        bucket_bytes=300,
    )
    return zf.shard_grads(vg, group) if stage >= 2 else vg


def placed(stage: int, group: zf.Group) -> Any:
    place = zf.shard if stage == 3 else zf.replicate
    return place(models.mlp(), group, bucket_bytes=300)


def pulled(vg: Any, params: Any, x: Tensor) -> Any:
    out, pullback = zf.vjp(vg, params, x)
    return zf.unshard(pullback({"out": 2 * out["out"] / out["out"].numel()}))


def test_a_loss_with_hidden_outputs_is_the_loss_of_one_output() -> None:
    _, expected = zf.value_and_grad(lambda p, x: hidden(p, x)["out"].pow(2).mean())(models.mlp(), X)
    out, pullback = zf.vjp(hidden, models.mlp(), X)
    grads = pullback({"hidden": [None] * 4, "out": 2 * out["out"] / out["out"].numel()})
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=0)
    assert not any(leaf.requires_grad for leaf in tree.leaves(out))


def test_cotangents_of_hidden_outputs_are_added() -> None:
    out, pullback = zf.vjp(hidden, models.mlp(), X)
    ones = tree.map(torch.ones_like, out)
    total = lambda p, x: sum(leaf.sum() for leaf in tree.leaves(hidden(p, x)))
    _, expected = zf.value_and_grad(total)(models.mlp(), X)
    torch.testing.assert_close(pullback(ones), expected, rtol=1e-12, atol=0)


@dataclasses.dataclass
class Out:
    logits: Tensor
    count: int
    cache: Tensor | None = None


class Record(collections.OrderedDict[str, Any]):
    """A class of outputs that no tree knows, as transformers has."""


def test_outputs_are_of_any_class() -> None:
    def fn(params: Any, x: Tensor) -> Any:
        y = params["w"] * x
        return Record(a=Out(y, len(x)), b=(y.argmax(), [y.sum()]), c="text")

    out, pullback = zf.vjp(fn, {"w": torch.tensor(2.0)}, torch.tensor([1.0, 3.0]))
    assert isinstance(out, Record)
    assert isinstance(out["a"], Out)
    assert (out["a"].count, out["c"], int(out["b"][0])) == (2, "text", 1)
    ct = Record(a=Out(torch.tensor([1.0, 0.5]), 0), b=(None, [torch.tensor(10.0)]))
    assert pullback(ct) == {"w": torch.tensor(1.0 + 1.5 + 40.0)}


def test_a_pullback_has_cotangents_of_inputs() -> None:
    """A chain of two functions is one function."""
    first, second = {"w": torch.tensor([2.0, 3.0])}, {"w": torch.tensor([5.0, 7.0])}
    fn = lambda params, x: (params["w"] * x).sin()
    mid, pull_first = zf.vjp(fn, first, torch.tensor([0.5, 0.25]))
    mid.requires_grad_()
    out, pull_second = zf.vjp(fn, second, mid)
    grads, (into, other) = pull_second.with_inputs(torch.ones_like(out), [mid, X.requires_grad_()])
    X.requires_grad_(False)
    assert other is None
    joined = lambda p, x: fn(p[1], fn(p[0], x)).sum()
    _, expected = zf.value_and_grad(joined)([first, second], torch.tensor([0.5, 0.25]))
    assert_same_bits([pull_first(into), grads], expected)


@EACH_STAGE
def test_a_weight_makes_the_mean_over_tokens(stage: int) -> None:
    forward = lambda params, x: (x @ params["h"][0]["w"]).pow(2)
    inside = lambda params, x: zf.weighted_mean(forward(params, x).sum(), len(x))

    def main(group: zf.Group) -> None:
        x = models.mlp_batches(1, group.size)[0][group.rank][: 1 + group.rank]
        _, expected = gradient(stage, group, inside)(placed(stage, group), x)
        out, pullback = zf.vjp(gradient(stage, group, forward), placed(stage, group), x)
        found = pullback(torch.ones_like(out), weight=len(x))
        assert_same_bits(zf.unshard(found), zf.unshard(expected))

    zf.simulate(3, main)


def test_a_loss_scale_is_a_factor_of_the_cotangents() -> None:
    vg = zf.transforms.scale_loss(zf.value_and_grad(hidden), 1024.0)
    out, pullback = zf.vjp(vg, models.mlp(), X)
    plain_out, plainly = zf.vjp(hidden, models.mlp(), X)
    ct = {"out": torch.ones_like(out["out"])}
    assert_same_bits(out, plain_out)
    assert_same_bits(pullback(ct), tree.map(lambda g: g * 1024.0, plainly(ct)))


# Pullbacks that run late, in another order, or never.


@EACH_STAGE
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_calls_may_be_open(stage: int, order: tuple[int, int]) -> None:
    def main(group: zf.Group) -> None:
        vg, params = gradient(stage, group, vjps.forward), placed(stage, group)
        for step in models.tree_batches(3, 2 * group.size, 6):
            mine = step[2 * group.rank : 2 * group.rank + 2]
            expected = [zf.unshard(vjps.pulled(vg, params, x)) for x in mine]
            calls = [zf.vjp(vg, params, x) for x in mine]
            for i in order:
                out, pullback = calls[i]
                grads = pullback(vjps.cotangents(out, mine[i])[1])
                assert_same_bits(zf.unshard(grads), expected[i])

    zf.simulate(3, main)


@EACH_STAGE
@pytest.mark.parametrize("how", ["drop", "close"])
def test_a_dropped_call_changes_nothing_and_keeps_nothing(stage: int, how: str) -> None:
    def main(group: zf.Group) -> None:
        vg, params = gradient(stage, group, hidden), placed(stage, group)
        for step in models.mlp_batches(3, group.size):
            x = step[group.rank]
            expected = pulled(vg, params, x)
            seen: list[Any] = []

            def noting(p: Any, x: Tensor, seen: list[Any] = seen) -> Any:
                seen += [weakref.ref(zf.gather(p["out"]))]
                return hidden(p, x)

            out, pullback = zf.vjp(gradient(stage, group, noting), params, x)
            if how == "close":
                pullback.close()
                with pytest.raises(ZfunError, match=r"a pullback runs once.*call vjp\(\) again"):
                    pullback({"out": out["out"]})
            del pullback
            assert [ref() for ref in seen] == [None]
            assert_same_bits(pulled(vg, params, x), expected)

    zf.simulate(3, main)


@EACH_STAGE
def test_ranks_that_drop_and_pull_are_told(stage: int) -> None:
    def main(group: zf.Group) -> None:
        vg, params = gradient(stage, group, hidden), placed(stage, group)
        x = models.mlp_batches(1, group.size)[0][group.rank]
        pulled(vg, params, x)
        out, pullback = zf.vjp(vg, params, x)
        if group.rank == 1:
            del pullback
            with pytest.raises(CollectiveMismatch, match=r"rank 0, 2 pulls call 2; rank 1 began"):
                zf.vjp(vg, params, x)
        else:
            match = r"begin, pull and drop the same calls.*rank 1 began call 3; call the function"
            with pytest.raises(CollectiveMismatch, match=match):
                pullback({"out": out["out"]})

    zf.simulate(3, main)


def test_ranks_that_pull_different_calls_are_told() -> None:
    """Two functions of one group, as the two networks of a GAN."""

    def main(group: zf.Group) -> None:
        params = placed(2, group)
        calls = [zf.vjp(gradient(2, group, hidden), params, X) for _ in range(2)]
        out, pullback = calls[group.rank]
        with pytest.raises(CollectiveMismatch, match=r"rank 0 pulls call 1; rank 1 pulls call 2"):
            pullback({"out": out["out"]})

    zf.simulate(2, main)


def test_a_pullback_runs_once() -> None:
    out, pullback = zf.vjp(hidden, models.mlp(), X)
    pullback({"out": out["out"]})
    with pytest.raises(ZfunError, match=r"a pullback runs once.*got a second call"):
        pullback({"out": out["out"]})


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"out": torch.ones(3)}, r"output 'out' has \(4,\).* the cotangent shape \(3,\)"),
        ({"out": 1.0}, r"output 'out' has \(4,\).* the cotangent float"),
        ({"nope": torch.ones(4)}, "got a cotangent at 'nope', and the outputs are"),
        (torch.ones(4), "got a cotangent at '.'"),
    ],
)
def test_wrong_cotangents_leave_the_call_open(wrong: Any, match: str) -> None:
    out, pullback = zf.vjp(hidden, models.mlp(), X)
    good = {"out": torch.ones_like(out["out"])}
    with pytest.raises(SpecMismatch, match=match):
        pullback(wrong)
    assert_same_bits(pullback(good), zf.vjp(hidden, models.mlp(), X)[1](good))


@EACH_STAGE
def test_a_pullback_after_a_donating_step_is_refused(stage: int) -> None:
    def main(group: zf.Group) -> None:
        vg, params = gradient(stage, group, hidden), placed(stage, group)
        rule = zf.shard_optimizer(zf.optim.sgd(0.1), group)
        state = rule.init(params)
        calls = [zf.vjp(vg, params, X) for _ in range(2)]
        cotangents = {"out": calls[0][0]["out"]}
        zf.apply(rule, calls[0][1](cotangents), state, params, donate=True)
        with pytest.raises(DonatedStateError, match="taken over by"):
            calls[1][1](cotangents)

    zf.simulate(2, main)


def test_a_function_that_raises_leaves_nothing_open() -> None:
    def main(group: zf.Group) -> None:
        params = placed(3, group)

        def broken(p: Any, x: Tensor) -> Any:
            hidden(p, x)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            zf.vjp(gradient(3, group, broken), params, X)
        vg = gradient(3, group, hidden)
        assert_same_bits(pulled(vg, params, X), pulled(gradient(3, group, hidden), params, X))

    zf.simulate(2, main)


def test_a_module_is_a_function_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    apply, x, y = zf.functional(net), torch.randn(8, 5), torch.randint(2, (8,))
    out, pullback = zf.vjp(apply, apply.params, x)
    out.requires_grad_()
    nn.functional.cross_entropy(out, y).backward()
    grads = pullback(out.grad)
    nn.functional.cross_entropy(net(x), y).backward()
    assert_same_bits(grads, {name: p.grad for name, p in net.named_parameters()})


def test_a_gradient_function_of_a_user_has_no_halves() -> None:
    mine = lambda params, batch: (params["w"], params)
    vg = zf.accumulate(mine, 2)
    with pytest.raises(ZfunError, match=r"vjp\(\) divides a gradient function that zfun made"):
        zf.vjp(vg, {"w": torch.ones(2)}, torch.ones(2))


def test_cotangents_of_micro_batches_are_a_list() -> None:
    vg = zf.accumulate(zf.value_and_grad(hidden), 2)
    out, pullback = zf.vjp(vg, models.mlp(), X)
    with pytest.raises(ZfunError, match="one entry for each of 2 micro-batches; got dict"):
        pullback(out[0])
    with pytest.raises(ZfunError, match="got list 1 entries"):
        pullback(out[:1])
    with pytest.raises(ZfunError, match=r"weights and inputs of their own.*add_grads\(\)"):
        pullback(out, weight=3)


def test_gradients_of_two_placements_are_not_added() -> None:
    def main(group: zf.Group) -> str:
        whole = zf.replicate({"w": torch.ones(4)}, group)
        terms = zf.redistribute(whole, zf.P, group)
        with pytest.raises(PlacementError, match="one placement and one group") as caught:
            zf.transforms.add_grads(terms, whole)
        return str(caught.value)

    assert "Flat(P" in zf.simulate(2, main)[0]


def test_a_weight_goes_over_the_ranks_that_share_parameters() -> None:
    def main(group: zf.Group) -> float:
        fn = zf.shard_params(lambda params, x: (params["w"] * x).sum(), group)
        params = zf.shard({"w": torch.ones(1)}, group)
        _, pullback = zf.vjp(fn, params, torch.tensor(group.rank + 1.0))
        grads = pullback(torch.tensor(1.0), weight=1.0 + 2.0 * group.rank)
        return float(zf.unshard(grads)["w"])

    assert zf.simulate(2, main) == [0.75, 0.75]
