"""Programs of four ranks with DTensors on a mesh of two axes, for real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import zfun as zf
from zfun.errors import LeafError, OptionError, SpecMismatch
from zfun.interop.dtensor import from_dtensor, to_dtensor
from zfun.testing import assert_same_bits

LEAVES: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "cut twice": ((6, 10), [Shard(0), Shard(1)]),
    "cut unevenly": ((7, 5), [Shard(0), Shard(1)]),
    "columns": ((3, 9), [Replicate(), Shard(1)]),
    "rows": ((5,), [Shard(0), Replicate()]),
    "whole": ((4,), [Replicate(), Replicate()]),
    "rows of rows": ((9, 2), [Shard(0), Shard(0)]),
    "less than ranks": ((1, 3), [Shard(0), Shard(1)]),
}


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def whole_leaves() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in LEAVES.items()}


def placed_leaves(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the leaves as DTensors, with one plain tensor, and one leaf at two places."""
    placed: dict[str, Any] = {
        name: distribute_tensor(leaf, mesh, LEAVES[name][1], src_data_rank=None)
        for name, leaf in whole_leaves().items()
    }
    return {**placed, "plain": torch.arange(3.0), "tied": placed["columns"]}


def assert_placed_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, leaf in expected.items():
        if isinstance(leaf, DTensor):
            assert found[name].placements == leaf.placements, name
            assert (found[name].shape, found[name].stride()) == (leaf.shape, leaf.stride()), name
            assert_same_bits(found[name].to_local(), leaf.to_local(), name)
        else:
            assert_same_bits(found[name], leaf, name)


def there_and_back(group: zf.Group) -> Any:
    placed = placed_leaves(mesh_of_four())
    whole = {**whole_leaves(), "plain": placed["plain"], "tied": whole_leaves()["columns"]}
    for bucket_bytes in (64, 2**20):
        flat = zf.shard(from_dtensor(placed), group, bucket_bytes=bucket_bytes)
        gathered = zf.unshard(flat)
        assert_same_bits(gathered, whole)
        assert gathered["tied"] is gathered["columns"]
        for value in (flat, gathered):
            back = to_dtensor(value, placed)
            assert_placed_alike(back, placed)
            assert back["tied"] is back["columns"]
            assert back["columns"].to_local().data_ptr() != placed["columns"].to_local().data_ptr()
    return True


def loss_fn(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return torch.stack([(leaf.square() * batch).sum() for leaf in params.values()]).sum()


def beside_tensor_parallelism(group: zf.Group) -> Any:
    """Leaves stay cut along ``tp``, and zfun shards the parts of two ranks along ``dp``."""
    mesh = mesh_of_four()
    placed = placed_leaves(mesh)
    with zf.process_group(mesh, axis="dp") as over:
        zero = zf.zero(3, loss_fn, zf.optim.adam(0.1), over, bucket_bytes=64)
        state = zero.init(from_dtensor(placed, keep=("tp",)))
        for step in (1.0, 2.0):
            state, _ = zero.step(state, torch.tensor(step + over.rank))
        trained = to_dtensor(state.params, placed, keep=("tp",))
    leaves = {**whole_leaves(), "plain": placed["plain"]}
    alone = zf.zero(0, loss_fn, zf.optim.adam(0.1), zf.collectives.single_group())
    expected = alone.init(leaves)
    for step in (1.0, 2.0):
        expected, _ = alone.step(expected, torch.tensor(step + 0.5))
    for name, leaf in alone.params(expected).items():
        if name != "columns":  # which is tied, so the sum has two terms
            found = trained[name]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, leaf)
    assert trained["cut twice"].placements == (Shard(0), Shard(1))
    return True


def out_of_fsdp_and_into(group: zf.Group) -> Any:
    """Hybrid sharding of FSDP2: take the parameters over, train, and give them back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    apply = zf.functional(module)
    start = {name: leaf.detach().clone() for name, leaf in apply.params.items()}
    fully_shard(module, mesh=mesh)
    placed = dict(module.named_parameters())
    assert all(isinstance(leaf, DTensor) for leaf in placed.values())
    x = torch.randn(4, 5)
    zero = zf.zero(3, lambda params, x: apply(params, x).square().mean(), zf.optim.sgd(0.5), group)
    state = zero.init(from_dtensor(placed))
    assert_same_bits(zero.params(state), start)
    state, _ = zero.step(state, x)
    trained = zero.params(state)
    assert not torch.equal(trained["0.weight"], start["0.weight"])
    with torch.no_grad():
        for name, leaf in to_dtensor(state.params, placed).items():
            placed[name].copy_(leaf)
    torch.testing.assert_close(module(x), apply(trained, x))
    return True


def mistakes(group: zf.Group) -> Any:
    mesh = mesh_of_four()
    placed = placed_leaves(mesh)
    with pytest.raises(OptionError, match="got 'pp', and the mesh of leaf 'cut twice' has dp, tp"):
        from_dtensor(placed, keep=("pp",))
    flat = zf.shard(whole_leaves(), group)
    with pytest.raises(SpecMismatch, match=r"other leaves at \['plain', 'tied'\]"):
        to_dtensor(flat, placed)
    with pytest.raises(SpecMismatch, match=r"leaf 'cut twice' is torch.float32 \(6, 10\)"):
        to_dtensor(flat, {name: placed[name] for name in LEAVES}, keep=("tp",))
    partial = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()])
    with pytest.raises(LeafError, match=r"leaf 'w' has P.*\(sum\); redistribute\(\)"):
        from_dtensor({"w": partial}, keep=("tp",))
    # A partial leaf that is made whole is the sum.
    found = zf.unshard(zf.shard(from_dtensor({"w": partial}), group))
    assert_same_bits(found["w"], torch.full((2,), 2.0))
    return True
