"""Clipping in the kernels of a chain's last part: the same bits, and no product in memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zfun import ops, optim, tree

FUSED = {
    "adam": optim.adam(0.1, weight_decay=0.1),
    "adamw": optim.adamw(0.1),
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": optim.lion(0.1),
    "adagrad": optim.adagrad(0.1),
    "injected": optim.inject_hyperparams(optim.adamw)(0.1),
    "by label": optim.by_label(
        {"w": optim.adamw(0.1), "b": optim.sgd(0.1, momentum=0.5)}, lambda path, leaf: path
    ),
}
WIDTHS = {"w": 1100, "b": 65}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_a_clip_in_the_kernel_has_the_bits_of_a_clip_before_it(name: str, kernels: str) -> None:
    rule, generator = FUSED[name], torch.Generator().manual_seed(3)
    clip = optim.clip_by_global_norm(0.37)
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for dtype, grad_dtype in itertools.product(dtypes, dtypes):
        params, *grads = (
            {key: torch.randn(width, generator=generator).to(x) for key, width in WIDTHS.items()}
            for x in (dtype, grad_dtype, grad_dtype)
        )
        chain, before = optim.chain(clip, rule), (params, rule.init(params))
        together = (params, chain.init(params))
        with ops.use(kernels):
            for its in grads:
                before = rule.apply(clip.update(its, (), params)[0], before[1], before[0])
                together = chain.apply(its, together[1], together[0])
        for one, other in zip(
            tree.leaves(together), tree.leaves((before[0], ((), before[1]))), strict=True
        ):
            assert torch.equal(one, other), (dtype, grad_dtype)
        assert not torch.equal(together[0]["w"], params["w"])


class _Allocations(TorchDispatchMode):
    """Notes how many elements each new tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func._schema.returns[0].alias_info:
            self.numels.append(out.numel())
        return out


@pytest.mark.parametrize("name", FUSED)
def test_a_clipped_step_makes_no_tensor_like_the_gradients(name: str) -> None:
    chain = optim.chain(optim.clip_by_global_norm(0.37), FUSED[name])
    # Longer than a chunk of the readable kernels, which run here.
    params, grads = ({key: torch.ones(300_000) for key in WIDTHS} for _ in range(2))
    state = chain.init(params)
    with _Allocations() as made:
        chain.apply(grads, state, params, donate=True)
    assert max(made.numels) < 300_000


def test_a_bound_that_is_set_between_steps_is_the_bound_in_the_kernel() -> None:
    generator = torch.Generator().manual_seed(4)
    params, grads = ({"w": torch.randn(50, generator=generator)} for _ in range(2))
    clip = optim.inject_hyperparams(optim.clip_by_global_norm)(1.0)
    chain, rule = optim.chain(clip, optim.adamw(0.1)), optim.adamw(0.1)
    state = optim.set_hyperparams(chain.init(params), max_norm=0.1)
    clipped, _ = optim.clip_by_global_norm(0.1).update(grads, (), params)
    expected, _ = rule.apply(clipped, rule.init(params), params)
    assert torch.equal(chain.apply(grads, state, params)[0]["w"], expected["w"])
