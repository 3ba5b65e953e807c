"""Programs of one rank that run on simulated ranks and on processes, which import this module.

Each program takes a group and returns a tree of tensors and numbers with the same bits everywhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.collectives import Collective, ReduceScatter, Stream
from zfun.errors import (
    AliasChanged,
    DonatedStateError,
    LeafError,
    NonFiniteError,
    PlacementError,
    SpecMismatch,
)
from zfun.testing import (
    Composition,
    assert_padding,
    assert_redistribution,
    assert_round_trip,
    assert_same_bits,
    same_bits,
    train,
)

CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.05, momentum=0.9))

COMPOSITIONS = [
    Composition(),
    Composition(flat=True, donate=True),
    Composition(grads=("shard_grads",)),
    Composition(grads=("replicate_grads",), flat=True, donate=True),
    Composition(optimizer=("shard_optimizer",)),
    Composition(loss=("shard_params",)),
    Composition(
        loss=("shard_params",), grads=("shard_grads",), optimizer=("shard_optimizer",), donate=True
    ),
    Composition(
        loss=("offload", "shard_params"),
        grads=("offload", "shard_grads"),
        optimizer=("shard_optimizer", "offload"),
        donate=True,
    ),
    Composition(
        loss=("shard_params", "offload"),
        grads=("shard_grads", "offload"),
        optimizer=("offload", "shard_optimizer"),
    ),
]


def compositions_agree(group: zf.Group) -> Any:
    batches = models.mlp_batches(3, group.size)
    first: Any = None
    for turn, composition in enumerate(COMPOSITIONS):
        bucket_bytes = (1, 300, 2**20)[turn % 3]
        run = train(
            composition,
            group,
            models.mlp_loss,
            CLIPPED,
            models.mlp(),
            batches,
            bucket_bytes=bucket_bytes,
        )
        assert_padding(run.final)
        first = run[:2] if first is None else first
        assert_same_bits(run[:2], first, f"{composition} and {COMPOSITIONS[0]}")
    return first


def micro_batches(group: zf.Group) -> Any:
    batches = models.mlp_batches(2, group.size, rows=6)
    results = []
    for grads in (("accumulate", "shard_grads"), ("shard_grads", "accumulate")):
        composition = Composition(("shard_params",), grads, ("shard_optimizer",))
        results.append(
            train(
                composition,
                group,
                models.mlp_loss,
                optim.adamw(0.05),
                models.mlp(),
                batches,
                num_micro_batches=3,
            )[:2]
        )
    return results


def stages_agree(group: zf.Group) -> Any:
    found: list[Any] = []
    for stage in (0, 1, 2, 3):
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.05), group, bucket_bytes=300)
        state, trace = z.init(models.mlp()), []
        for batches in models.mlp_batches(3, group.size):
            state, info = z.step(state, batches[group.rank])
            trace.append((info.loss, info.grad_norm))
        found.append((z.params(state), trace))
        assert_same_bits(found[-1], found[0], f"stages {stage} and 0")
    return found[0]


def mixed_tree() -> Any:
    g = torch.Generator().manual_seed(5)
    tied = torch.randn(7, 3, generator=g)
    return {
        "half": torch.randn(5, generator=g).to(torch.bfloat16),
        "tied": [tied, tied],
        "scalar": torch.randn((), generator=g, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "complex": torch.randn(3, 2, generator=g, dtype=torch.complex64),
        "strided": torch.randn(4, 6, generator=g).t()[1::2],
        "one": torch.randn(3, generator=g)[1::2],
    }


def any_dtype_and_shape(group: zf.Group) -> Any:
    assert_round_trip(mixed_tree(), group, bucket_bytes=64)
    flat = zf.shard(mixed_tree(), group, bucket_bytes=64)
    assert_redistribution(flat, [zf.R, zf.P, zf.S, zf.P, zf.R])
    batches = models.tree_batches(2, group.size, 3)
    runs = [
        train(
            composition,
            group,
            models.tree_loss,
            optim.adam(0.1, eps=1e-3),
            mixed_tree(),
            batches,
            bucket_bytes=64,
        )[:2]
        for composition in (Composition(), COMPOSITIONS[5])
    ]
    assert_same_bits(runs[0], runs[1])
    return runs[0]


def compressed(group: zf.Group) -> Any:
    """Compressed communication: stages 0 and 3, micro-batches, error feedback, collectives."""
    found: list[Any] = []
    for stage in (0, 3):
        feedback = zf.compression.error_feedback(reset=3)
        grads, params = (
            zf.compression.int4(block=32, feedback=feedback),
            zf.compression.int8(block=32) if stage == 3 else None,
        )
        z = zf.zero(
            stage,
            models.mlp_loss,
            optim.adamw(0.05),
            group,
            bucket_bytes=300,
            compression=zf.compression.Compression(grads=grads, params=params),
        )
        state = z.init(models.mlp())
        for batches in models.mlp_batches(4, group.size):
            state, _ = z.step(state, batches[group.rank])
        kept = feedback.kept(group.rank)
        assert len(kept) > 2
        # The keys are the same on all ranks; the errors differ from rank to rank.
        mine = torch.cat([kept[place].double().view(-1) for place in sorted(kept)])
        found.append((z.params(state), sorted(kept), zf.collectives.all_reduce(mine, group)))
    x = torch.linspace(-1, 1, 64 * group.size) * (group.rank + 1)
    for fn in (zf.compression.all_gather, zf.compression.reduce_scatter, zf.compression.all_reduce):
        part = fn(x, group, zf.compression.int4(block=10))
        found.append(zf.collectives.all_gather(part, group))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        worker = server = None
        for numel in (0, 5, 1001, 1001):
            terms = torch.linspace(-1, 1, numel).to(dtype) * (group.rank + 1)
            if worker is not None and worker.numel() != numel:
                worker = server = None
            mean, worker, server = zf.compression.compressed_all_reduce(
                terms, worker, server, group
            )
            found.append((mean, zf.collectives.all_reduce(worker, group), server.square().sum()))
    return found


def frozen_leaves(group: zf.Group) -> Any:
    found: list[Any] = []
    for stage in (0, 3):
        z = zf.zero(
            stage,
            models.mlp_loss,
            optim.adamw(0.05),
            group,
            bucket_bytes=300,
            trainable=lambda path, _: path.startswith("h.1"),
        )
        state = z.init(models.mlp())
        for batches in models.mlp_batches(2, group.size):
            state, _ = z.step(state, batches[group.rank])
        found.append(z.params(state))
    assert_same_bits(*found)
    return found[0]


def another_branch(group: zf.Group) -> Any:
    """Rank 1 skips a block."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(params["h"]):
            if group.rank != 1 or i != 1:
                x = torch.tanh(x @ layer["w"] + layer["b"])
        return (x @ params["out"]).pow(2).mean()

    found: list[Any] = []
    for stage in (0, 1, 2, 3):
        z = zf.zero(stage, loss_fn, optim.sgd(0.05), group, bucket_bytes=300)
        state = z.init(models.mlp())
        for batches in models.mlp_batches(2, group.size):
            state, _ = z.step(state, batches[group.rank])
        found.append(z.params(state))
        assert_same_bits(found[-1], found[0])
    return found[0]


def any_schedule(group: zf.Group) -> Any:
    """Try every schedule option on a loss that reuses a block; the last rank diverges in step 3."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = [*params["h"], params["h"][0]]
        for layer in layers[1:3] if step == 2 and group.rank == group.size - 1 else layers:
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return (x @ params["out"]).pow(2).mean()

    found: list[Any] = []
    schedules = [
        zf.ScheduleOptions(),
        zf.ScheduleOptions(prefetch=3),
        zf.ScheduleOptions(prefetch=0, max_live=192),
    ]
    schedules += [
        zf.ScheduleOptions(reuse_distance=10**9),
        zf.ScheduleOptions(persistence=5, reuse_distance=1),
    ]
    for options in schedules:
        z = zf.zero(3, loss_fn, optim.adamw(0.05), group, bucket_bytes=300, schedule=options)
        state = z.init(models.mlp())
        for step, batches in enumerate(models.mlp_batches(3, group.size)):  # noqa: B007, the loss reads it
            state, _ = z.step(state, batches[group.rank])
        found.append(z.params(state))
        assert_same_bits(found[-1], found[0], f"{options} and the usual schedule")
    return found[0]


def watched_step(group: zf.Group) -> Any:
    z = zf.zero(3, models.mlp_loss, optim.adamw(0.05), group, bucket_bytes=300)
    state = z.init(models.mlp())
    for batches in models.mlp_batches(2, group.size):
        state, _ = z.step(state, batches[group.rank])
    with zf.planner.profile() as found:
        state, _ = z.step(state, models.mlp_batches(1, group.size)[0][group.rank])
    trace = zf.planner.trace(
        models.mlp_loss, models.mlp(), models.mlp_batches(1, 1)[0][0], group.size, bucket_bytes=300
    )
    assert found.steps() == zf.planner.schedule(trace).steps
    assert all(event.start <= event.end <= found.now() for event in found.events)
    return (
        z.params(state),
        [event.live_bytes for event in found.events],
        [event.bucket for event in found.events],
    )


def token_means(group: zf.Group) -> Any:
    """Give the ranks unequal numbers of tokens."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x, mask = batch
        per_token = torch.tanh(x @ params["h"][0]["w"]).sum(1)
        return zf.weighted_mean((per_token * mask).sum(), mask.sum())

    x = models.mlp_batches(1, group.size, rows=6)[0][group.rank]
    mask = (torch.arange(6) <= group.rank * 2).double()
    vg = zf.shard_grads(
        zf.accumulate(zf.data_parallel(zf.value_and_grad(loss_fn), group), 2), group
    )
    loss, grads = vg(models.mlp(), (x, mask + 0.5))
    return loss.mean, loss.weight, zf.unshard(grads)


def bytes_of_steps(group: zf.Group) -> Any:
    counts = []
    for stage in (0, 1, 2, 3):
        recorded = zf.record(group)
        # Nothing stays for backward, so that stage 3 sends 3Ψ.
        schedule = zf.ScheduleOptions(reuse_distance=0) if stage == 3 else None
        rule = optim.adamw(0.05)
        z = zf.zero(stage, models.mlp_loss, rule, recorded, bucket_bytes=300, schedule=schedule)
        state = z.init(models.mlp())
        psi = sum(bucket.padded_numel * 8 for bucket in state.params.layout.buckets)
        for batches in models.mlp_batches(2, group.size):
            recorded.clear()
            state, _ = z.step(state, batches[group.rank])
            sent = recorded.bytes_sent("params") + recorded.bytes_sent("grads")
            assert sent == (3 if stage == 3 else 2) * psi * (group.size - 1) // group.size
            counts.append(sent)
    return counts


def nan_on_one_rank(group: zf.Group) -> Any:
    results: list[Any] = []
    for stage in (0, 1, 2, 3):
        z = zf.zero(
            stage,
            lambda p, b: models.mlp_loss(p, b[0]) + (p["h"][2]["b"] * b[1]).sum(),
            optim.adamw(0.05),
            group,
            max_skipped=2,
        )
        state = z.init(models.mlp())
        batch = models.mlp_batches(1, group.size)[0][group.rank]
        poison = torch.full(
            (5,), float("nan") if group.rank == group.size - 1 else 0.0, dtype=torch.float64
        )
        state, info = z.step(state, (batch, poison))
        assert info.skipped
        assert info.bad_leaf == "h.2.b"
        assert_same_bits(z.params(state), models.mlp())
        try:
            z.step(state, (batch, poison))
        except NonFiniteError as error:
            results.append(str(error))
        else:
            raise AssertionError("the second step in a row was skipped without a word")
        state, info = z.step(state, (batch, torch.zeros(5, dtype=torch.float64)))
        assert not info.skipped
        results.append((info.loss, z.params(state)))
    return results


def functional_derivatives(group: zf.Group) -> Any:
    flat = zf.shard(models.mlp(), group, bucket_bytes=300)
    x = models.mlp_batches(1, 1)[0][0]
    results = []
    for loss in (
        lambda p, b: models.mlp_loss(zf.gather(p), b) / group.size,
        zf.shard_params(lambda p, b: models.mlp_loss(p, b) / group.size, group),
    ):
        per_sample = vmap(grad(loss), in_dims=(None, 0))(flat, x[:, None])  # pyrefly: ignore[bad-argument-type]
        tangent = zf.shard(models.mlp(seed=4), group, bucket_bytes=300)
        _, product = jvp(lambda p, loss=loss: grad(loss)(p, x), (flat,), (tangent,))  # pyrefly: ignore[bad-argument-type, bad-unpacking]
        results.append(
            (
                [
                    zf.unshard(
                        per_sample.with_buffers(b[i].contiguous() for b in per_sample.buffers)
                    )
                    for i in range(4)
                ],
                zf.unshard(product),
            )
        )
    expected = jvp(lambda p: grad(models.mlp_loss)(p, x), (models.mlp(),), (models.mlp(seed=4),))[1]
    for found in results:
        for a, b in zip(tree.leaves(found[1]), tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    return results


def recomputed(group: zf.Group) -> Any:
    """Recompute blocks at every stage, on ranks that diverge; and keep activations in parts."""

    def block(layer: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ layer["w"] + layer["b"])

    def loss_of(run: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            x, rank = batch
            for i, layer in enumerate(params["h"]):
                x = x if i == 1 and rank == 1 else run(layer, x)
            return (x @ params["out"]).pow(2).mean()

        return loss_fn

    def trained(stage: int, run: Any, batches: Any, rank: int) -> Any:
        z = zf.zero(
            stage, loss_of(run), optim.adamw(0.05), group, bucket_bytes=300, num_micro_batches=2
        )
        state = z.init(models.mlp())
        for step in batches:
            state, _ = z.step(state, (step[rank], rank))
        return z.params(state)

    own = models.mlp_batches(2, group.size)
    for stage in (0, 2, 3):
        expected = trained(stage, block, own, group.rank)
        for policy in (zf.policies.nothing, zf.policies.matmuls):
            found = trained(
                stage, zf.remat(block, policy=policy, store=zf.stores.host()), own, group.rank
            )
            assert_same_bits(found, expected, f"stage {stage} with and without remat()")
    # All ranks hold the same activations.
    expected = trained(3, block, own, 0)
    recorded = zf.record(group)
    assert_same_bits(trained(3, zf.remat(block, shard_over=recorded), own, 0), expected)
    assert recorded.bytes_sent("activations") > 0
    return expected


def random_numbers(group: zf.Group) -> Any:
    """The default generator belongs to the rank: initial weights, dropout and draws agree."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).pow(2).mean()

    torch.manual_seed(group.rank)
    trained = []
    for stage in (0, 3):
        z = zf.zero(stage, loss_fn, optim.adamw(0.05), group, bucket_bytes=64)
        state = z.init({name: leaf.detach() for name, leaf in model.named_parameters()})
        for _ in range(2):
            state, info = z.step(state, torch.rand(3, 4))
        trained.append((z.params(state), info.loss))
    return trained, torch.rand(2)


def values_differ(group: zf.Group) -> Any:
    params = models.mlp()
    if group.rank == 1:
        params["h"][0]["b"][0] += 1.0
    texts = []
    for make in (zf.shard, zf.replicate):
        try:
            make(params, group)
        except SpecMismatch as error:
            texts.append(str(error))
    assert len(texts) == 2
    # The error leaves the group usable.
    return *texts, zf.unshard(zf.shard(params, group, init="broadcast"))


def errors_are_local(group: zf.Group) -> Any:
    """A mistake that all ranks make raises on every rank and leaves the group usable."""
    texts = []
    z = zf.zero(3, models.mlp_loss, optim.adamw(0.05), group)
    old = z.init(models.mlp())
    new, _ = z.step(old, models.mlp_batches(1, group.size)[0][group.rank])
    layout = zf.shard({"a": (w := torch.ones(2)), "b": w}, group).layout
    for call, kind in (
        (lambda: z.params(old), DonatedStateError),
        (lambda: zf.shard_params(models.mlp_loss, group)(models.mlp(), None), PlacementError),
        (
            lambda: zf.flat.ravel({"a": torch.ones(2), "b": torch.ones(2)}, layout, group),
            AliasChanged,
        ),
    ):
        try:
            call()
        except kind as error:
            texts.append(type(error).__name__)
    assert len(texts) == 3
    return texts, z.params(new)


class _Refuses(torch.autograd.Function):
    """The identity in forward, and an error in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("backward")


def goes_on_after_an_error(group: zf.Group) -> Any:
    """Raise on every rank while gathers and reductions are in flight, and call the loss again."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, where = batch
        for index, layer in enumerate(params["h"]):
            if where == index:
                raise ArithmeticError("forward")
            x = torch.tanh(x @ layer["w"] + layer["b"])
            x = _Refuses.apply(x) if where == ~index else x
        return (x @ params["out"]).pow(2).mean()

    found: list[Any] = []
    for stage in (0, 2, 3):
        z = zf.zero(
            stage,
            loss_fn,
            optim.adamw(0.05),
            group,
            bucket_bytes=300,
            schedule=zf.ScheduleOptions(prefetch=2),
        )
        state = z.init(models.mlp())
        for batches in models.mlp_batches(3, group.size):
            for where in (1, ~1, ~3):
                with pytest.raises(ArithmeticError, match="forward" if where > 0 else "backward"):
                    z.step(state, (batches[group.rank], where))
            state, _ = z.step(state, (batches[group.rank], 99))
        found.append(z.params(state))
        assert_same_bits(found[-1], found[0], f"stages {stage} and 0")
    z = zf.zero(0, models.mlp_loss, optim.adamw(0.05), group)
    state = z.init(models.mlp())
    for batches in models.mlp_batches(3, group.size):
        state, _ = z.step(state, batches[group.rank])
    assert_same_bits(found[0], z.params(state), "with and without errors")
    return found[0]


def offloaded_to_a_disk(group: zf.Group) -> Any:
    """Each rank keeps all parts in a file of its own, in blocks smaller than a bucket."""

    def run(offload: zf.stores.Offload | None) -> Any:
        z = zf.zero(
            3,
            models.mlp_loss,
            optim.adamw(0.05),
            group,
            bucket_bytes=9000,
            num_micro_batches=2,
            offload=offload,
        )
        state = z.init(models.mlp())
        for batches in models.mlp_batches(3, group.size, rows=4):
            state, _ = z.step(state, batches[group.rank])
        return z.params(state)

    with tempfile.TemporaryDirectory() as path:
        store = zf.stores.nvme(path, block_size=4096, queue_depth=1, num_threads=2)
        found = run(zf.stores.Offload(params=store, grads=store, optimizer=store))
        assert len(list(Path(path).iterdir())) == 1
        store.close()
    assert_same_bits(found, run(None))
    return found


def starts_leaf_by_leaf(group: zf.Group) -> Any:
    """Start from deferred leaves, and from ones that a rank cannot make; move the state around."""
    params = models.mlp()
    values = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    lazy = zf.sources.initialised(params, lambda path, spec: values[path].clone())
    found = []
    for stage in range(4):
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.05), group, bucket_bytes=300)
        for init in ("check", "broadcast"):
            state = z.init(lazy, init=init)
            store = zf.stores.host()
            state = zf.stores.reload(zf.offload(state, store), store)
            for batches in models.mlp_batches(2, group.size):
                state, _ = z.step(state, batches[group.rank])
            found.append(z.params(state))
            some = z.params(state, lambda path, leaf: path == "out")
            assert_same_bits(some["out"], found[-1]["out"])
        is_bad = lambda path: path == "out" and group.rank == 1
        bad = zf.sources.initialised(
            params, lambda path, spec: torch.ones(1) if is_bad(path) else values[path].clone()
        )
        with pytest.raises((LeafError, SpecMismatch)):
            z.init(bad)
    return found


BODIES = [
    starts_leaf_by_leaf,
    compositions_agree,
    micro_batches,
    offloaded_to_a_disk,
    stages_agree,
    any_dtype_and_shape,
    frozen_leaves,
    compressed,
    another_branch,
    any_schedule,
    watched_step,
    token_means,
    bytes_of_steps,
    nan_on_one_rank,
    functional_derivatives,
    recomputed,
    random_numbers,
    values_differ,
    errors_are_local,
    goes_on_after_an_error,
]


def compiled(group: zf.Group) -> Any:
    """Compile blocks; for processes only, because threads must not compile at the same time."""

    def block(layer: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ layer["w"] + layer["b"])

    whole = torch.compile(block, fullgraph=True, backend="aot_eager")
    gathered = lambda layer, x: whole(zf.gather(layer), x)

    def trained(stage: int, run: Any) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for layer in params["h"]:
                x = run(layer, x)
            return (x @ params["out"]).pow(2).mean()

        z = zf.zero(stage, loss_fn, optim.adamw(0.05), group, bucket_bytes=300)
        state = z.init(models.mlp())
        for batches in models.mlp_batches(3, group.size):
            state, _ = z.step(state, batches[group.rank])
        return z.params(state)

    expected = trained(0, block)
    for stage in (0, 1, 2, 3):
        for run in (gathered, zf.remat(gathered)):
            assert_same_bits(
                trained(stage, run), expected, f"stage {stage} with and without a compiled block"
            )
    return expected


# Programs in which one rank fails.


def raises_in_the_loss(group: zf.Group) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        if group.rank == 1 and step == 1:
            raise ValueError("bad batch in shard 7")
        return models.mlp_loss(params, x)

    z = zf.zero(3, loss_fn, optim.adamw(0.05), group, bucket_bytes=300)
    state = z.init(models.mlp())
    for step, batches in enumerate(models.mlp_batches(2, group.size)):  # noqa: B007, the loss reads it
        state, _ = z.step(state, batches[group.rank])


def starts_another_collective(group: zf.Group) -> None:
    """Rank 1 starts another collective than the other ranks."""
    z = zf.zero(2, models.mlp_loss, optim.adamw(0.05), group)
    state = z.init(models.mlp())
    if group.rank == 1:
        group.start(
            Collective(ReduceScatter(), "grads", "by hand", Stream.GRADS),
            torch.ones(32 * group.size),
        ).wait()
    z.step(state, models.mlp_batches(1, group.size)[0][group.rank])
    assert not same_bits(z.params(state), models.mlp())
