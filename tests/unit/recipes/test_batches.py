"""Batches of a user's data loader: split in micro-batches, cast, and kept in their class."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zfun as zf
from zfun import planner, tree
from zfun.errors import LeafError, OptionError
from zfun.testing import assert_same_bits
from zfun.transforms import MicroBatches

PARAMS = {"w": torch.tensor([0.5, -1.0, 2.0])}
X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([1.0, 0.0, 2.0, 5.0])


@dataclasses.dataclass(frozen=True)
class Rows:
    x: Tensor
    y: Tensor
    name: str = "rows"


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class TaggedPair(Pair):
    def __new__(cls, x: Tensor) -> TaggedPair:
        return super().__new__(cls, x, torch.empty(0))


class Record(dict[str, Any]):
    pass


class Attributes(collections.UserDict[str, Any]):
    """Like ``BatchEncoding``: a dict with attribute access, made with another argument too."""

    def __init__(self, data: dict[str, Any], *, source: str) -> None:
        super().__init__(data)
        self.source = source

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def x_of(batch: Any) -> Tensor:
    return batch["x"] if isinstance(batch, Mapping) else batch.x


def y_of(batch: Any) -> Tensor:
    return batch["y"] if isinstance(batch, Mapping) else batch.y


def loss_fn(params: Any, batch: Any) -> Tensor:
    return (x_of(batch) @ params["w"] - y_of(batch)).square().mean()


BATCHES = {
    "dict": {"x": X, "y": Y},
    "dataclass": Rows(X, Y),
    "namedtuple": Pair(X, Y),
    "subclass of a namedtuple": TaggedPair(X)._replace(y=Y),
    "subclass of dict": Record(x=X, y=Y),
    "UserDict": collections.UserDict(x=X, y=Y),
    "UserDict with attributes": Attributes({"x": X, "y": Y}, source="here"),
    "mapping that cannot change": types.MappingProxyType({"x": X, "y": Y}),
}


def seen_by(loss: Any, seen: list[Any]) -> Any:
    def noted(params: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return loss(params, batch)

    return noted


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_micro_batch_is_a_part_and_of_the_class_of_the_batch(batch: Any) -> None:
    seen: list[Any] = []
    found = zf.accumulate(zf.value_and_grad(seen_by(loss_fn, seen)), 2)(PARAMS, batch)
    assert [type(part) for part in seen] == [type(batch)] * 2
    assert_same_bits([(x_of(part), y_of(part)) for part in seen], [(X[:2], Y[:2]), (X[2:], Y[2:])])
    assert_same_bits((x_of(batch), y_of(batch)), (X, Y))
    expected = zf.accumulate(zf.value_and_grad(loss_fn), 2)(PARAMS, {"x": X, "y": Y})
    assert_same_bits(found, expected)


def test_a_micro_batch_keeps_values_that_are_no_tensors() -> None:
    seen: list[Any] = []
    vg = zf.accumulate(zf.value_and_grad(seen_by(loss_fn, seen)), 2)
    vg(PARAMS, Attributes({"x": X, "y": Y}, source="here"))
    vg(PARAMS, Rows(X, Y, "named"))
    assert [part.source for part in seen[:2]] == ["here"] * 2
    assert [part.name for part in seen[2:]] == ["named"] * 2


def test_nodes_of_a_batch_may_be_nested() -> None:
    seen: list[Any] = []

    def nested(params: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return loss_fn(params, batch["rows"][0].inner)

    @dataclasses.dataclass
    class Outer:
        inner: Any

    batch = collections.UserDict(rows=(Outer(Pair(X, Y)), None), k=3)
    zf.accumulate(zf.value_and_grad(nested), 4)(PARAMS, batch)
    assert [part["k"] for part in seen] == [3] * 4
    assert_same_bits([part["rows"][0].inner.y for part in seen], list(Y.split(1)))


def test_a_tokenizers_batch_is_split_and_cast() -> None:
    transformers = pytest.importorskip("transformers")
    seen: list[Any] = []

    def scores(params: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return (params["w"][batch.input_ids] * batch.weights).mean()

    batch = transformers.BatchEncoding(
        {"input_ids": torch.tensor([[0, 1], [2, 0], [1, 1], [2, 2]]), "weights": torch.ones(4, 2)}
    )

    def main(group: zf.Group) -> None:
        z = zf.zero(
            3, scores, zf.optim.sgd(0.1), group, precision=torch.bfloat16, num_micro_batches=2
        )
        z.step(z.init(PARAMS), batch)

    zf.simulate(1, main)
    assert [type(part) for part in seen] == [transformers.BatchEncoding] * 2
    assert [tuple(part.input_ids.shape) for part in seen] == [(2, 2)] * 2
    assert [part["weights"].dtype for part in seen] == [torch.bfloat16] * 2
    assert [part["input_ids"].dtype for part in seen] == [torch.int64] * 2


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_precision_casts_every_batch(batch: Any) -> None:
    seen: list[Any] = []
    zf.cast(seen_by(loss_fn, seen), torch.bfloat16)(PARAMS, batch)
    assert type(seen[0]) is type(batch)
    assert x_of(seen[0]).dtype == y_of(seen[0]).dtype == torch.bfloat16
    assert x_of(batch).dtype == torch.float32


def test_a_batch_that_needs_no_cast_is_the_same_object() -> None:
    seen: list[Any] = []
    batch = Attributes({"x": X.bfloat16(), "y": Y.bfloat16()}, source="here")
    zf.cast(seen_by(loss_fn, seen), torch.bfloat16)(PARAMS, batch)
    assert seen[0] is batch


def test_a_flat_in_a_batch_is_passed_whole() -> None:
    seen: list[Any] = []

    def main(group: zf.Group) -> None:
        teacher = zf.replicate(PARAMS, group)
        loss = zf.cast(lambda p, b: seen.append(b["teacher"]) or loss_fn(p, b), torch.bfloat16)
        zf.accumulate(zf.value_and_grad(loss), 2)(PARAMS, {"x": X, "y": Y, "teacher": teacher})
        assert [found is teacher for found in seen] == [True, True]

    zf.simulate(1, main)


@pytest.mark.parametrize(
    "batch",
    [{"ids": [1, 2]}, collections.UserDict(ids="text"), None, 3, Record()],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_without_tensors_is_refused(batch: Any) -> None:
    vg = zf.accumulate(zf.value_and_grad(lambda p, b: p["w"].sum()), 2)
    with pytest.raises(OptionError, match=f"got {type(batch).__name__} without tensors; make"):
        vg(PARAMS, batch)


@pytest.mark.parametrize("leaf", [Opaque(X), {X}, X.numpy()], ids=["object", "set", "numpy"])
def test_a_leaf_that_hides_arrays_is_refused(leaf: Any) -> None:
    vg = zf.accumulate(zf.value_and_grad(loss_fn), 2)
    with pytest.raises(LeafError, match=r"leaf 'more\.0' is .*, which holds arrays; make") as error:
        vg(PARAMS, Record(x=X, y=Y, more=[leaf]))
    assert error.value.leaf == "more.0"


def test_a_mapping_that_cannot_be_made_again_is_refused() -> None:
    class Fixed(Mapping[str, Any]):
        def __init__(self) -> None:
            self.inner = {"x": X, "y": Y}

        def __getitem__(self, key: str) -> Any:
            return self.inner[key]

        def __iter__(self) -> Any:
            return iter(self.inner)

        def __len__(self) -> int:
            return len(self.inner)

    with pytest.raises(LeafError, match=r"got Fixed, which raised TypeError: .*; pass a dict"):
        zf.accumulate(zf.value_and_grad(loss_fn), 2)(PARAMS, Fixed())


class Sized(Mapping[str, Any]):
    """A mapping as TensorDict: it iterates over rows, and knows the first sizes of its tensors."""

    def __init__(self, items: Any, batch_size: Any = ()) -> None:
        self.inner, self.batch_size = dict(items), torch.Size(batch_size)
        assert all(x.shape[: len(self.batch_size)] == self.batch_size for x in items.values())

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __iter__(self) -> Any:
        raise TypeError("iteration over rows")

    def __len__(self) -> int:
        return len(self.inner)

    def keys(self) -> Any:
        return self.inner.keys()


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_a_mapping_keeps_the_sizes_of_its_tensors(sizes: tuple[int, ...]) -> None:
    plain = zf.accumulate(zf.value_and_grad(loss_fn), 2)(PARAMS, {"x": X, "y": Y})
    seen: list[Any] = []

    def of_sized(params: Any, batch: Any) -> Any:
        seen.append((type(batch), len(batch.batch_size)))
        return loss_fn(params, {key: batch[key] for key in ("x", "y")})

    found = zf.accumulate(zf.value_and_grad(of_sized), 2)(PARAMS, Sized({"x": X, "y": Y}, sizes))
    assert seen == [(Sized, len(sizes))] * 2
    assert_same_bits(found, plain)


@pytest.mark.parametrize("y", [torch.ones(8), torch.ones(2)])
def test_leaves_of_different_batch_sizes_are_refused(y: Tensor) -> None:
    with pytest.raises(
        OptionError, match=r"leaf 'y' has shape .*, and leaf 'x' has 4 rows; split the batch"
    ) as error:
        zf.accumulate(zf.value_and_grad(loss_fn), 2)(PARAMS, Rows(X, y))
    assert error.value.leaf == "y"


@pytest.mark.parametrize(
    "batches",
    [
        [{"x": X[:3], "y": Y[:3]}, {"x": X[3:], "y": Y[3:]}],
        [Rows(X[:3], Y[:3]), Rows(X[3:], Y[3:])],
        MicroBatches([Pair(X[:3], Y[:3]), {"x": X[3:], "y": Y[3:]}]),
    ],
    ids=["dicts", "dataclasses", "MicroBatches"],
)
def test_a_list_of_micro_batches_is_not_split(batches: Any) -> None:
    loss, grads = zf.accumulate(zf.value_and_grad(loss_fn), 2)(PARAMS, batches)
    parts = [zf.value_and_grad(loss_fn)(PARAMS, batch) for batch in batches]
    assert_same_bits(loss, (parts[0][0] + parts[1][0]) / 2)
    assert_same_bits(grads["w"], (parts[0][1]["w"] + parts[1][1]["w"]) * 0.5)


@pytest.mark.parametrize(
    "batch",
    [
        [X, Y],
        (X, Y),
        ({"x": X}, {"x": Y}),
        [{"x": X}, {"y": Y}],
        [{"x": X}, {"x": Y}, {"x": X}],
    ],
    ids=["list of tensors", "tuple of tensors", "tuple", "other structures", "other length"],
)
def test_other_lists_and_tuples_are_one_batch(batch: Any) -> None:
    seen: list[Any] = []

    def loss(params: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return params["w"].sum()

    zf.accumulate(zf.value_and_grad(loss), 2)(PARAMS, batch)
    assert_same_bits(seen, [tree.map(lambda x, i=i: x.chunk(2)[i], batch) for i in (0, 1)])


def test_micro_batches_must_be_as_many_as_num_micro_batches() -> None:
    with pytest.raises(OptionError, match=r"got 3 for 2; pass 2, or set num_micro_batches=3"):
        zf.accumulate(zf.value_and_grad(loss_fn), 2)(PARAMS, MicroBatches([X, X, X]))


def test_a_list_of_one_micro_batch_is_one_batch() -> None:
    def main(group: zf.Group, batch: Any) -> Any:
        z = zf.zero(1, loss_fn, zf.optim.sgd(0.1), group)
        return z.params(z.step(z.init(PARAMS), batch)[0])

    batch = {"x": X, "y": Y}
    assert_same_bits(zf.simulate(1, main, MicroBatches([batch])), zf.simulate(1, main, batch))


def test_the_planner_takes_batches_of_any_class() -> None:
    for batch in BATCHES.values():
        assert planner.order_of_use(loss_fn, PARAMS, batch) == ("w",)
