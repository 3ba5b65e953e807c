"""A loss of whole parameters runs on sharded parameters unchanged."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests import models
from zfun import tree
from zfun.collectives import barrier
from zfun.testing import assert_same_bits
from zfun.transforms.call import _buckets
from zfun.transforms.call._lazy import LazyLeaf
from zfun.transforms.params._gathered import GatheredParams

SIZES = pytest.mark.parametrize("size", [1, 3])
X = models.mlp_batches(1, 1)[0][0]


def gradients(
    size: int, loss_fn: Any, params: Any = None, *, sharded: bool = True, calls: int = 2
) -> list[Any]:
    def main(group: zf.Group) -> Any:
        value: Any = models.mlp() if params is None else params
        loss: Any = loss_fn
        if sharded:
            value, loss = zf.shard(value, group, bucket_bytes=300), zf.shard_params(loss_fn, group)
        vg = zf.data_parallel(zf.value_and_grad(loss), group, bucket_bytes=300)
        for _ in range(calls - 1):
            vg(value, X + group.rank)
        out, grads = vg(value, X + group.rank)
        return out, zf.unshard(grads)

    return zf.simulate(size, main)


def same_as_unsharded(size: int, loss_fn: Any, params: Any = None) -> None:
    for calls in (1, 2, 3):
        assert_same_bits(
            gradients(size, loss_fn, params, calls=calls),
            gradients(size, loss_fn, params, sharded=False),
        )


def blocks(params: Any, x: Tensor, use_reentrant: bool | None) -> Tensor:
    for layer in params["h"]:
        run = lambda x, layer=layer: torch.tanh(x @ layer["w"] + layer["b"])
        x = run(x) if use_reentrant is None else checkpoint(run, x, use_reentrant=use_reentrant)
    return (x @ params["out"]).pow(2).mean()


@SIZES
def test_activation_checkpointing_changes_no_bit(size: int) -> None:
    expected = gradients(size, lambda p, x: blocks(p, x, None), sharded=False)
    for calls in (1, 2, 3):
        assert_same_bits(gradients(size, lambda p, x: blocks(p, x, False), calls=calls), expected)


@SIZES
def test_nested_checkpoints_change_no_bit(size: int) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        whole = lambda x: blocks(params, x, False)
        return checkpoint(whole, x, use_reentrant=False)

    expected = gradients(size, lambda p, x: blocks(p, x, None), sharded=False)
    assert_same_bits(gradients(size, loss_fn), expected)


def test_reentrant_checkpointing_is_refused_by_torch_itself() -> None:
    """The old form runs backward inside backward, which ``torch.autograd.grad`` refuses with an
    error of torch.
    """

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        x = x @ params["h"][0]["w"]
        return blocks(params, x, True)

    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        gradients(1, loss_fn)


def test_a_custom_function_needs_gathered_leaves() -> None:
    """The gradient would be lost, because no bucket node lies between an ``autograd.Function`` and
    the lazy leaf.
    """

    def main(group: zf.Group) -> None:
        vg = zf.value_and_grad(
            zf.shard_params(lambda p, x: _Cube.apply(p["out"]).sum() + models.mlp_loss(p, x), group)
        )
        with pytest.raises(
            zf.errors.PlacementError,
            match=r"an autograd.Function takes whole tensors; got the lazy leaf 'out'; call "
            r"zf.gather\(\)",
        ) as caught:
            vg(zf.shard(models.mlp(), group), X)
        assert caught.value.leaf == "out"

    zf.simulate(2, main)


USES: dict[str, Any] = {
    "matmul": lambda p, x: (x @ p["h"][0]["w"]).sum(),
    "linear": lambda p, x: (
        torch.nn.functional.linear(x, p["h"][0]["w"], p["h"][0]["b"]).pow(2).sum()
    ),
    "transpose": lambda p, x: (x @ p["h"][0]["w"].t()).pow(2).sum(),
    "index": lambda p, x: (p["h"][0]["w"][1:3] * p["h"][1]["b"][:2, None]).pow(2).sum() + x.sum(),
    "embedding": lambda p, x: (
        torch.nn.functional.embedding(torch.tensor([1, 3, 1]), p["h"][0]["w"]).pow(2).sum()
    ),
    "stack": lambda p, x: torch.stack([layer["w"] for layer in p["h"]]).pow(3).sum(),
    "cat": lambda p, x: torch.cat([p["h"][0]["b"], p["h"][2]["b"]]).pow(3).sum(),
    "einsum": lambda p, x: (
        torch.einsum("ij,jk,kl->il", x, p["h"][0]["w"], p["h"][1]["w"]).pow(2).sum()
    ),
    "operators": lambda p, x: ((2.0 - p["out"]) / (1 + p["out"] ** 2) - (-p["h"][0]["b"])).sum(),
    "comparison": lambda p, x: torch.where(p["out"] > 0, p["out"] * 2, p["h"][0]["b"]).sum(),
    "detach": lambda p, x: (p["out"].detach() * p["h"][0]["b"]).sum(),
    "no_grad": lambda p, x: (
        p["out"].pow(2).sum() + _without_grad(p["h"][1]["w"]) * p["h"][0]["b"].sum()
    ),
    "no_grad first": lambda p, x: _without_grad(p["out"]) * p["out"].pow(2).sum(),
    "norm penalty": lambda p, x: (
        models.mlp_loss(p, x) + 0.1 * sum(leaf.pow(2).sum() for leaf in tree.leaves(p))
    ),
    "one leaf twice": lambda p, x: (p["h"][0]["w"] @ p["h"][0]["w"]).sum(),
    "iterate": lambda p, x: sum(row.pow(2).sum() for row in p["h"][0]["w"]),
    "metadata": lambda p, x: (
        models.mlp_loss(p, x)
        * p["out"].numel()
        / p["h"][0]["w"].shape[0]
        * (p["out"].dtype is torch.float64)
        * len(p["out"])
    ),
    "clone": lambda p, x: p["out"].clone().pow(2).sum(),
    "to": lambda p, x: p["out"].to(torch.float32).pow(2).sum(),
    "view": lambda p, x: p["h"][0]["w"].view(-1)[3] * p["h"][0]["w"].reshape(25).max(),
    "inner gradient": lambda p, x: _inner_gradient(p, x),  # noqa: PLW0108, defined below
    "custom function": lambda p, x: _Cube.apply(zf.gather(p["out"])).sum(),
    "late": lambda p, x: models.mlp_loss(p, x) + (p["h"][0]["w"].sum() * p["out"].sum()),
}


def _without_grad(w: Tensor) -> Tensor:
    with torch.no_grad():
        return w.sum()


def _inner_gradient(p: Any, x: Tensor) -> Tensor:
    """A gradient penalty with respect to the input: double backward through sharded parameters."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(models.mlp_loss(p, x), x, create_graph=True)
    return slope.pow(2).sum()


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


@pytest.mark.parametrize("use", list(USES))
def test_any_use_of_a_leaf_equals_the_unsharded_use(use: str) -> None:
    same_as_unsharded(3, USES[use])


def test_a_module_runs_by_functional_call() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.GELU(), torch.nn.Linear(7, 3)
        ).double()

    def main(group: zf.Group, sharded: bool) -> Any:
        mine = copy.deepcopy(net)
        loss_fn: Any = lambda p, x: torch.func.functional_call(mine, p, (x,)).pow(2).mean()
        value: Any = {name: p.detach() for name, p in net.named_parameters()}
        if sharded:
            value, loss_fn = (
                zf.shard(value, group, bucket_bytes=100),
                zf.shard_params(loss_fn, group),
            )
        loss, grads = zf.data_parallel(zf.value_and_grad(loss_fn), group, bucket_bytes=100)(
            value, X + group.rank
        )
        return loss, zf.unshard(grads)

    assert_same_bits(zf.simulate(3, main, True), zf.simulate(3, main, False))


def test_metadata_gathers_nothing() -> None:
    def main(group: zf.Group) -> int:
        recorded = zf.record(group)
        seen: list[int] = []

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            leaf = params["out"]
            assert (leaf.shape, leaf.dtype, leaf.device.type, leaf.ndim) == (
                (5,),
                torch.float64,
                "cpu",
                1,
            )
            assert (
                leaf.numel(),
                leaf.size(0),
                leaf.dim(),
                len(leaf),
                leaf.is_floating_point(),
            ) == (5, 5, 1, 5, True)
            assert leaf.requires_grad
            assert isinstance(leaf, Tensor)
            assert repr(leaf) == "LazyLeaf(out, (5,), torch.float64)"
            assert hash(leaf) == hash(leaf)
            seen.append(recorded.bytes_sent("params"))
            return x.sum()

        flat = zf.shard(models.mlp(), recorded)
        zf.value_and_grad(zf.shard_params(loss_fn, recorded))(flat, X)
        return seen[0]

    assert zf.simulate(2, main) == [0, 0]


def test_without_gradients_a_loss_is_just_evaluated() -> None:
    def main(group: zf.Group) -> None:
        loss = zf.shard_params(models.mlp_loss, group)
        flat = zf.shard(models.mlp(), group, bucket_bytes=300)
        for _ in range(3):
            out = loss(flat, X)
            assert not out.requires_grad
            assert_same_bits(out, models.mlp_loss(models.mlp(), X))

    zf.simulate(3, main)


def test_aux_of_lazy_leaves_must_be_cloned() -> None:
    def main(group: zf.Group) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Any:
            return models.mlp_loss(params, x), params["out"].clone().detach()

        (_, aux), _ = zf.value_and_grad(zf.shard_params(loss_fn, group))(
            zf.shard(models.mlp(), group), X
        )
        return aux

    assert_same_bits(zf.simulate(2, main), [models.mlp()["out"]] * 2)


def test_two_models_may_train_in_one_loop() -> None:
    """A loss over two trees that are trained by turns, as in a GAN: each has a transform, and
    closes over the other's values.
    """

    def main(group: zf.Group, sharded: bool) -> Any:
        place = (lambda p: zf.shard(p, group, bucket_bytes=300)) if sharded else (lambda p: p)
        wrap = (lambda loss: zf.shard_params(loss, group)) if sharded else (lambda loss: loss)
        whole = zf.unshard if sharded else (lambda p: p)
        first, second = place(models.mlp()), place(models.mlp(seed=7))
        for _ in range(2):
            other = whole(second)
            vg = zf.data_parallel(
                zf.value_and_grad(
                    wrap(
                        lambda p, x, other=other: models.mlp_loss(p, x) - models.mlp_loss(other, x)
                    )
                ),
                group,
                bucket_bytes=300,
            )
            first, _ = zf.apply(
                zf.optim.sgd(0.1),
                vg(first, X + group.rank)[1],
                zf.optim.sgd(0.1).init(first),
                first,
            )
            other = whole(first)
            vg = zf.data_parallel(
                zf.value_and_grad(
                    wrap(
                        lambda p, x, other=other: models.mlp_loss(p, x) * models.mlp_loss(other, x)
                    )
                ),
                group,
                bucket_bytes=300,
            )
            second, _ = zf.apply(
                zf.optim.sgd(0.1),
                vg(second, X + group.rank)[1],
                zf.optim.sgd(0.1).init(second),
                second,
            )
        return whole(first), whole(second)

    assert_same_bits(zf.simulate(2, main, True), zf.simulate(2, main, False))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_a_loss_may_save_sparse_tensors(layout: torch.layout) -> None:
    matrix = torch.eye(4, 6).mul(torch.arange(1.0, 5.0)[:, None])
    sent = matrix.to_sparse(layout=layout)

    def main(group: zf.Group) -> Any:
        loss = zf.shard_params(lambda params, x: (sent @ params["w"]).pow(2).sum() * x, group)
        params = zf.shard({"w": torch.ones(6, 2)}, group)
        return zf.unshard(zf.value_and_grad(loss)(params, torch.tensor(1.0))[1])["w"]

    for found in zf.simulate(2, main):
        # Each rank has the same batch, and gradients are summed.
        torch.testing.assert_close(found, 2 * 2 * matrix.t() @ matrix @ torch.ones(6, 2))


@SIZES
def test_a_complex_leaf_trains_as_in_torch(size: int) -> None:
    g = torch.Generator().manual_seed(0)
    start = {
        "z": torch.randn(3, 4, generator=g, dtype=torch.complex128),
        "w": torch.randn(4, generator=g, dtype=torch.float64),
    }

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (
            (x[:, :4].to(torch.complex128) @ params["z"].t()).abs().pow(2).sum(1)
            * params["w"].sum()
        ).mean()

    batches = models.mlp_batches(4, size)
    z = start["z"].clone().requires_grad_()
    w = start["w"].clone().requires_grad_()
    optimizer = torch.optim.Adam([z, w], lr=0.05, eps=1e-6)
    for step in batches:
        optimizer.zero_grad()
        torch.stack([loss_fn({"z": z, "w": w}, batch) for batch in step]).mean().backward()
        optimizer.step()

    def main(group: zf.Group, stage: int) -> Any:
        zero = zf.zero(stage, loss_fn, zf.optim.adam(0.05, eps=1e-6), group, bucket_bytes=64)
        state = zero.init(start)
        for step in batches:
            state, info = zero.step(state, step[group.rank])
            assert not info.skipped
        return zero.params(state)

    for stage in (0, 1, 2, 3):
        for found in zf.simulate(size, main, stage):
            torch.testing.assert_close(
                found["z"] - start["z"], z.detach() - start["z"], rtol=1e-9, atol=1e-12
            )
            torch.testing.assert_close(
                found["w"] - start["w"], w.detach() - start["w"], rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("prefetch", [0, 2, 100])
def test_prefetch_changes_no_bit_and_no_byte(prefetch: int) -> None:
    def main(group: zf.Group, ahead: int) -> tuple[Any, int]:
        recorder = zf.record(group)
        z = zf.zero(
            3,
            models.mlp_loss,
            zf.optim.adamw(0.1),
            recorder,
            bucket_bytes=300,
            # By default as many buckets stay for backward as are gathered ahead, and one more.
            schedule=zf.ScheduleOptions(prefetch=ahead, reuse_distance=0),
        )
        state = z.init(models.mlp())
        for _ in range(3):
            state, _ = z.step(
                state, torch.full((4, 5), 0.1 * (group.rank + 1), dtype=torch.float64)
            )
        return z.params(state), recorder.bytes_sent("params") + recorder.bytes_sent("grads")

    got, usual = zf.simulate(3, main, prefetch)[1], zf.simulate(3, main, 1)[1]
    assert_same_bits(got, usual, "parameters")
    changes = [a - b for a, b in zip(tree.leaves(got[0]), tree.leaves(models.mlp()), strict=True)]
    assert all(change.abs().max() > 1e-3 for change in changes)


def test_a_negative_prefetch_is_refused() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"an integer of at least 0, .*; got -1"):
        zf.simulate(
            1,
            lambda group: zf.shard_params(
                models.mlp_loss, group, schedule=zf.ScheduleOptions(prefetch=-1)
            ),
        )


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_must_not_write_to_parameters(stage: int, when: str) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        def write(grad: Tensor | None = None) -> None:
            with torch.no_grad():
                params["h"][1]["b"][:1] += 1

        out = torch.tanh(x @ params["h"][0]["w"] + params["h"][0]["b"])
        if when == "backward":
            out.register_hook(write)
        else:
            write()
        return (out @ params["h"][1]["w"] + params["h"][1]["b"]).pow(2).mean()

    def main(group: zf.Group) -> None:
        z = zf.zero(stage, loss_fn, zf.optim.sgd(0.1), group)
        z.step(z.init(models.mlp()), X)

    with pytest.raises(
        zf.errors.ZfunError,
        match=r"must not change its parameters in place; leaf 'h\.1\.b' was changed; clone\(\) it",
    ):
        zf.simulate(2, main)


def test_persistent_buckets_are_gathered_again_for_other_buffers() -> None:
    def main(group: zf.Group) -> list[float]:
        loss = zf.shard_params(
            lambda p, x: (p["w"] * x).sum(), group, schedule=zf.ScheduleOptions(persistence=1 << 20)
        )
        params, x = zf.shard({"w": torch.ones(64)}, group), torch.ones(64)
        vg = zf.value_and_grad(loss)
        found = [vg(params, x)[0].item(), vg(params, x)[0].item()]
        twice = params.with_buffers([buffer * 2 for buffer in params.buffers])
        # Equal version counters, so that versions cannot tell the two values apart.
        for mine, other in zip(twice.buffers, params.buffers, strict=True):
            torch.autograd.graph.increment_version([mine] * (other._version - mine._version))
        return [*found, vg(twice, x)[0].item()]

    assert zf.simulate(2, main) == [[64.0, 64.0, 128.0]] * 2


def test_a_shard_that_is_part_of_a_larger_tensor_is_copied() -> None:
    """Offsets of leaves count from the beginning of the storage."""

    def main(group: zf.Group) -> float:
        params = zf.shard({"w": torch.arange(64.0), "v": torch.arange(64.0)}, group)
        params = params.with_buffers(
            [torch.cat([torch.full((5,), 7.0), buffer])[5:] for buffer in params.buffers]
        )
        loss = zf.shard_params(lambda p, x: (p["w"] * p["v"] * x).sum(), group)
        return zf.value_and_grad(loss)(params, torch.ones(()))[0].item()

    assert zf.simulate(2, main) == [float(sum(i * i for i in range(64)))] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_one_rank_alone_gathers_nothing_twice(size: int) -> None:
    """On one rank the gathered bucket is the shard: autograd may keep the views, and no regather
    follows.
    """
    asked = []

    def main(group: zf.Group) -> Any:
        params, loss = (
            zf.shard(models.mlp(), group, bucket_bytes=300),
            zf.shard_params(lambda p, x: blocks(p, x, None), group),
        )
        vg, found = zf.data_parallel(zf.value_and_grad(loss), group, bucket_bytes=300), []
        for _ in range(3):
            before = unpack.call_count
            found.append(zf.unshard(vg(params, X + group.rank)[1]))
            barrier(group)
            asked.append(unpack.call_count - before)
        return found

    with mock.patch.object(
        GatheredParams, "_unpack", autospec=True, side_effect=GatheredParams._unpack
    ) as unpack:
        expected = gradients(size, lambda p, x: blocks(p, x, None), sharded=False)[0][1]
        for grads in zf.simulate(size, main)[0]:
            assert_same_bits(grads, expected)
    # The first call learns the order of use.
    assert asked[0] > 0
    assert asked[1:] == [0, 0] if size == 1 else min(asked) > 0


@pytest.mark.parametrize("size", [1, 2])
def test_one_rank_alone_gives_the_loss_plain_tensors(size: int) -> None:
    """From the second step on, because the first step learns the order of use."""

    def main(group: zf.Group) -> list[set[type]]:
        seen: list[set[type]] = []

        def loss(params: dict[str, Any], x: Tensor) -> Tensor:
            leaves = zf.tree.leaves(params)
            seen.append({type(leaf) for leaf in leaves})
            assert [type(leaf) for leaf in zf.tree.leaves(zf.gather(params))] == [Tensor] * len(
                leaves
            )
            return (params["w"] * params["frozen"] * x).sum()

        whole = {"w": torch.arange(64.0), "frozen": torch.full((64,), 2.0)}
        params, frozen = (
            zf.shard(part, group) for part in zf.partition(whole, lambda path, leaf: path == "w")
        )
        vg = zf.data_parallel(zf.value_and_grad(zf.shard_params(loss, group, frozen=frozen)), group)
        for _ in range(3):
            assert torch.equal(
                zf.unshard(vg(params, torch.ones(64))[1])["w"], torch.full((64,), 2.0)
            )
            barrier(group)
        return seen

    first, *later = zf.simulate(size, main)[0]
    assert first == {LazyLeaf}
    assert later == [{Tensor} if size == 1 else {LazyLeaf}] * 2


@SIZES
def test_steps_work_without_the_private_view_function_of_torch(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zfun also runs on a torch without this private function."""

    def main(group: zf.Group) -> list[Any]:
        zero = zf.zero(3, models.mlp_loss, zf.optim.adamw(0.1), group, bucket_bytes=1000)
        state, found = zero.init(models.mlp()), []
        for _ in range(3):
            state, info = zero.step(state, X)
            found.append((info.loss, zero.params(state)))
        return found

    with_it = zf.simulate(size, main)
    monkeypatch.setattr(_buckets, "_view", None)
    assert_same_bits(zf.simulate(size, main), with_it)


@SIZES
def test_a_function_of_two_sharded_losses_has_their_gradient(size: int) -> None:
    def main(group: zf.Group) -> Any:
        fn = lambda p, x: blocks(p, x, None)
        found = []
        for sharded in (True, False):
            params: Any = (
                zf.shard(models.mlp(), group, bucket_bytes=300) if sharded else models.mlp()
            )
            first, second = (zf.shard_params(fn, group) if sharded else fn for _ in range(2))
            both = lambda p, x, first=first, second=second: 2 * first(p, x) + second(p, 0.5 * x)
            vg = zf.data_parallel(zf.value_and_grad(both), group, bucket_bytes=300)
            found.append(
                [
                    (loss, zf.unshard(grads))
                    for loss, grads in (vg(params, X + group.rank) for _ in range(3))
                ]
            )
        return found

    for found, expected in zf.simulate(size, main):
        assert_same_bits(found, expected)


@SIZES
def test_a_loss_called_with_other_parameters_is_independent_of_the_call(size: int) -> None:
    """A teacher whose loss runs inside a student's loss neither gives nor receives gradients."""

    def main(group: zf.Group) -> Any:
        fn = lambda p, x: blocks(p, x, None)
        others = zf.tree.map(lambda leaf: leaf + 0.5, models.mlp())
        found = []
        for sharded in (True, False):
            place: Any = (
                (lambda tree: zf.shard(tree, group, bucket_bytes=300))
                if sharded
                else (lambda tree: tree)
            )
            teacher, params = place(others), place(models.mlp())
            student, judge = (zf.shard_params(fn, group) if sharded else fn for _ in range(2))

            def loss(
                p: Any,
                x: Tensor,
                student: Any = student,
                judge: Any = judge,
                teacher: Any = teacher,
            ) -> Tensor:
                with torch.no_grad():
                    target = judge(teacher, x)
                return (student(p, x) - target).square()

            vg = zf.data_parallel(zf.value_and_grad(loss), group, bucket_bytes=300)
            found.append(
                [
                    (loss, zf.unshard(grads))
                    for loss, grads in (vg(params, X + group.rank) for _ in range(3))
                ]
            )
        return found

    for found, expected in zf.simulate(size, main):
        assert_same_bits(found, expected)


def test_a_flat_is_immutable() -> None:
    def main(group: zf.Group) -> None:
        params = zf.shard({"w": torch.ones(4)}, group)
        with pytest.raises(
            AttributeError,
            match=r"a Flat does not change; got \.placement = R; make another one with "
            r"with_buffers\(\)",
        ):
            params.placement = zf.R

    zf.simulate(1, main)
