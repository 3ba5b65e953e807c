"""A state from leaves that are made one at a time is the state from the tree of the values."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from zfun import optim, tree
from zfun.testing import assert_same_bits, bucket_sizes, tensors, trees

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
PRECISIONS: tuple[Any, ...] = (
    None,
    BF16,
    torch.float16,
    zf.Precision(param=BF16),
    zf.Precision(master=FP64),
    zf.Precision(param=torch.float16, master=FP64),
)


def momentum_of_start() -> Any:
    """A rule whose state starts from the parameters, which differ from bucket to bucket."""

    def init(params: Any) -> Any:
        return {"start": tree.map(lambda x: x.detach() * 3, params), "count": torch.zeros(())}

    return init, lambda grads, state, params: (grads, state)


def total(params: Any) -> Any:
    """A rule whose state has a number that needs all leaves, and so is not built by bucket."""
    zero = torch.zeros((), dtype=FP64)
    return {"total": sum((leaf.double().sum() for leaf in tree.leaves(params)), zero)}


RULES: tuple[Any, ...] = (
    optim.sgd(0.1),
    optim.adamw(0.1),
    optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9)),
    optim.by_label(
        {"a": optim.adamw(0.1), "b": optim.sgd(0.1, momentum=0.9)},
        lambda path, leaf: "a" if leaf.ndim > 1 else "b",
    ),
    momentum_of_start(),
    (total, lambda grads, state, params: (grads, state)),
)


def deferred(params: Any) -> Any:
    """Leaves that an initialiser copies from a tree."""
    values = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    return zf.sources.initialised(params, lambda path, spec: values[path].clone())


def in_a_folder(params: Any, folder: str, names: Any) -> Any:
    """Leaves that lie in one file or two, tied ones once."""
    layout = zf.layout.layout_of(params)
    values = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    found = {f"m.{slot.path}": values[slot.path].contiguous() for slot in layout.leaves}
    parts = [dict(list(found.items())[start::2]) for start in (0, 1)] if names else [found]
    if len(parts) == 1:
        save_file(found, Path(folder) / "model.safetensors")
    else:
        index = {}
        for number, part in enumerate(parts):
            file = f"model-{number}.safetensors"
            save_file(part, Path(folder) / file)
            index |= dict.fromkeys(part, file)
        text = str({"weight_map": index}).replace("'", '"')
        (Path(folder) / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return zf.sources.safetensors(folder, params, name_of=lambda path: f"m.{path}")


def everything(state: Any) -> Any:
    """All values of a state on this rank, with tensors in place of handles."""
    fetch = lambda x: x.get(torch.device("cpu")).wait() if isinstance(x, zf.stores.Stored) else x
    return tree.map(fetch, tuple(state))


@pytest.mark.parametrize("source", ["initialised", "safetensors"])
@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_lazy_start_is_the_plain_start(source: str, data: st.DataObject) -> None:
    params = data.draw(trees(tensors((FP32, FP64, BF16)), max_leaves=8))
    size, stage = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    frozen = data.draw(st.sets(st.sampled_from(tree.paths(params))))
    store = data.draw(st.sampled_from([None, zf.stores.host()]))
    options: dict[str, Any] = {
        "bucket_bytes": data.draw(bucket_sizes()),
        "precision": data.draw(st.sampled_from(PRECISIONS)),
        "offload": zf.stores.Offload(optimizer=store, params=store if stage == 3 else None),
    }
    if data.draw(st.booleans()):
        options["trainable"] = lambda path, leaf: path not in frozen
    if data.draw(st.booleans()):
        options["buffers"] = lambda path, leaf: "by rank" if path in frozen else None
    if data.draw(st.booleans()):
        options["order"] = data.draw(st.permutations(tree.paths(params)))
    rule, init = (
        data.draw(st.sampled_from(RULES)),
        data.draw(st.sampled_from(["check", "broadcast"])),
    )
    split = data.draw(st.booleans())

    def start(group: zf.Group, given: Any) -> Any:
        z = zf.zero(stage, lambda params, batch: torch.tensor(0.0), rule, group, **options)
        state = z.init(given, init=init)
        return everything(state), z.params(state)

    with tempfile.TemporaryDirectory() as folder:
        lazy = deferred(params) if source == "initialised" else in_a_folder(params, folder, split)
        found, expected = (zf.simulate(size, start, given) for given in (lazy, params))
    assert_same_bits(found, expected)


@given(
    params=trees(tensors((FP32, FP64, BF16))), bucket_bytes=bucket_sizes(), size=st.integers(1, 4)
)
def test_flats_of_deferred_leaves_are_those_of_tensors(
    params: Any, bucket_bytes: int, size: int
) -> None:
    def place(group: zf.Group, given: Any) -> Any:
        return [
            (flat.buffers, zf.unshard(flat))
            for make in (zf.shard, zf.replicate)
            for init in ("check", "broadcast")
            for flat in [make(given, group, bucket_bytes=bucket_bytes, init=init)]
        ]

    assert_same_bits(zf.simulate(size, place, deferred(params)), zf.simulate(size, place, params))


def test_a_broadcast_asks_rank_0_alone_for_values() -> None:
    params = {"w": torch.randn(500), "z": torch.randn(3, dtype=torch.complex64)}

    def main(group: zf.Group) -> Any:
        def initialise(path: str, spec: Tensor) -> Tensor:
            assert group.rank == 0, "only rank 0 makes leaves"
            return params[path].clone()

        lazy = zf.sources.initialised(params, initialise)
        # Rank 0 may also have tensors.
        given = params if group.rank == 0 else lazy
        return [zf.unshard(zf.shard(x, group, init="broadcast")) for x in (lazy, given)]

    for found in zf.simulate(3, main):
        assert_same_bits(found, [params, params])


def test_every_leaf_is_made_once() -> None:
    params = {"a": torch.ones(4), "b": torch.ones(5), "frozen": torch.ones(3)}

    def main(group: zf.Group) -> list[str]:
        made: list[str] = []

        def initialise(path: str, spec: Tensor) -> Tensor:
            made.append(path)
            return torch.ones(spec.shape)

        z = zf.zero(
            3,
            lambda params, batch: params["a"].sum(),
            optim.adamw(0.1),
            group,
            precision=BF16,
            trainable=lambda path, leaf: path != "frozen",
        )
        z.init(zf.sources.initialised(params, initialise))
        return made

    assert zf.simulate(2, main) == [["a", "b", "frozen"]] * 2


@settings(max_examples=examples(20))
@given(
    params=trees(tensors((FP32, FP64, BF16)), max_leaves=8),
    rule=st.sampled_from(
        (
            *RULES,
            optim.lamb(0.1),
            optim.muon(0.1, optim.adamw(0.1)),
            optim.adagrad(0.1),
            optim.from_torch(torch.optim.AdamW, lr=0.1),
        )
    ),
    stage=st.integers(0, 3),
    size=st.integers(1, 3),
    bucket_bytes=bucket_sizes(),
    master=st.sampled_from([None, FP64]),
    precise=st.booleans(),
)
def test_a_state_built_by_bucket_is_init_of_the_whole(
    params: Any, rule: Any, stage: int, size: int, bucket_bytes: int, master: Any, precise: bool
) -> None:
    """The oracle runs ``init`` of the optimizer once, on all buckets."""
    params = deferred(params) if precise else params
    inner = optim.as_optimizer(rule) if master is None else optim.with_master(rule, master)

    def main(group: zf.Group) -> None:
        options = {"bucket_bytes": bucket_bytes, "precision": zf.Precision(master=master)}
        z = zf.zero(stage, lambda params, batch: torch.tensor(0.0), rule, group, **options)
        place = zf.shard if stage else zf.replicate
        flat = place(params, group, bucket_bytes=bucket_bytes, labels=inner.labels)
        found, expected = z.init(params).opt_state, inner.init(flat)
        assert tree.structure(found) == tree.structure(expected)
        assert_same_bits(found, expected)

    zf.simulate(size, main)
