"""Programs of a rank on a mesh of two rows, for simulated ranks and for real processes, which
import this module.
"""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zfun as zf
from tests import models
from tests.distributed.programs import branches
from zfun import optim
from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    axis_of,
    barrier,
    gather_json,
    gather_values,
)
from zfun.collectives.launch import _init as process
from zfun.collectives.shm import _rendezvous as rendezvous
from zfun.errors import CollectiveMismatch, PeerLost
from zfun.parallel import Cut, Held, ModelAxis, ParallelLoss
from zfun.testing import assert_same_bits


def collectives(group: zf.Group) -> Any:
    """Start every collective before the first wait; each rank waits in a different order."""
    mesh = zf.split(group, inner=2)
    rotation = tuple((rank + 1) % mesh.size for rank in range(mesh.size))
    ops = [
        AllGather(),
        ReduceScatter(),
        AllReduce(),
        Broadcast(1),
        Reduce(2),
        AllToAll(),
        Permute(rotation),
    ]
    generator = torch.Generator().manual_seed(group.rank)
    pending = []
    for numel in (0, mesh.size, 501 * mesh.size):
        for number, op in enumerate(ops):
            x = torch.randn(numel, generator=generator)
            pending.append(mesh.start(Collective(op, op.kind, str(numel), Stream(number % 3)), x))
    for handle in pending if group.rank % 2 else reversed(pending):
        handle.wait()
    return [handle.wait() for handle in pending]


def trained(group: zf.Group) -> Any:
    """Hybrid sharding, a secondary shard, and data parallelism over one mesh: the same bits."""
    found: list[Any] = []
    for stage, axis, secondary in (
        (0, "all", False),
        (2, "inner", False),
        (3, "inner", False),
        (3, "all", False),
        (3, "all", True),
    ):
        mesh = zf.record(zf.split(group, inner=2))
        over = mesh if axis == "all" else mesh.inner
        z = zf.zero(
            stage,
            models.mlp_loss,
            optim.adamw(0.05),
            over,
            bucket_bytes=300,
            schedule=zf.ScheduleOptions(secondary=secondary),
        )
        state, trace = z.init(models.mlp()), []
        for batches in models.mlp_batches(2, group.size):
            state, info = z.step(state, batches[group.rank])
            trace.append((info.loss, info.grad_norm))
        found.append((z.params(state), trace))
        assert_same_bits(found[-1], found[0], f"stage {stage} over {axis} and data parallelism")
    return found[0]


def over_named_axes(group: zf.Group) -> Any:
    """Collectives over each choice of axes of one mesh at once, and training over some of them."""
    mesh = zf.mesh(zf.record(group), a=2, b=1, c=2)
    generator = torch.Generator().manual_seed(group.rank)
    pending = []
    for numel in (4, 1202):
        for names in (("a",), ("a", "b", "c"), ("c",), ("b", "c")):
            for op in (AllGather(), AllReduce(), ReduceScatter(), AllToAll(), Broadcast(1)):
                x = torch.randn(numel * mesh[names].size, generator=generator)
                pending.append(mesh[names].start(Collective(op, op.kind, str(numel)), x))
    for handle in pending if group.rank % 2 else reversed(pending):
        handle.wait()
    results: list[Any] = [handle.wait() for handle in pending]
    for over in (mesh["c"], mesh["a", "c"], mesh.group("c", replicate="a")):
        z = zf.zero(3, models.mlp_loss, optim.adamw(0.05), over, bucket_bytes=300)
        state = z.init(models.mlp())
        for batches in models.mlp_batches(2, group.size):
            state, info = z.step(state, batches[group.rank])
            results.append(info.grad_norm)
        results.append(z.params(state))
    return results


def over_model_axes(group: zf.Group) -> Any:
    """A run whose leaves are cut over one axis and sharded over the other, and its checkpoint."""
    mesh = zf.mesh(group, dp=2, tp=2)
    rules = {"up": Cut(0), "down": Cut(1, (2, 4)), "first": Held((0,))}
    axis = ModelAxis(mesh["tp"], lambda path, leaf: rules.get(path))
    chance = torch.Generator().manual_seed(0)
    shapes = {"up": (8, 300), "down": (3, 6), "norm": (7,), "first": (40,)}
    params = {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}

    def loss_fn(held: Any, batch: torch.Tensor) -> torch.Tensor:
        terms = (((leaf - batch) ** 2).sum() for leaf in held.values() if leaf is not None)
        return sum(terms, torch.zeros(()))

    results: list[Any] = []
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))
    with tempfile.TemporaryDirectory() as folder:
        # All ranks save to the folder of the first one.
        shared = gather_json(folder, group, "folder")[0]
        for stage in (0, 1, 3):
            z = zf.zero(stage, ParallelLoss(loss_fn, [axis]), rule, mesh["dp"])
            state = z.init(params)
            for step in range(2):
                state, info = z.step(state, torch.tensor(1.0 + step + mesh.coordinates["dp"]))
                results.append(info.grad_norm)
            zf.save(f"{shared}/{stage}", state)
            state = zf.load(f"{shared}/{stage}", z.init(params)).state
            results.append(z.params(state))
        barrier(group)
    return results


def branching(group: zf.Group) -> Any:
    """Ranks of a mesh branch, so that some ranks ask for buckets while others still wait."""
    found: list[Any] = []
    mesh = zf.split(group, inner=2)
    batches = branches.batches_of(
        4,
        4,
        lambda step, rank, _: [
            (3 * rank + step * index) % 4 == 0 for index in range(branches.LAYERS)
        ],
    )
    for stage, over, prefetch in ((0, mesh, 1), (3, mesh, 0), (3, mesh, 2), (3, mesh.inner, 1)):
        z = zf.zero(
            stage,
            branches.returning_layers,
            optim.sgd(0.1),
            over,
            bucket_bytes=300,
            schedule=zf.ScheduleOptions(prefetch=prefetch),
        )
        state = z.init(models.mlp())
        for step in batches:
            state, _ = z.step(state, step[group.rank])
        found.append(z.params(state))
        assert_same_bits(
            found[-1], found[0], f"stage {stage} over {axis_of(over) or 'all'} and data parallelism"
        )
    return found[0]


def dies_in_a_row(group: zf.Group) -> None:
    """Rank 3 is killed while the other ranks of row 1 and column 1 wait."""
    mesh = zf.split(group, inner=2)
    barrier(mesh)
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    gather_values(torch.tensor(group.rank), mesh, "after")


def _on_two_hosts(group: zf.Group) -> zf.Group:
    """A group of the same ranks on two pretended hosts: the first two ranks, and the others."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (rendezvous, process):
            patch.setattr(module, "host_name", lambda: f"host {group.rank // 2}")
        return zf.process_group(dist.group.WORLD, timeout_s=20.0)


def over_two_hosts(group: zf.Group) -> Any:
    """Run collectives of many and few elements in all streams at once, waited for in different
    orders; train; and make a mesh whose rows are the hosts.
    """
    simulated = not dist.is_initialized()
    made = group if simulated else _on_two_hosts(group)
    assert simulated or type(made).__name__ == "HostsGroup"
    ops = [
        AllGather(),
        ReduceScatter(),
        AllReduce(),
        Broadcast(1),
        Reduce(2),
        AllToAll(),
        Permute((1, 2, 3, 0)),
    ]
    generator = torch.Generator().manual_seed(group.rank)
    pending = []
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (4, 10004):
            for number, op in enumerate(ops):
                x = torch.randn(numel, generator=generator).to(dtype)
                pending.append(
                    made.start(Collective(op, op.kind, str(numel), Stream(number % 3)), x)
                )
    for handle in pending if group.rank % 2 else reversed(pending):
        handle.wait()
    results: list[Any] = [handle.wait() for handle in pending]
    z = zf.zero(3, models.mlp_loss, optim.adamw(0.05), made)
    state = z.init(models.mlp(width=40))
    for batches in models.mlp_batches(2, group.size, width=40):
        state, info = z.step(state, batches[group.rank])
        results.append(info.grad_norm)
    results.append(z.params(state))
    mesh = zf.split(made, inner=2)
    results.append(
        mesh.start(Collective(AllReduce()), torch.randn(3001, generator=generator)).wait()
    )
    if not simulated:
        made.close()
    return results


def dies_on_a_host(group: zf.Group) -> None:
    """Rank 3 is killed while all ranks are in a hierarchical collective."""
    made = _on_two_hosts(group)
    barrier(made)
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    made.start(Collective(AllReduce(), "after"), torch.ones(5000)).wait()


def starts_something_else(group: zf.Group) -> str:
    """Rank 2 starts a collective under another name."""
    made = _on_two_hosts(group)
    try:
        made.start(
            Collective(AllGather(), "other" if group.rank == 2 else "same"), torch.ones(5000)
        ).wait()
    except (CollectiveMismatch, PeerLost) as error:
        return str(error)
    finally:
        made.close()
    return "nothing happened"
