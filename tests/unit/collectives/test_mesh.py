"""Meshes: the exact bytes that each axis sends, steps that all ranks skip together, errors."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import optim
from zfun.collectives import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Permute,
    Reduce,
    ReduceScatter,
    barrier,
    start_reduce_scatter_over,
)
from zfun.errors import OptionError, PeerLost, PlacementError, SpecMismatch
from zfun.testing import assert_same_bits

INNER, OUTER = 3, 2
SIZE = INNER * OUTER


def recorded_step(
    group: zf.Group, stage: int, axis: str, *, secondary: bool, num_steps: int = 3
) -> Any:
    """Return the bytes of the parameters, and the messages and bytes of the last step by axis, kind
    and name.
    """
    mesh = zf.record(zf.split(group, inner=INNER))
    z = zf.zero(
        stage,
        models.mlp_loss,
        optim.adamw(0.05),
        mesh.inner if axis == "inner" else mesh,
        bucket_bytes=300,
        # No bucket stays for backward.
        schedule=zf.ScheduleOptions(secondary=secondary, reuse_distance=0 if stage == 3 else None),
    )
    state = z.init(models.mlp())
    psi = sum(bucket.padded_numel * 8 for bucket in state.params.layout.buckets)
    for batches in models.mlp_batches(num_steps, group.size):
        mesh.clear()
        state, _ = z.step(state, batches[group.rank])
    sent = [entry for entry in mesh.log if entry.name in ("params", "grads")]
    calls = Counter((entry.axis, entry.kind, entry.name) for entry in sent)
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for entry in sent:
        nbytes[entry.axis, entry.kind, entry.name] += entry.sent_bytes
    return psi, len(state.params.layout.buckets), {key: (calls[key], nbytes[key]) for key in calls}


def test_hybrid_sharding_sends_sums_of_shards_and_nothing_else_between_rows() -> None:
    for psi, buckets, sent in zf.simulate(SIZE, recorded_step, 3, "inner", secondary=False):
        once = psi * (INNER - 1) // INNER
        assert sent == {
            ("inner", "all_gather", "params"): (2 * buckets, 2 * once),
            ("inner", "reduce_scatter", "grads"): (buckets, once),
            # Two rows send each other their shards.
            ("outer", "all_reduce", "grads"): (buckets, psi // INNER),
        }


def test_a_secondary_shard_keeps_the_gathers_of_backward_inside_a_row() -> None:
    for psi, buckets, sent in zf.simulate(SIZE, recorded_step, 3, "all", secondary=True):
        once = psi * (INNER - 1) // INNER
        assert sent == {
            ("outer", "all_gather", "params"): (buckets, psi // SIZE * (OUTER - 1)),
            ("inner", "all_gather", "params"): (2 * buckets, 2 * once),
            ("inner", "reduce_scatter", "grads"): (buckets, once),
            ("outer", "reduce_scatter", "grads"): (buckets, psi // INNER * (OUTER - 1) // OUTER),
        }


def test_without_a_secondary_shard_gathers_cross_rows_twice() -> None:
    for psi, buckets, sent in zf.simulate(SIZE, recorded_step, 3, "all", secondary=False):
        assert sent["outer", "all_gather", "params"] == (
            2 * buckets,
            2 * (psi // SIZE) * (OUTER - 1),
        )
        assert sent["inner", "all_gather", "params"] == (
            2 * buckets,
            2 * psi * (INNER - 1) // INNER,
        )


@pytest.mark.parametrize(("stage", "axis"), [(1, "inner"), (2, "inner"), (2, "all")])
def test_stages_1_and_2_gather_updated_parameters_over_each_axis_once(
    stage: int, axis: str
) -> None:
    for psi, buckets, sent in zf.simulate(SIZE, recorded_step, stage, axis, secondary=False):
        once, shard = psi * (INNER - 1) // INNER, psi // INNER
        assert sent["inner", "reduce_scatter", "grads"] == (buckets, once)
        assert sent["inner", "all_gather", "params"] == (buckets, once)
        if axis == "inner":
            assert sent["outer", "all_reduce", "grads"] == (buckets, shard)
            assert ("outer", "all_gather", "params") not in sent
        else:
            assert sent["outer", "reduce_scatter", "grads"] == (
                buckets,
                shard * (OUTER - 1) // OUTER,
            )
            assert sent["outer", "all_gather", "params"] == (buckets, shard // OUTER * (OUTER - 1))


@pytest.mark.parametrize("numel", [2, 512, 513, 6000, 6001])
def test_an_all_reduce_crosses_between_rows_as_shards(numel: int) -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.record(zf.split(group, inner=INNER))
        mesh.start(Collective(AllReduce(), "x"), torch.ones(numel, dtype=torch.float64)).wait()
        steps = [(entry.axis, entry.kind, entry.numel) for entry in mesh.log]
        if numel <= 512:
            assert steps == [("inner", "all_reduce", numel), ("outer", "all_reduce", numel)]
        else:
            piece = -(-numel // INNER)
            assert steps == [
                ("inner", "reduce_scatter", piece * INNER),
                ("outer", "all_reduce", piece),
                ("inner", "all_gather", piece),
            ]
            assert mesh.bytes_sent(axis="outer") == piece * 8

    zf.simulate(SIZE, main)


def test_a_root_sends_once_to_every_row() -> None:
    def main(group: zf.Group) -> list[tuple[str, str]]:
        mesh = zf.record(zf.split(group, inner=INNER))
        mesh.start(Collective(Broadcast(3)), torch.ones(1)).wait()
        mesh.start(Collective(Reduce(3)), torch.ones(1)).wait()
        return [(entry.axis, entry.kind) for entry in mesh.log]

    # Rank 3 of the mesh is the second of the second row: rank 4 of the group.
    for rank, kinds in enumerate(zf.simulate(SIZE, main)):
        across = [
            ("outer", "broadcast"),
            ("inner", "broadcast"),
            ("inner", "reduce"),
            ("outer", "reduce"),
        ]
        assert kinds == (across if rank % INNER == 1 else across[1:3])


def test_subgroups_of_a_recorded_group_are_recorded() -> None:
    def main(group: zf.Group) -> None:
        recorded = zf.record(group)
        mesh = zf.split(recorded, inner=INNER)
        barrier(mesh)
        barrier(recorded)
        mesh.start(Collective(Permute(tuple(range(SIZE)))), torch.ones(1)).wait()
        assert [(entry.axis, entry.kind) for entry in recorded.log] == [
            ("outer", "all_gather"),
            ("inner", "all_gather"),
            ("", "all_gather"),
            ("", "permute"),
        ]

    zf.simulate(SIZE, main)


def test_the_secondary_shard_is_kept_for_backward_only() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.record(zf.split(group, inner=2))
        loss = zf.shard_params(models.mlp_loss, mesh, schedule=zf.ScheduleOptions(secondary=True))
        params = zf.shard(models.mlp(), mesh, bucket_bytes=300)
        vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss), mesh), mesh)
        batch = models.mlp_batches(1, 4)[0][group.rank]
        expected = vg(params, batch)
        # With other parameters in a later call, no gathered value of the first parameters remains.
        other = zf.shard(models.mlp(seed=2), mesh, bucket_bytes=300)
        plain = zf.shard_grads(
            zf.data_parallel(zf.value_and_grad(zf.shard_params(models.mlp_loss, mesh)), mesh), mesh
        )
        assert_same_bits(vg(other, batch)[1].buffers, plain(other, batch)[1].buffers)
        assert_same_bits(vg(params, batch)[1].buffers, expected[1].buffers)
        assert not torch.equal(
            zf.unshard(vg(other, batch)[1])["out"], zf.unshard(expected[1])["out"]
        )
        mesh.clear()
        with torch.no_grad():
            loss(params, batch)
        assert {entry.axis for entry in mesh.log if entry.name == "params"} == {"outer", "inner"}

    zf.simulate(4, main)


@pytest.mark.parametrize(
    ("stage", "axis"), [(0, "all"), (1, "inner"), (2, "all"), (3, "inner"), (3, "all")]
)
def test_every_rank_skips_and_norms_count_each_gradient_once(stage: int, axis: str) -> None:
    def main(group: zf.Group, on_mesh: bool) -> Any:
        mesh = zf.split(group, inner=2) if on_mesh else group
        over = mesh.inner if isinstance(mesh, zf.collectives.Mesh) and axis == "inner" else mesh
        z = zf.zero(
            stage,
            lambda p, b: models.mlp_loss(p, b[0]) + (p["h"][2]["b"] * b[1]).sum(),
            optim.adamw(0.05),
            over,
        )
        state = z.init(models.mlp())
        batch = models.mlp_batches(1, 4)[0][group.rank]
        poison = torch.full((5,), float("nan") if group.rank == 3 else 0.0, dtype=torch.float64)
        state, info = z.step(state, (batch, poison))
        assert (info.skipped, info.bad_leaf) == (True, "h.2.b")
        assert_same_bits(z.params(state), models.mlp())
        state, info = z.step(state, (batch, torch.zeros(5, dtype=torch.float64)))
        assert not info.skipped
        return info.grad_norm

    norms = zf.simulate(4, main, True)
    torch.testing.assert_close(norms[0], zf.simulate(4, main, False)[0], rtol=1e-14, atol=0.0)
    assert len({float(norm) for norm in norms}) == 1


def test_weighted_means_are_over_the_mesh() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.split(group, inner=2)
        loss_fn = lambda params, batch: zf.weighted_mean((params["w"] * batch).sum(), batch.numel())
        vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss_fn), mesh), mesh.inner)
        loss, grads = vg({"w": torch.tensor(2.0)}, torch.full((group.rank + 1,), float(group.rank)))
        # 0, 1 1, 2 2 2, 3 3 3 3: ten tokens, whose sum is 20.
        assert (float(loss), float(zf.unshard(grads)["w"])) == (4.0, 2.0)

    zf.simulate(4, main)


def test_parameters_that_differ_between_rows_are_found() -> None:
    def main(group: zf.Group, make: Any) -> None:
        mesh = zf.split(group, inner=2)
        # The two ranks of the second row agree with each other; only the columns see a difference.
        params = {"w": torch.full((3,), float(group.rank >= 2))}
        with pytest.raises(
            SpecMismatch, match=r"leaf w has other values: .* on ranks 0, 1 and .* on ranks 2, 3"
        ):
            make(params, mesh.inner)
        assert zf.unshard(make(params, mesh.inner, init="broadcast"))["w"].tolist() == [0.0] * 3

    for make in (zf.shard, zf.replicate):
        zf.simulate(4, main, make)


def test_repr_and_describe_name_the_axis_and_the_rank() -> None:
    def main(group: zf.Group) -> tuple[str, str, str]:
        mesh = zf.split(group, inner=2)
        params = zf.shard({"w": torch.ones(200)}, mesh.inner)
        return repr(params), str(zf.describe(params)), repr(mesh)

    text, table, mesh = zf.simulate(4, main)[3]
    assert (
        text == "Flat(S over the inner axis, rank 1 of 2: 1 leaf, 200 elements in 1 bucket; here "
        "128 of 256 padded elements)"
    )
    assert "w     200    float32  S (inner)  0       128:200  cpu" in table
    assert mesh == "<mesh: rank 3 of 4, 2 inner x 2 outer>"


def test_an_abstract_mesh_records_bytes_without_ranks() -> None:
    mesh = zf.record(zf.split(zf.collectives.abstract_group(4096, rank=17), inner=8))
    assert (mesh.rank, mesh.inner.size, mesh.outer.size) == (1 * 512 + 2, 8, 512)
    mesh.start(Collective(AllGather(), "params"), torch.empty(10, device="meta")).wait()
    assert mesh.bytes_sent(axis="outer") == 40 * 511
    assert mesh.bytes_sent(axis="inner") == 40 * 512 * 7


def test_an_error_in_one_row_ends_the_other_rows() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.split(group, inner=2)
        if group.rank == 3:
            raise ValueError("row 1 fails")
        barrier(mesh.outer)
        barrier(mesh.inner)

    with pytest.raises(ValueError, match="row 1 fails"):
        zf.simulate(4, main)

    def leaves(group: zf.Group) -> None:
        mesh = zf.split(group, inner=2)
        if group.rank != 3:
            barrier(mesh.inner)

    with pytest.raises(PeerLost, match=r"rank 3 returned"):
        zf.simulate(4, leaves)


def on_a_mesh(call: Any) -> Any:
    return zf.simulate(4, lambda group: call(zf.split(group, inner=2)))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda mesh: zf.data_parallel(zf.value_and_grad(models.mlp_loss), mesh.inner),
            PlacementError,
            "got the inner axis of a mesh",
        ),
        (
            lambda mesh: zf.transforms.replicate_grads(
                zf.data_parallel(zf.value_and_grad(models.mlp_loss), mesh), mesh.outer
            ),
            PlacementError,
            (
                r"replicate_grads\(\) takes the group of its gradients; got the outer axis of a "
                r"mesh; "
                r"pass the mesh itself"
            ),
        ),
        (
            lambda mesh: zf.shard(models.mlp(), mesh.outer),
            PlacementError,
            r"shard\(\) shards over a mesh or its inner axis",
        ),
        (
            lambda mesh: zf.shard_optimizer(optim.sgd(0.1), mesh.outer),
            PlacementError,
            "got its outer axis, which replicates",
        ),
        (
            lambda mesh: zf.shard_params(models.mlp_loss, mesh.outer),
            PlacementError,
            "pass mesh.inner",
        ),
        (
            lambda mesh: zf.shard_params(
                models.mlp_loss, mesh.inner, schedule=zf.ScheduleOptions(secondary=True)
            ),
            OptionError,
            "secondary=True gathers over the inner axis of a mesh; got <inner axis",
        ),
        (
            lambda mesh: zf.zero(
                2,
                models.mlp_loss,
                optim.sgd(0.1),
                mesh,
                schedule=zf.ScheduleOptions(secondary=True),
            ),
            OptionError,
            "which only stage 3 has",
        ),
        (lambda mesh: zf.split(mesh, inner=2), OptionError, "takes a group without axes"),
        (lambda mesh: zf.split(mesh.inner, inner=2), OptionError, "takes a group without axes"),
        (lambda mesh: zf.record(mesh.inner), OptionError, r"call zf.record\(mesh\)"),
        (
            lambda mesh: zf.collectives.Mesh(mesh.inner, mesh.outer),
            OptionError,
            "got an axis of another mesh",
        ),
        (
            lambda mesh: zf.redistribute(zf.replicate(models.mlp(), mesh), zf.P, mesh.inner),
            PlacementError,
            "partial over a whole mesh; got its inner axis",
        ),
    ],
)
def test_wrong_uses_of_a_mesh_are_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        on_a_mesh(call)


def test_wrong_groups_of_a_mesh_are_refused() -> None:
    with pytest.raises(OptionError, match="got 4 ranks and inner=3; use a divisor"):
        zf.simulate(4, zf.split, 3)
    with pytest.raises(
        OptionError,
        match=r"each of its ranks once, in ascending order; got \[\[0\], \[0, 1\]\] for 2 ranks",
    ):
        zf.simulate(2, lambda group: group.subgroup([[0], [0, 1]]))
    with pytest.raises(
        PlacementError,
        match=r"must be of one group; got two; .*, or the inner axis of a mesh and that mesh",
    ):
        zf.simulate(
            2,
            lambda group: zf.data_parallel(zf.value_and_grad(models.mlp_loss), group)(
                zf.shard(models.mlp(), zf.split(group, inner=2)),
                models.mlp_batches(1, 2)[0][group.rank],
            ),
        )

    def by_hand(group: zf.Group) -> None:
        mesh = zf.collectives.Mesh(
            group.subgroup([[0, 1], [2, 3]]), group.subgroup([[0, 2], [1, 3]])
        )
        mesh.start(Collective(Permute((0, 1, 2, 3))), torch.ones(1)).wait()

    with pytest.raises(OptionError, match="a permutation goes along no axis"):
        zf.simulate(4, by_hand)
    with pytest.raises(OptionError, match="has the ranks of the mesh, row after row"):
        zf.simulate(
            2, lambda group: zf.collectives.Mesh(group, zf.collectives.abstract_group(2), group)
        )


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("is_secondary", [False, True])
def test_ranks_of_a_mesh_may_diverge_while_forward_gathers_for_backward(
    prefetch: int, is_secondary: bool
) -> None:
    """A rank that has skipped a bucket still keeps a part of the bucket, because backward gathers
    from the parts of all ranks.
    """

    def main(group: zf.Group, *, sharded: bool) -> list[Any]:
        mesh, params, used = zf.split(group, inner=2), models.mlp(num_layers=5), [5]

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for layer in params["h"][: used[0] or 2]:
                x = torch.tanh(x @ layer["w"] + layer["b"])
            return (x @ params["out"]).pow(2).mean() if used[0] else x.pow(2).mean()

        value: Any = zf.shard(params, mesh, bucket_bytes=300) if sharded else params
        loss: Any = (
            zf.shard_params(
                loss_fn,
                mesh,
                schedule=zf.ScheduleOptions(prefetch=prefetch, secondary=is_secondary),
            )
            if sharded
            else loss_fn
        )
        vg = zf.data_parallel(zf.value_and_grad(loss), mesh, bucket_bytes=300)
        found = []
        for step, batches in enumerate(models.mlp_batches(4, group.size)):
            used[0] = {(1, 2): 2, (3, 2): 2, (1, 3): 2, (3, 3): 0}.get((group.rank, step), 5)
            out, grads = vg(value, batches[group.rank])
            found.append((out, zf.unshard(grads)))
        return found

    assert_same_bits(
        zf.simulate(4, functools.partial(main, sharded=True)),
        zf.simulate(4, functools.partial(main, sharded=False)),
    )


def test_a_sum_over_the_mesh_of_a_group_refuses_the_outer_axis_and_other_collectives() -> None:
    def main(group: zf.Group) -> None:
        mesh, x = zf.split(group, inner=2), torch.ones(4)
        with pytest.raises(PlacementError, match=r"got its outer axis.*pass mesh\.inner"):
            start_reduce_scatter_over(mesh.outer, Collective(ReduceScatter(), "grads"), x)
        with pytest.raises(OptionError, match="is for reduce_scatter; got all_gather"):
            start_reduce_scatter_over(mesh.inner, Collective(AllGather(), "grads"), x)

    zf.simulate(4, main)
