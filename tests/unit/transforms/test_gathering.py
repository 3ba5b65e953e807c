"""``zf.functional(gather=)``: modules whose parameters go into an ``autograd.Function``."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests.conftest import examples
from zfun.testing import assert_same_bits

BATCHES = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))


class Product(torch.autograd.Function):
    """``F.linear`` as a kernel of another library has it, which takes plain tensors alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _ = inputs
        assert type(weight) in (Tensor, nn.Parameter)
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, grad.sum(0)


class Fused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        return Product.apply(x, self.weight, self.bias)


class Mlp(nn.Module):
    """Two matrices, the second of which the parent's ``forward`` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Fused(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(torch.tanh(self.up(x)), self.down.weight, self.down.bias)


class Block(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), Mlp()
        run = {
            "nothing": self.mlp,
            "checkpoint": functools.partial(checkpoint, self.mlp, use_reentrant=False),
            "remat": zf.remat(self.mlp),
            "remat of a function": zf.remat(lambda x: self.mlp(x)),  # noqa: PLW0108, a closure
        }
        self.run = run[recompute]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self.norm(x))


def net(recompute: str = "nothing", num_blocks: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Block(recompute) for _ in range(num_blocks)), nn.Linear(6, 2))


def trained(group: zf.Group, stage: int, apply: Any, **options: Any) -> Any:
    loss_fn = lambda params, x: apply(params, x).square().mean()
    zero = zf.zero(stage, loss_fn, zf.optim.adamw(0.1), group, **options)
    state, losses = zero.init({key: leaf.clone() for key, leaf in apply.params.items()}), []
    for step in range(3):  # the first notes the schedule that the others follow
        state, info = zero.step(state, BATCHES[group.rank] + step)
        losses.append(info.loss)
    return losses, zero.params(state)


@functools.cache
def expected_of(stage: int, recompute: str, size: int, num_micro: int, precision: Any) -> Any:
    """Train without ``gather`` at a stage where every leaf is a plain tensor."""
    options = {"num_micro_batches": num_micro, "precision": precision}
    return zf.simulate(size, trained, stage, zf.functional(net(recompute)), **options)


@settings(max_examples=examples(32))
@given(
    recompute=st.sampled_from(["nothing", "checkpoint", "remat", "remat of a function"]),
    globs=st.sampled_from([["*.mlp"], ["?"], ["*.up", "*.mlp"], ["*"], [""]]),
    stage=st.sampled_from([3, 3, 3, 0, 1, 2]),
    bucket_bytes=st.sampled_from([1, 300, 2**20]),
    size=st.integers(1, 2),
    num_micro_batches=st.integers(1, 2),
    precision=st.sampled_from([None, torch.bfloat16]),
)
def test_a_gathered_module_changes_no_bit_at_any_stage(
    recompute: str,
    globs: list[str],
    stage: int,
    bucket_bytes: int,
    size: int,
    num_micro_batches: int,
    precision: torch.dtype | None,
) -> None:
    found = zf.simulate(
        size,
        trained,
        stage,
        zf.functional(net(recompute), gather=globs),
        bucket_bytes=bucket_bytes,
        num_micro_batches=num_micro_batches,
        precision=precision,
    )
    # Stages 2 and 3 sum over the ranks before they sum over the micro-batches.
    below = 0 if stage < 2 else 2
    assert_same_bits(found, expected_of(below, recompute, size, num_micro_batches, precision))


class Unwary(Product):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])


class Bare(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        return Unwary.apply(x, self.weight, self.bias)


def test_without_gather_the_error_names_it() -> None:
    message = r"leaf '0\.\w+'; call zf.gather.*functional\(model, gather=\[\.\.\.\]\)"
    with pytest.raises(zf.errors.PlacementError, match=message):
        zf.simulate(1, trained, 3, zf.functional(nn.Sequential(Bare(6, 2))))


@pytest.mark.parametrize("form", ["grad", "vmap", "jvp"])
def test_transforms_of_torch_see_the_same_tensors(form: str) -> None:
    apply = zf.functional(net(), gather=["*.mlp"])

    def loss_fn(call: Any, x: Tensor) -> Tensor:
        if form == "grad":  # a penalty on the slope, which differentiates twice
            return torch.func.grad(lambda x: call(x).square().sum())(x).square().mean()
        if form == "vmap":
            return torch.func.vmap(lambda row: call(row[None]))(x).square().mean()
        return torch.func.vjp(call, x)[1](torch.ones(4, 2))[0].square().mean()

    def main(group: zf.Group, stage: int) -> Any:
        bound = lambda params, x: loss_fn(functools.partial(apply, params), x)
        bound.params = apply.params  # type: ignore[attr-defined]
        zero = zf.zero(stage, bound, zf.optim.sgd(0.1), group, bucket_bytes=300)
        state = zero.init(apply.params)
        for _ in range(2):
            state, info = zero.step(state, BATCHES[group.rank])
        return info.loss, zero.params(state)

    assert_same_bits(zf.simulate(2, main, 3), zf.simulate(2, main, 0))


class Noting(Fused):
    """Notes the memory of its weight in each call, and how many such memories there are."""

    noted: ClassVar[list[StorageWeakRef]] = []
    counts: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.noted.append(StorageWeakRef(self.weight.untyped_storage()))
        self.counts.append(sum(not storage.expired() for storage in self.noted))
        return super().forward(x)


def test_parameters_are_released_after_each_module() -> None:
    apply = zf.functional(nn.Sequential(*(Noting(6, 6) for _ in range(8))), gather=["*"])
    zf.simulate(2, trained, 3, apply, bucket_bytes=1)
    # Two ranks, each with the layer that runs and the one before.
    assert max(Noting.counts) <= 4


def test_a_copy_is_no_cycle() -> None:
    """A cycle would keep the parameters of a call until Python looks for cycles."""
    apply = zf.functional(net(), gather=["*"])
    params = {key: leaf.clone() for key, leaf in apply.params.items()}
    gc.collect()
    gc.disable()
    try:
        apply(params, BATCHES[0])
        gone = weakref.ref(params.pop("0.mlp.up.weight"))
        assert gone() is None
    finally:
        gc.enable()


def test_a_bound_copy_gathers_too() -> None:
    apply = zf.functional(net(), gather=["*.mlp"])
    assert_same_bits(apply.bind(apply.params)(BATCHES[0]), apply.module(BATCHES[0]))


def test_a_glob_that_matches_nothing_is_refused() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"got '\*\.mpl', which matches none of \['0',"):
        zf.functional(net(), gather=["*.mlp", "*.mpl"])
