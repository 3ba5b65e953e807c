"""Named meshes: their groups, errors, and the kinds of groups that they divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests import models
from zfun import optim
from zfun.collectives import (
    AllReduce,
    Collective,
    abstract_group,
    axis_of,
    checked,
    gather_values,
    global_ranks,
    single_group,
    sum_group,
)
from zfun.errors import CollectiveMismatch, OptionError, PlacementError
from zfun.testing import assert_same_bits


def test_axes_are_named_and_one_group_is_made_for_each_choice() -> None:
    mesh = zf.mesh(abstract_group(24, rank=17), pp=2, dp=-1, tp=4)
    assert mesh.names == ("pp", "dp", "tp")
    assert mesh.shape == (2, 3, 4)
    assert mesh.sizes == {"pp": 2, "dp": 3, "tp": 4}
    assert mesh.coordinates == {"pp": 1, "dp": 1, "tp": 1}
    assert repr(mesh) == "<mesh: pp=2 x dp=3 x tp=4, this rank at pp=1, dp=1, tp=1>"
    assert repr(mesh["dp"]) == "<dp axis: rank 1 of 3>"
    assert repr(mesh["tp", "dp"]) == "<mesh: rank 4 of 12, 4 tp x 3 dp>"
    assert mesh["dp"] is mesh["dp",]
    assert mesh["dp", "tp"] is mesh["tp", "dp"]
    hybrid = mesh.group("tp", replicate=["dp"])
    assert hybrid is mesh.group("tp", replicate="dp")
    assert (axis_of(hybrid), sum_group(hybrid)) == ("tp", mesh["dp", "tp"])
    assert (axis_of(mesh["dp"]), sum_group(mesh["dp"])) == ("dp", mesh["dp"])
    assert list(global_ranks(mesh["tp"])) == [16, 17, 18, 19]
    assert list(global_ranks(mesh["dp"])) == [13, 17, 21]
    # In a group of several axes ranks count along the first one fastest.
    assert list(global_ranks(mesh["pp", "tp"])) == [4, 16, 5, 17, 6, 18, 7, 19]


def test_a_split_is_a_mesh_of_two_named_axes() -> None:
    def main(group: zf.Group) -> None:
        row, mesh = zf.split(group, inner=3), zf.mesh(group, outer=2, inner=3)
        both = mesh["outer", "inner"]
        assert (row.rank, repr(row)) == (both.rank, repr(both))
        x = torch.arange(12.0) * (group.rank + 1)
        call = Collective(AllReduce())
        assert_same_bits(row.start(call, x).wait(), both.start(call, x).wait())

    zf.simulate(6, main)


def test_axes_of_a_recorded_group_are_recorded() -> None:
    def main(group: zf.Group) -> None:
        recorded = zf.record(group)
        mesh, rank = zf.mesh(recorded, dp=2, tp=2), torch.tensor(group.rank)
        column = [group.rank % 2, group.rank % 2 + 2]
        assert gather_values(rank, mesh["dp"], "rank").tolist() == column
        assert gather_values(rank, mesh["dp", "tp"], "rank").tolist() == [0, 2, 1, 3]
        assert [entry.axis for entry in recorded.log] == ["dp", "dp", "tp"]

    zf.simulate(4, main)


def test_axes_of_a_checked_group_are_checked() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.mesh(checked(group), dp=2, tp=2)
        gather_values(torch.tensor(0), mesh["tp"], "first" if group.rank < 3 else "second")

    with pytest.raises(CollectiveMismatch, match=r"rank 0 started .*'first'.* rank 1 .*'second'"):
        zf.simulate(4, main)


def test_a_group_of_several_axes_is_recorded() -> None:
    def main(group: zf.Group) -> None:
        over = zf.record(zf.mesh(group, a=2, b=2, c=2)["a", "c"])
        gather_values(torch.zeros(10), over, "params")
        assert [(entry.axis, entry.sent_bytes) for entry in over.log] == [("a", 40), ("c", 80)]

    zf.simulate(8, main)


def test_a_mesh_of_one_rank() -> None:
    mesh = zf.mesh(single_group(), dp=1, tp=1)
    x = torch.arange(3.0)
    assert_same_bits(mesh["dp", "tp"].start(Collective(AllReduce()), x).wait(), x)
    z = zf.zero(3, models.mlp_loss, optim.sgd(0.1), mesh.group("tp", replicate="dp"))
    state, _ = z.step(z.init(models.mlp()), models.mlp_batches(1, 1)[0][0])
    assert int(z.params(state)["out"].numel()) == 5


def test_ranks_along_other_axes_skip_steps_of_their_own() -> None:
    """A gradient that is not finite skips the step of the ranks that sum it, and of no other."""

    def main(group: zf.Group) -> tuple[bool, bool]:
        mesh = zf.mesh(group, dp=2, tp=2)
        z = zf.zero(2, models.mlp_loss, optim.sgd(0.1), mesh["dp"])
        batch = models.mlp_batches(1, 4)[0][group.rank]
        state, info = z.step(z.init(models.mlp()), batch * float("nan" if group.rank == 1 else 1))
        is_same = torch.equal(z.params(state)["out"], models.mlp()["out"])
        return bool(info.skipped), is_same

    assert zf.simulate(4, main) == [(False, False), (True, True), (False, False), (True, True)]


MESH = zf.mesh(abstract_group(8), a=2, b=2, c=2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: MESH["x"], r"the axes of this mesh are a, b, c; got 'x'; use these"),
        (lambda: MESH["a", "a"], r"an axis is named once; got 'a' twice; leave one out"),
        (lambda: MESH[()], r"a group has at least one axis; got none; name one of a, b, c"),
        (lambda: MESH.group("b", replicate="b"), r"got 'b' twice"),
        (
            lambda: MESH.group("a", replicate="b"),
            r"axes that replicate stand before .*; got replicate=b for a of a, b, c; name them",
        ),
        (
            lambda: zf.mesh(abstract_group(8), a=3, b=2),
            r"sizes of the axes multiply to the number of ranks, .*; got a=3 x b=2 for 8 ranks; ch",
        ),
        (lambda: zf.mesh(abstract_group(8), a=-1, b=3), r"got a=-1 x b=3 for 8 ranks"),
        (lambda: zf.mesh(abstract_group(8), a=-1, b=-1), r"of which one may be -1; got a=-1 x b"),
        (lambda: zf.mesh(abstract_group(8)), r"at least one axis; got none; write zf\.mesh\(group"),
        (
            lambda: zf.mesh(abstract_group(8), a="2"),  # type: ignore[arg-type]
            r"size of axis 'a' must be .*; got '2'; write a=2",
        ),
        (lambda: zf.mesh(abstract_group(8), a=0), r"size of axis 'a' must be .*; got 0; write a=2"),
        (lambda: zf.mesh(MESH["a"], x=2), r"mesh\(\) takes a group without axes; got <a axis"),
        (lambda: zf.split(MESH["a", "b"], 2), r"split\(\) takes a group without axes; got <mesh"),
        (
            lambda: zf.zero(3, models.mlp_loss, optim.sgd(0.1), MESH),  # type: ignore[arg-type]
            r"group of zero\(\) must be a group .*; got <mesh: a=2 .*; pass some of its axes, such",
        ),
        (lambda: zf.record(MESH.group("c", replicate="a")), r"got the c axis alone"),
    ],
)
def test_wrong_axes_are_refused(call: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        call()


def test_values_over_different_axes_do_not_mix() -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.mesh(group, a=2, b=1, c=2)
        flat = zf.shard(models.mlp(), mesh["a"])
        with pytest.raises(PlacementError, match="must be given the group of the value"):
            zf.redistribute(flat, zf.R, mesh["c"])
        with pytest.raises(PlacementError, match="got the c axis of a mesh; pass the mesh itself"):
            zf.data_parallel(
                zf.value_and_grad(models.mlp_loss), mesh.group("c", replicate=["a", "b"])
            )

    zf.simulate(4, main)
