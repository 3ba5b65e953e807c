"""Paths name the fields of namedtuples and dataclasses."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import pytest
import torch

import zfun as zf
from zfun import tree
from zfun.errors import SpecMismatch


class Block(NamedTuple):
    w: Any
    b: Any


@dataclasses.dataclass
class Pair:
    name: str
    left: Any
    right: Any


@dataclasses.dataclass
class Wrapped:
    inside: dict[str, Any]


tree.register(Pair, lambda p: ((p.left, p.right), p.name), lambda name, xs: Pair(name, *xs))
tree.register(
    Wrapped,
    lambda w: (list(w.inside.values()), tuple(w.inside)),
    lambda k, v: Wrapped(dict(zip(k, v, strict=True))),
)


def test_fields_have_names_and_places_of_lists_and_tuples_have_numbers() -> None:
    value = {"h": [Block(1, (2, 3)), Block(4, None)], "out": Block({"x": 5}, 6)}
    assert tree.paths(value) == ["h.0.w", "h.0.b.0", "h.0.b.1", "h.1.w", "out.w.x", "out.b"]
    assert tree.paths(value, is_leaf=lambda x: isinstance(x, Block)) == ["h.0", "h.1", "out"]
    assert tree.paths(time.gmtime(0))[:2] == ["tm_year", "tm_mon"]


def test_fields_of_a_dataclass_have_names_where_each_child_is_a_field() -> None:
    shared = [1]
    assert tree.paths([Pair("p", {"x": 1}, 2)]) == ["0.left.x", "0.right"]
    assert tree.paths(Pair("p", shared, shared)) == ["left.0", "right.0"]
    assert tree.paths(Wrapped({"a": 1, "b": [2]})) == ["0", "1.0"]
    moved = tree.map(lambda x: x + 1, Pair("p", 1, (2, 3)))
    assert moved == Pair("p", 2, (3, 4))


@pytest.mark.parametrize("stage", range(4))
def test_a_description_of_a_whole_state_names_the_fields(stage: int) -> None:
    def main(group: zf.Group) -> list[str]:
        params = {"h1": {"w": torch.ones(3), "b": torch.ones(1)}}
        loss = lambda p, x: (p["h1"]["w"] * x).sum() + p["h1"]["b"].sum()
        zero = zf.zero(stage, loss, zf.optim.adam(0.1), group)
        return [row.path for row in zf.describe(zero.init(params)).rows]

    for found in zf.simulate(2, main):
        assert [path for path in found if path.endswith("b")] == [
            "params.h1.b",
            "opt_state.mu.h1.b",
            "opt_state.nu.h1.b",
        ]


def test_an_error_names_the_field_of_a_leaf() -> None:
    def main(group: zf.Group) -> Any:
        return zf.shard(Block(torch.ones(2 + group.rank), torch.ones(1)), group)

    with pytest.raises(SpecMismatch, match=r"leaf w is torch.float32 \(2,\) on rank 0") as caught:
        zf.simulate(2, main)
    assert caught.value.leaf == "w"


def test_a_predicate_gets_the_field_of_a_leaf() -> None:
    trained, frozen = tree.partition(Block(1, 2), lambda path, leaf: path == "b")
    assert (trained, frozen) == (Block(None, 2), Block(1, None))
