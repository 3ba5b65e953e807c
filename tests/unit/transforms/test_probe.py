from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zfun as zf
from zfun import optim, tree
from zfun.errors import NotElementwiseError
from zfun.placement import S
from zfun.reductions import global_norm
from zfun.transforms import probe


def stateless(leaf_update: Callable[[Tensor, Tensor], Tensor]) -> optim.Optimizer:
    return optim.optimizer(
        lambda params: (),
        lambda grads, state, params: (tree.map(leaf_update, grads, params), state),
    )


def whole_tree(grads_to_updates: Callable[[Any], Any]) -> optim.Optimizer:
    return optim.optimizer(
        lambda params: (), lambda grads, state, params: (grads_to_updates(grads), state)
    )


def local_norm_clip(grads: Any) -> Any:
    norm = torch.cat([g.reshape(-1) for g in tree.leaves(grads)]).norm()
    return tree.map(lambda g: -g / norm, grads)


def own_global_norm_clip(grads: Any) -> Any:
    return tree.map(lambda g: -g / global_norm(grads), grads)


def rms_moments() -> optim.Optimizer:
    def update(grads: Any, state: Any, params: Any) -> Any:
        nu = tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, state, grads)
        return tree.map(lambda g, v: -0.01 * g / (v.sqrt() + 1e-8), grads, nu), nu

    return optim.optimizer(lambda params: tree.map(torch.zeros_like, params), update)


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.sgd(0.1),
        optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        optim.adam(optim.warmup_cosine(1e-3, 100, 1000), weight_decay=0.1),
        optim.adamw(1e-3),
        optim.clip_by_global_norm(1e-3),
        optim.chain(
            optim.clip_by_global_norm(1.0),
            optim.adamw(1e-3),
            optim.scale_by_schedule(optim.linear(1.0, 0.0, 10)),
        ),
        stateless(lambda g, p: -0.1 * g.sign() - 0.1 * p),
        whole_tree(own_global_norm_clip),
        rms_moments(),
    ],
)
def test_elementwise_optimizers_pass(optimizer: optim.Optimizer) -> None:
    before = torch.get_rng_state()
    probe(optimizer)
    assert torch.equal(before, torch.get_rng_state())


def newton_schulz(g: Tensor, p: Tensor) -> Tensor:
    return -0.1 * g.mm(g.t()).mm(g)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            stateless(lambda g, p: -0.1 * g * p.norm() / g.norm()),
            "1-D pieces of lengths .* changed by",
        ),
        (stateless(lambda g, p: -0.1 * (g - g.mean())), "changed by"),
        (stateless(lambda g, p: -0.1 * g.reshape(-1).sort().values.reshape(g.shape)), "changed by"),
        (stateless(lambda g, p: -0.1 * g.reshape(-1).roll(1).reshape(g.shape)), "changed by"),
        (stateless(lambda g, p: -0.1 * (g.mm(g.t()).mm(g) if g.dim() == 2 else g)), "changed by"),
        (stateless(lambda g, p: -0.1 * g * (2.0 if g.dim() > 1 else 1.0)), "changed by"),
        (stateless(newton_schulz), r"raised RuntimeError: (mm: )?self must be a matrix"),
        (
            whole_tree(lambda grads: {"w": grads["w"]}),
            "whatever the shapes and names of leaves; .* raised TypeError",
        ),
        (whole_tree(local_norm_clip), "halves on two ranks .*zf.optim.clip_by_global_norm"),
        (stateless(lambda g, p: -0.1 * g - 1e-3), r"padding, which must stay zero"),
        (stateless(lambda g, p: -0.1 * g / g.abs()), r"padding, which must stay zero.*nan"),
        (
            stateless(lambda g, p: -0.1 * g * torch.rand(())),
            "two runs from one start .* different changes; keep",
        ),
        (
            stateless(lambda g, p: -0.1 * torch.cat([g.reshape(-1), g.reshape(-1)])),
            "raised SpecMismatch",
        ),
        (
            optim.optimizer(lambda params: None, lambda grads, state, params: (grads, grads)),
            "the state changed its structure",
        ),
        (
            optim.sgd(0.1)._replace(
                apply=lambda grads, state, params, *, donate=False: (params, state)
            ),
            "comparing update and then add with apply",
        ),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_with_a_reason(
    optimizer: optim.Optimizer, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(NotElementwiseError, match=message):
            probe(optimizer)


def test_an_optimizer_is_probed_once() -> None:
    calls = []

    def update(grads: Any, state: Any, params: Any) -> Any:
        calls.append(1)
        return tree.map(lambda g: -g, grads), state

    def init(params: Any) -> Any:
        return ()

    probe(optim.as_optimizer((init, update)))
    count = len(calls)
    probe(optim.as_optimizer((init, update)))
    assert len(calls) == count > 0


def test_functions_that_cannot_be_hashed_are_probed_too() -> None:
    class Update:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, grads: Any, state: Any, params: Any) -> Any:
            return tree.map(lambda g: -g, grads), state

    probe(optim.optimizer(lambda params: (), Update()))


def test_a_sharded_optimizer_is_not_probed_again() -> None:
    probe(stateless(newton_schulz)._replace(placement=S))


@pytest.mark.parametrize(
    "made_of",
    [
        lambda bad: optim.chain(bad, optim.sgd(0.1)._replace(placement=S)),
        lambda bad: optim.chain(optim.clip_by_global_norm(1.0), optim.chain(bad, optim.lamb(0.1))),
        lambda bad: optim.by_label({"all": bad}, lambda path, leaf: "all"),
        lambda bad: optim.with_master(optim.masked(bad, lambda path, leaf: leaf.ndim == 2)),
    ],
)
def test_every_part_of_a_chain_is_probed(made_of: Any) -> None:
    probe(made_of(optim.adamw(0.1)))
    with pytest.raises(NotElementwiseError, match="changed by"):
        probe(made_of(stateless(lambda g, p: -0.1 * (g - g.mean()))))


def test_the_probe_uses_real_numbers_under_fake_tensors() -> None:
    with FakeTensorMode():
        probe(optim.adamw(0.123))
        with pytest.raises(NotElementwiseError, match="changed by"):
            probe(stateless(lambda g, p: -0.1 * (g - g.mean())))


NAMES = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_padding_stays_zero_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    """In float16 0 / (0 + 1e-8) is NaN, which would spoil the blocks of int8 gathers."""
    make = getattr(torch.optim, name)
    values = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)

    def loss(params: Any, batch: Tensor) -> Tensor:
        return (params["w"].float() * batch).square().sum()

    def main(group: zf.Group, stage: int, codec: Any) -> Any:
        optimizer = optim.from_torch(make, lr=0.01)
        compression = zf.compression.Compression(params=codec)
        zero = zf.zero(stage, loss, optimizer, group, compression=compression)
        state = zero.init({"w": values.clone()})
        for _ in range(3):
            state, info = zero.step(state, torch.ones(()))
            assert not info.skipped
        span = zf.flat.leaf_spans(state.params)[0]
        for flat in zf.flat.flats(state):
            assert not flat.buffers[0][span.stop :].count_nonzero()
        return zero.params(state)["w"]

    param = nn.Parameter(values.clone())
    plain = make([param], lr=0.01)
    for _ in range(3):
        plain.zero_grad()
        loss({"w": param}, torch.ones(())).backward()
        plain.step()
    for stage in (0, 1, 3):
        assert torch.equal(zf.simulate(2, main, stage, None)[0], param)
    coded = zf.simulate(2, main, 3, zf.compression.int8(block=32))[0]
    torch.testing.assert_close(coded, param.detach(), rtol=0.02, atol=0.02)


def test_an_update_that_spoils_padding_in_one_dtype_is_refused_there() -> None:
    params = {"w": torch.ones(3)}
    half = {"w": torch.ones(3, dtype=torch.float16)}
    group = zf.collectives.single_group()
    optimizer = rms_moments()
    for sharded in (zf.shard_optimizer(optimizer, group), optimizer):
        flat, narrow = zf.shard(params, group), zf.shard(half, group)
        state = sharded.init(flat)
        zf.apply(sharded, flat, state, flat)
        with pytest.raises(
            NotElementwiseError, match=r"in torch\.float16 the padding .* nan.* eps"
        ):
            zf.apply(sharded, narrow, sharded.init(narrow), narrow)
    mixed = zf.zero(
        2,
        lambda p, x: (p["w"].float() * x).sum(),
        optimizer,
        group,
        precision=zf.Precision(param=torch.float16, master=torch.float32),
    )
    mixed.step(mixed.init(half), torch.ones(3))
