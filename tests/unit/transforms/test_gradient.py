"""value_and_grad, data_parallel, shard_grads, replicate_grads, accumulate and weighted_mean."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import ops, tree
from zfun.collectives import checked, gather_values, single_group
from zfun.errors import OptionError, ZfunError
from zfun.testing import assert_same_bits


def plain(loss_fn: Any, params: Any, batch: Any) -> tuple[Tensor, Any]:
    leaves, spec = tree.flatten(params)
    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = loss_fn(tree.unflatten(spec, mine), batch)
    grads = torch.autograd.grad(loss, mine, allow_unused=True)
    return loss.detach(), tree.unflatten(
        spec, [torch.zeros_like(p) if g is None else g for p, g in zip(mine, grads, strict=True)]
    )


X = models.mlp_batches(1, 1)[0][0]


def test_value_and_grad_is_plain_autograd() -> None:
    loss, grads = zf.value_and_grad(models.mlp_loss)(models.mlp(), X)
    assert_same_bits((loss, grads), plain(models.mlp_loss, models.mlp(), X))
    assert not loss.requires_grad
    assert not any(leaf.requires_grad for leaf in tree.leaves(grads))


def test_threads_that_share_a_gradient_function_do_not_share_tables_of_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vg = zf.value_and_grad(models.mlp_loss)
    batches = models.mlp_batches(1, 2)[0]
    both_know, point_at = threading.Barrier(2, timeout=20.0), ops.AddressTable.point_at
    plainly = zf.data_parallel(zf.value_and_grad(models.mlp_loss), single_group())
    expected = [plainly(models.mlp(), batch) for batch in batches]
    found: dict[int, Any] = {}

    def point_and_wait(*args: Any) -> bool:
        """Delay each thread's copy until the other thread has written the addresses."""
        changed = point_at(*args)
        both_know.wait()
        return changed

    def main(index: int) -> None:
        gradient = zf.data_parallel(vg, single_group())
        # After this call a table exists that both threads could use.
        gradient(models.mlp(), batches[index])
        both_know.wait()
        monkeypatch.setattr(ops.AddressTable, "point_at", point_and_wait)
        both_know.wait()
        found[index] = gradient(models.mlp(), batches[index])

    threads = [threading.Thread(target=main, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert_same_bits(found[index], expected[index])


def test_a_later_call_does_not_change_earlier_gradients() -> None:
    vg = zf.value_and_grad(models.mlp_loss)
    _, first = vg(models.mlp(), X)
    kept = tree.map(torch.clone, first)
    vg(models.mlp(), X + 1)
    assert_same_bits(first, kept)


def test_parameters_that_require_gradients_are_not_touched() -> None:
    params = tree.map(lambda p: p.requires_grad_(), models.mlp())
    _, grads = zf.value_and_grad(models.mlp_loss)(params, X)
    assert all(p.grad is None for p in tree.leaves(params))
    assert_same_bits(grads, plain(models.mlp_loss, models.mlp(), X)[1])


def test_value_and_grad_works_without_grad_mode() -> None:
    with torch.no_grad():
        _, grads = zf.value_and_grad(models.mlp_loss)(models.mlp(), X)
        assert not torch.is_grad_enabled()
    assert_same_bits(grads, plain(models.mlp_loss, models.mlp(), X)[1])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_aux_is_returned_unchanged(stage: int) -> None:
    def loss_fn(params: Any, x: Tensor) -> Any:
        return models.mlp_loss(params, x), {
            "rows": len(x),
            "out": params["out"].detach().clone(),
            "first": x[0, 0].item(),
        }

    def main(group: zf.Group) -> None:
        batch = models.mlp_batches(1, group.size)[0][group.rank]
        z = zf.zero(stage, loss_fn, zf.optim.sgd(0.1), group)
        _, info = z.step(z.init(models.mlp()), batch)
        assert info.aux["rows"] == 4
        assert info.aux["first"] == batch[0, 0].item()
        assert_same_bits(info.aux["out"], models.mlp()["out"])
        losses = gather_values(models.mlp_loss(models.mlp(), batch), group, "losses")
        torch.testing.assert_close(info.loss, losses.mean(), rtol=1e-12, atol=0)

    zf.simulate(3, main)


def test_aux_with_micro_batches_is_a_list() -> None:
    vg = zf.accumulate(zf.value_and_grad(lambda p, x: (models.mlp_loss(p, x), x.sum())), 2)
    (loss, aux), _ = vg(models.mlp(), X)
    assert [float(part) for part in aux] == [float(half.sum()) for half in X.chunk(2)]
    assert loss.shape == ()


def test_tied_leaves_of_a_plain_tree_get_the_sum() -> None:
    params = models.mlp()
    params["h"][3]["w"] = params["h"][0]["w"]
    _, grads = zf.value_and_grad(models.mlp_loss)(params, X)
    assert grads["h"][0]["w"] is grads["h"][3]["w"]
    apart = plain(models.mlp_loss, params, X)[1]
    torch.testing.assert_close(
        grads["h"][0]["w"], apart["h"][0]["w"] + apart["h"][3]["w"], rtol=1e-12, atol=1e-14
    )
    new, _ = zf.apply(zf.optim.sgd(0.1), grads, zf.optim.sgd(0.1).init(params), params)
    assert new["h"][0]["w"] is new["h"][3]["w"]


def test_an_unused_leaf_has_gradient_zero() -> None:
    params = {**models.mlp(), "unused": torch.ones(3), "empty": torch.zeros(0)}
    _, grads = zf.value_and_grad(models.mlp_loss)(params, X)
    assert_same_bits((grads["unused"], grads["empty"]), (torch.zeros(3), torch.zeros(0)))
    _, grads = zf.value_and_grad(lambda p, x: x.sum())(params, X)
    assert not any(leaf.any() for leaf in tree.leaves(grads))


def test_a_loss_of_shape_one_is_a_scalar() -> None:
    loss, _ = zf.value_and_grad(lambda p, x: models.mlp_loss(p, x).reshape(1))(models.mlp(), X)
    assert loss.shape == ()


def test_in_place_operations_of_a_loss_do_not_reach_the_parameters() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        w = params["h"][0]["w"] * 1
        w += 1
        return (x @ w).sum()

    params = models.mlp()
    zf.value_and_grad(loss_fn)(params, X)
    assert_same_bits(params, models.mlp())


def test_reduce_sum_does_not_divide() -> None:
    batches = models.mlp_batches(1, 3)[0]

    def main(group: zf.Group, reduce: str) -> Any:
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group, reduce=reduce)
        loss, grads = zf.shard_grads(vg, group)(models.mlp(), batches[group.rank])
        return loss, zf.unshard(grads)

    mean, total = (zf.simulate(3, main, reduce)[0] for reduce in ("mean", "sum"))
    parts = [plain(models.mlp_loss, models.mlp(), batch) for batch in batches]
    for found, factor in ((mean, 3), (total, 1)):
        torch.testing.assert_close(
            found[0], sum(loss for loss, _ in parts) / factor, rtol=1e-12, atol=0
        )
        expected = tree.map(
            lambda *leaves, factor=factor: sum(leaves) / factor, *(grads for _, grads in parts)
        )
        for a, b in zip(tree.leaves(found[1]), tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_data_parallel_compares_parameters_once() -> None:
    def main(group: zf.Group) -> None:
        recorded = zf.record(group)
        vg = zf.data_parallel(zf.value_and_grad(models.mlp_loss), recorded)
        params = models.mlp()
        for _ in range(3):
            vg(params, X)
        assert [entry.name for entry in recorded.log] == ["digest", "loss", "loss", "loss"]

    zf.simulate(2, main)


@pytest.mark.parametrize("transform", [zf.shard_grads, zf.transforms.replicate_grads])
def test_a_sum_starts_inside_backward(transform: Any) -> None:
    """The reduction of the first bucket starts before backward reaches the last bucket."""
    events: list[str] = []

    def main(group: zf.Group) -> None:
        class Watched(zf.collectives.Group):
            rank, size = group.rank, group.size

            def start(self, call: Any, x: Tensor, out: Any = None) -> Any:
                if group.rank == 0:
                    events.append(call.name)
                return group.start(call, x, out)

        class Mark(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
                if group.rank == 0:
                    events.append("backward is at the input")
                return grad

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for i, layer in enumerate(params["h"]):
                x = torch.tanh((Mark.apply(x) if i == 1 else x) @ layer["w"] + layer["b"])
            return (x @ params["out"]).pow(2).mean()

        watched = Watched()
        vg = transform(
            zf.data_parallel(zf.value_and_grad(loss_fn), watched, bucket_bytes=300), watched
        )
        vg(models.mlp(), X)

    zf.simulate(2, main)
    assert events.index("grads") < events.index("backward is at the input")
    assert events.count("grads") == 5


def test_replicated_gradients_are_the_sum_of_the_terms() -> None:
    batches = models.mlp_batches(1, 3)[0]

    def main(group: zf.Group) -> Any:
        terms = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group, bucket_bytes=300)
        inside = zf.transforms.replicate_grads(terms, group)
        afterwards = zf.transforms.replicate_grads(zf.accumulate(terms, 1), group)
        found = [vg(models.mlp(), batches[group.rank]) for vg in (inside, afterwards, terms)]
        assert [grads.placement for _, grads in found] == [zf.R, zf.R, zf.P]
        for loss, grads in found:
            assert_same_bits((loss, zf.unshard(grads)), (found[2][0], zf.unshard(found[2][1])))
        return zf.unshard(found[0][1])

    parts = [plain(models.mlp_loss, models.mlp(), batch)[1] for batch in batches]
    expected = tree.map(lambda *leaves: sum(leaves) / 3, *parts)
    for result in zf.simulate(3, main):
        for a, b in zip(tree.leaves(result), tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_reduced_gradients_are_not_reduced_again() -> None:
    batches = models.mlp_batches(1, 2)[0]

    def main(group: zf.Group) -> None:
        terms = zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)
        whole, cut = zf.transforms.replicate_grads(terms, group), zf.shard_grads(terms, group)
        expected = zf.unshard(whole(models.mlp(), batches[group.rank])[1])
        for first, then, placement in (
            (whole, zf.shard_grads, zf.S),
            (cut, zf.transforms.replicate_grads, zf.R),
        ):
            grads = then(first, group)(models.mlp(), batches[group.rank])[1]
            assert grads.placement is placement
            assert_same_bits(zf.unshard(grads), expected)

    zf.simulate(2, main)


# Weighted means: the true mean over tokens.


def token_loss(params: Any, batch: tuple[Tensor, Tensor]) -> Any:
    x, mask = batch
    per_token = torch.tanh(x @ params["w"]).sum(1)
    return zf.weighted_mean((per_token * mask).sum(), mask.sum())


def token_batches(size: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(8)
    counts = [1, 6, 3, 5, 2, 4, 6]
    return [
        (
            torch.randn(6, 5, generator=g, dtype=torch.float64),
            (torch.arange(6) < counts[rank]).double()[torch.randperm(6, generator=g)],
        )
        for rank in range(size)
    ]


W = {"w": torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)}


def true_mean(size: int) -> tuple[Tensor, Tensor]:
    w = W["w"].clone().requires_grad_()
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for x, mask in token_batches(size):
        for row, keep in zip(x, mask, strict=True):
            if keep:
                total = total + torch.tanh(row @ w).sum()
                count += 1
    mean = total / count
    return mean.detach(), torch.autograd.grad(mean, w)[0]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
@pytest.mark.parametrize("order", ["P", "S then accumulate", "accumulate then S", "shard_params"])
def test_weighted_mean_is_the_mean_over_tokens(
    size: int, num_micro_batches: int, order: str
) -> None:
    def main(group: zf.Group) -> Any:
        params: Any = W
        loss_fn: Any = token_loss
        if order == "shard_params":
            params, loss_fn = zf.shard(W, group), zf.shard_params(token_loss, group)
        vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
        if order in ("S then accumulate", "shard_params"):
            vg = zf.shard_grads(vg, group)
        vg = zf.accumulate(vg, num_micro_batches)
        if order == "accumulate then S":
            vg = zf.shard_grads(vg, group)
        loss, grads = vg(params, token_batches(group.size)[group.rank])
        return loss, float(loss), zf.unshard(grads)["w"]

    mean, grad = true_mean(size)
    naive = torch.stack([token_loss(W, batch).mean for batch in token_batches(size)]).mean()
    if size > 1:
        assert not torch.isclose(mean, naive)
    for loss, number, found in zf.simulate(size, main):
        torch.testing.assert_close(loss.mean, mean, rtol=1e-12, atol=0)
        assert number == pytest.approx(mean.item(), rel=1e-12)
        torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_takes_weighted_means(stage: int) -> None:
    def main(group: zf.Group) -> Any:
        z = zf.zero(stage, token_loss, zf.optim.sgd(1.0), group, num_micro_batches=2)
        state, info = z.step(z.init(W), token_batches(group.size)[group.rank])
        return info.loss, z.params(state)["w"]

    mean, grad = true_mean(3)
    for loss, w in zf.simulate(3, main):
        torch.testing.assert_close(loss, mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(w - W["w"], -grad, rtol=1e-12, atol=1e-14)


def test_a_weighted_mean_allows_a_rank_without_tokens() -> None:
    def main(group: zf.Group) -> Any:
        x, mask = token_batches(2)[group.rank]
        loss, grads = zf.data_parallel(zf.value_and_grad(token_loss), group)(
            W, (x, mask * group.rank)
        )
        return loss.mean, zf.unshard(grads)["w"]

    x, mask = token_batches(2)[1]
    expected = plain(lambda p, b: token_loss(p, b).mean, W, (x, mask))
    for loss, grad in zf.simulate(2, main):
        torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, expected[1]["w"], rtol=1e-12, atol=1e-14)


def test_weighted_mean_is_a_mean() -> None:
    def main(group: zf.Group) -> None:
        with pytest.raises(
            OptionError, match=r"weighted_mean\(\) is a mean; got data_parallel\(reduce='sum'\)"
        ):
            zf.data_parallel(zf.value_and_grad(token_loss), group, reduce="sum")(
                W, token_batches(2)[group.rank]
            )

    zf.simulate(2, main)


# accumulate


def test_accumulate_splits_every_tensor_of_a_batch() -> None:
    seen: list[Any] = []

    def loss_fn(params: Any, batch: Any) -> Tensor:
        seen.append((batch["x"].clone(), batch["nested"][0].clone(), batch["scale"]))
        return (params["w"] * batch["x"].sum()).sum()

    batch = {"x": torch.arange(4.0), "nested": [torch.arange(8.0).reshape(4, 2)], "scale": 3.0}
    zf.accumulate(zf.value_and_grad(loss_fn), 2)({"w": torch.ones(2)}, batch)
    assert_same_bits(
        seen,
        [
            (torch.tensor([0.0, 1.0]), torch.arange(4.0).reshape(2, 2), 3.0),
            (torch.tensor([2.0, 3.0]), torch.arange(4.0, 8).reshape(2, 2), 3.0),
        ],
    )


@pytest.mark.parametrize("leaf", [torch.ones(5), torch.ones(())])
def test_accumulate_needs_batches_that_can_be_split(leaf: Tensor) -> None:
    with pytest.raises(
        OptionError, match=r"in 2; batch leaf 'x\.0' has shape .*; use a batch size that 2 divides"
    ) as caught:
        zf.accumulate(zf.value_and_grad(lambda p, b: p["w"].sum()), 2)(
            {"w": torch.ones(2)}, {"x": [leaf]}
        )
    assert caught.value.leaf == "x.0"


@pytest.mark.parametrize("num", [1, 2, 4])
def test_accumulate_is_the_mean_of_the_micro_batches(num: int) -> None:
    loss, grads = zf.accumulate(zf.value_and_grad(models.mlp_loss), num)(models.mlp(), X)
    expected_loss, expected = plain(
        lambda p, x: sum(models.mlp_loss(p, part) for part in x.chunk(num)) / num, models.mlp(), X
    )
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for a, b in zip(tree.leaves(grads), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_failed_loss_leaves_no_trace() -> None:
    def main(group: zf.Group) -> None:
        vg = zf.value_and_grad(zf.shard_params(models.mlp_loss, group))
        flat = zf.shard(models.mlp(), group, bucket_bytes=300)
        for _ in range(2):
            with pytest.raises((RuntimeError, ZfunError)):
                vg(flat, torch.ones(3, 4))
        loss, grads = vg(flat, X)
        whole = plain(models.mlp_loss, models.mlp(), X)
        torch.testing.assert_close(loss, whole[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(
            zf.unshard(grads)["out"], group.size * whole[1]["out"], rtol=1e-12, atol=1e-14
        )

    zf.simulate(1, main)


def test_a_norm_counts_tied_leaves_once_in_every_form() -> None:
    params = models.mlp()
    params["h"][3]["w"] = params["h"][0]["w"]
    _, grads = zf.value_and_grad(models.mlp_loss)(params, X)
    alone = tree.leaves(grads)
    once = torch.cat(
        [leaf.reshape(-1) for leaf in {id(leaf): leaf for leaf in alone}.values()]
    ).norm()
    twice = torch.cat([leaf.reshape(-1) for leaf in alone]).norm()
    assert not torch.isclose(once, twice)

    def main(group: zf.Group, bucket_bytes: int) -> Any:
        whole = zf.replicate(grads, group, bucket_bytes=bucket_bytes)
        return (
            zf.reductions.global_norm(grads),
            zf.reductions.global_norm(whole),
            zf.reductions.global_norm(zf.redistribute(whole, zf.S, group)),
        )

    found = [
        norm
        for size in (1, 2, 3, 7)
        for size_bytes in (1, 300, 2**20)
        for run in zf.simulate(size, main, size_bytes)
        for norm in run
    ]
    assert_same_bits(found, [found[0]] * len(found))
    torch.testing.assert_close(found[0], once, rtol=1e-14, atol=0)


@pytest.mark.parametrize("sharded", [False, True])
def test_debug_mode_names_leaves_without_a_gradient(sharded: bool) -> None:
    def main(group: zf.Group) -> str:
        group = zf.record(checked(group))
        params: Any = {"used": torch.ones(3), "idle": torch.ones(2)}
        loss: Any = lambda params, batch: (
            (params["used"] * batch).sum() + (params["idle"].sum() if group.rank else 0.0)
        )
        if sharded:
            params, loss = zf.shard(params, group), zf.shard_params(loss, group)
        vg = zf.data_parallel(zf.value_and_grad(loss), group)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            vg(params, torch.ones(()))
        return "; ".join(str(entry.message) for entry in caught)

    # Filters of warnings belong to the process, so one rank at a time.
    assert zf.simulate(1, main)[0].startswith(
        "rank 0: the loss does not depend on idle; such leaves have zero gradients"
    )
