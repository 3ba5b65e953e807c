"""Plans count the buffers of a device's kernels, where torch's shape functions make others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import zfun as zf
from tests.unit.planner.test_plan import check, measured
from zfun.planner import Observer, Plan

F = torch.nn.functional
attend = F.scaled_dot_product_attention

FLASH, EFFICIENT, WHOLE = "flash, CUDA", "memory-efficient, CUDA", "whole matrices"
HALF, SINGLE = torch.bfloat16, torch.float32
ROWS, LENGTH, HEADS, WIDTH = 2, 64, 4, 64


def planned(loss: Any, params: Any, x: Tensor, device: str = "meta", stage: int = 0) -> Plan:
    make = lambda group: zf.zero(stage, loss, zf.optim.sgd(0.1), group)
    return zf.plan(make, params, x, 1, device=device)


def kept(of_layer: Callable[[Any, Tensor], Tensor], params: Any, x: Tensor) -> int:
    """Return the bytes that one layer more keeps for backward."""

    def loss(params: Any, x: Tensor, *, count: int) -> Tensor:
        for layer in params["h"][:count]:
            x = of_layer(layer, x)
        return x.sum()

    def at_the_end(count: int) -> int:
        plan = planned(functools.partial(loss, count=count), {"h": [params] * 4}, x)
        forward = [one for one in plan.instants if one.what.endswith("in forward")]
        return forward[-1].device.activations

    return at_the_end(4) - at_the_end(3)


def transformer(params: Any, x: Tensor) -> Tensor:
    """A layer whose activations the paper counts, with dropout."""
    norm = lambda x: F.layer_norm(x, x.shape[-1:])
    heads = (
        x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (norm(x) @ params["qkv"]).chunk(3, -1)
    )
    mixed = attend(*heads, is_causal=True).transpose(1, 2).flatten(2)
    x = x + F.dropout(mixed @ params["out"], 0.1)
    return x + F.dropout(F.gelu(norm(x) @ params["up"]) @ params["down"], 0.1)


def layer_of(width: int, dtype: torch.dtype = HALF) -> Any:
    empty = functools.partial(torch.empty, dtype=dtype, device="meta")
    return {
        "qkv": empty(width, 3 * width),
        "out": empty(width, width),
        "up": empty(width, 4 * width),
        "down": empty(4 * width, width),
    }


@pytest.mark.parametrize("length", [64, 512])
def test_a_transformer_keeps_the_bytes_of_the_closed_form(length: int) -> None:
    """34 s b h without attention scores: Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models" (2022), section 4; the logarithms of flash attention's sums and the
    means of two norms besides.
    """
    x = torch.empty(ROWS, length, WIDTH, dtype=HALF, device="meta")
    tokens = ROWS * length
    assert kept(transformer, layer_of(WIDTH), x) == tokens * (34 * WIDTH + 4 * HEADS + 2 * 2 * 4)


def test_whole_matrices_keep_the_rest_of_the_closed_form() -> None:
    """The scores take 5 bytes more for each, of which the paper counts 2 twice, and a mask."""

    def layer(params: Any, x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return transformer(params, x)

    x = torch.empty(ROWS, LENGTH, WIDTH, dtype=HALF, device="meta")
    scores = ROWS * HEADS * LENGTH**2
    assert kept(layer, layer_of(WIDTH), x) > kept(transformer, layer_of(WIDTH), x) + 4 * scores


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_attention_on_a_device_costs_no_more_than_on_the_cpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("here the device's own dispatcher chooses")
    # As a build for CUDA answers on a machine without a GPU.
    answers = {True: None, False: torch.device("cuda")}
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: answers[check_available],
    )
    x = torch.empty(1, 1024, WIDTH, dtype=HALF)

    def loss(params: Any, x: Tensor) -> Tensor:
        heads = (
            x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (x @ params["qkv"]).chunk(3, -1)
        )
        return attend(*heads, is_causal=True).sum()

    params = {"qkv": torch.empty(WIDTH, 3 * WIDTH, dtype=HALF)}
    found, there = (planned(loss, params, x, where) for where in ("cpu", device))
    assert found.attention == (("flash, CPU", 1),)
    assert there.attention == ((FLASH, 1),)
    assert there.peak.device.total == found.peak.device.total
    assert there.flops == found.flops
    assert "flash, CUDA" in str(there)


def mask_of(length: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(length, length, dtype=dtype, device="meta")


CHOICES: dict[str, tuple[str, torch.dtype, tuple[int, int, int], dict[str, Any]]] = {
    "half": (FLASH, HALF, (4, 4, 16), {}),
    "float16": (FLASH, torch.float16, (4, 4, 16), {}),
    "causal": (FLASH, HALF, (4, 4, 16), {"is_causal": True}),
    "dropout": (FLASH, HALF, (4, 4, 16), {"dropout_p": 0.1}),
    "any width": (FLASH, HALF, (4, 4, 13), {}),
    "groups": (FLASH, HALF, (4, 2, 16), {"enable_gqa": True}),
    "wide heads": (EFFICIENT, HALF, (2, 2, 264), {}),
    "mask": (EFFICIENT, HALF, (4, 4, 16), {"attn_mask": mask_of(24)}),
    "bias": (EFFICIENT, HALF, (4, 4, 16), {"attn_mask": mask_of(24, HALF)}),
    "single": (EFFICIENT, SINGLE, (4, 4, 16), {}),
    "single, width of 4": (EFFICIENT, SINGLE, (4, 4, 12), {}),
    "single, any width": (WHOLE, SINGLE, (4, 4, 13), {}),
    "mask, any width": (WHOLE, HALF, (4, 4, 13), {"attn_mask": mask_of(24)}),
    "mask and groups": (WHOLE, HALF, (4, 2, 16), {"attn_mask": mask_of(24), "enable_gqa": True}),
    "single, groups": (WHOLE, SINGLE, (4, 2, 16), {"enable_gqa": True}),
    "double": (WHOLE, torch.float64, (4, 4, 16), {}),
}


def attention_of(case: str, device: str) -> tuple[Any, Any]:
    _, dtype, (heads, groups, width), options = CHOICES[case]
    params = {
        name: torch.empty(2, count, 24, width, dtype=dtype, device=device)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    }
    options = {
        name: torch.ones_like(x, device=device) if isinstance(x, Tensor) else x
        for name, x in options.items()
    }
    return lambda params, x: attend(*params.values(), **options).float().sum(), params


@pytest.mark.parametrize("case", CHOICES)
def test_the_kernel_is_that_of_torchs_dispatcher(case: str) -> None:
    """The rules are those of ``sdp_utils.cpp`` in torch 2.13, for devices from compute 8.0 on."""
    loss, params = attention_of(case, "meta")
    for stage in (0, 3):
        plan = planned(loss, params, torch.empty(1), stage=stage)
        assert plan.attention == ((CHOICES[case][0], 1),)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CHOICES)
def test_a_real_step_on_cuda_takes_the_planned_kernel_or_that_of_cudnn(case: str) -> None:
    loss, params = attention_of(case, "cuda")
    observer = Observer(zf.collectives.single_group(), "cuda")
    run, x = zf.zero(0, loss, zf.optim.sgd(0.1), observer.group), torch.ones(1, device="cuda")
    with observer:
        state = run.init(params)
        observer.begin(state)
        state, _ = run.step(state, x)
        found = observer.plan(state).attention
    assert found in (((CHOICES[case][0], 1),), (("flash, cuDNN", 1),))


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)
        self.attention = torch.nn.MultiheadAttention(64, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.attention(x, x, x, need_weights=False)[0].sum()


def test_leaves_of_stage_3_are_gathered_as_on_the_cpu() -> None:
    apply = zf.functional(_Normed())
    make = lambda group: zf.zero(3, apply, zf.optim.sgd(0.1), group, bucket_bytes=1)
    here, there = (
        zf.plan(make, dict(apply.params), torch.empty(4, 64, 64), 2, device=device)
        for device in ("cpu", "meta")
    )
    assert there.sent == here.sent
    gathers = [[i.what for i in p.instants if "gather" in i.what] for p in (here, there)]
    assert gathers[0] == gathers[1]
    assert there.largest.grads == here.largest.grads


def test_switches_of_kernels_count() -> None:
    params = {name: torch.empty(2, 4, 24, 16, dtype=HALF) for name in "qkv"}
    for backend, name in (
        (SDPBackend.MATH, WHOLE),
        (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT),
        (SDPBackend.FLASH_ATTENTION, FLASH),
    ):

        def loss(params: Any, x: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return attend(*params.values()).float().sum()

        assert planned(loss, params, torch.empty(1)).attention == ((name, 1),)


def test_attention_within_functions_of_torch_and_recomputation_is_chosen_too() -> None:
    module = torch.nn.TransformerEncoderLayer(32, 2, 48, batch_first=True, dropout=0.1)
    apply = zf.functional(module.train())
    loss = lambda params, x: apply(params, x).sum()
    recomputed = lambda params, x: zf.remat(apply)(params, x).sum()
    for fn in (loss, recomputed):
        plan = planned(fn, dict(apply.params), torch.empty(2, 8, 32), stage=2)
        assert plan.attention == ((EFFICIENT, 1),)


# Bytes that a layer keeps for an element, and for a row: its own input, where the layer keeps that.
KEPT: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    # A mask of bytes.
    "dropout": (lambda x: F.dropout(x, 0.5), 1, 0),
    "module": (torch.nn.Dropout(0.5), 1, 0),
    "rms_norm": (lambda x: F.rms_norm(x, (64,)), 4, 4),
    "RMSNorm": (torch.nn.RMSNorm(64, elementwise_affine=False), 4, 4),
    "mish": (F.mish, 4, 0),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_function_with_a_kernel_keeps_what_the_kernel_keeps(name: str) -> None:
    fn, element, row = KEPT[name]
    # A layer that multiplies by a constant keeps nothing of its own.
    layer = lambda params, x: fn(x * (params["w"] if x.grad_fn is None else 1.0)) * 2.0
    x = torch.empty(4, 64, 64, device="meta")
    params = {"w": torch.empty(64, device="meta")}
    assert kept(layer, params, x) == x.numel() * element + x.numel() // 64 * row


def test_a_softmax_in_float32_needs_no_copy_of_float16() -> None:
    x = torch.empty(4, 8, 64, dtype=torch.float16)
    for softmax in (F.softmax, F.log_softmax):
        loss = lambda params, x, fn=softmax: fn(x * params["w"], -1, dtype=torch.float32).sum()
        plan = planned(loss, {"w": torch.empty(64, dtype=torch.float16)}, x)
        assert plan.largest.activations == x.numel() * (2 + 4)


LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "logits": F.binary_cross_entropy_with_logits,
    "soft margin": F.soft_margin_loss,
    "sum": functools.partial(F.mse_loss, reduction="sum"),
    "none": lambda x, y: F.mse_loss(x, y, reduction="none").sum(),
    "poisson": F.poisson_nll_loss,
    "kl": functools.partial(F.kl_div, reduction="batchmean"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_plan_of_a_reduced_loss_equals_a_real_step(name: str) -> None:
    """The kernels reduce in the memory of the losses of all elements."""
    loss = lambda params, x: LOSSES[name](torch.tanh(x @ params["w"]), torch.ones(8, 40))
    make = lambda group: zf.zero(2, loss, zf.optim.adamw(0.1), group)
    check(make, {"w": torch.ones(24, 40)}, torch.ones(8, 24), 2)


@pytest.mark.parametrize("size", [2, 3])
def test_the_plan_of_patches_equals_a_real_step(size: int) -> None:
    """Backward of patches allocates as much as these, which is more than the image."""

    def loss(params: Any, x: Tensor) -> Tensor:
        patches = F.unfold((x @ params["w"]).unsqueeze(1), size)
        return F.fold(patches, (9, 12), size).square().mean()

    make = lambda group: zf.zero(2, loss, zf.optim.adamw(0.1), group)
    check(make, {"w": torch.ones(24, 12)}, torch.ones(4, 9, 24), 2)


def embedded(params: Any, rows: Tensor) -> Tensor:
    return (F.embedding(rows, params["table"], sparse=True) @ params["w"]).square().mean()


TABLE = {"table": torch.ones(50, 24), "w": torch.ones(24, 30)}


@pytest.mark.parametrize("options", [{}, {"precision": HALF}, {"num_micro_batches": 3}], ids=str)
def test_the_plan_of_a_sparse_gradient_equals_a_real_step(options: Any) -> None:
    loss = lambda params, rows: embedded(params, rows) + params["table"].float().mean()
    make = lambda group: zf.zero(3, loss, zf.optim.adamw(0.1), group, **options)
    check(make, TABLE, torch.arange(12).reshape(3, 4), 2)


def test_a_sum_of_sparse_gradients_is_refused_by_name() -> None:
    loss = lambda params, rows: embedded(params, rows) + embedded(params, rows + 1)
    with pytest.raises(zf.ZfunError, match=r"a sparse result of add\(\).*take sparse=False"):
        planned(loss, TABLE, torch.arange(12), "cpu")


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_the_plan_of_a_product_of_groups_equals_a_real_step(dtype: torch.dtype) -> None:
    """torch's own shape function takes bfloat16 alone, and pads no rows."""

    def loss(params: Any, x: Tensor) -> Tensor:
        ends = torch.arange(8, 33, 8, dtype=torch.int32)
        x = torch._grouped_mm(x, params["up"], offs=ends)
        return F.silu(x)[:, :33].float().sum()

    params = {"up": torch.ones(4, 24, 40, dtype=dtype)}
    make = lambda group: zf.zero(3, loss, zf.optim.adamw(0.1), group)
    check(make, params, torch.ones(32, 24, dtype=dtype), 2)


@pytest.mark.parametrize(("length", "width", "size"), [(7, 24, 32), (12, 16, 20), (33, 65, 39)])
def test_the_plan_of_an_lstm_has_a_workspace_of_about_the_real_size(
    length: int, width: int, size: int
) -> None:
    apply = zf.functional(torch.nn.LSTM(width, size, num_layers=2, batch_first=True))
    loss = lambda params, x: apply(params, x)[0].sum()
    make = lambda group: zf.zero(3, loss, zf.optim.adamw(0.1), group)
    params, x = (
        {name: leaf.clone() for name, leaf in apply.params.items()},
        torch.ones(5, length, width),
    )
    plan, real = zf.plan(make, params, x, 2), measured(make, params, x, 2)
    found, expected = plan.largest.activations, real.largest.activations
    # A page for each layer.
    assert abs(found - expected) <= 2 * 4096, (found, expected)
    assert len(plan.instants) == len(real.instants)


def test_a_shape_that_depends_on_data_is_refused_by_name() -> None:
    loss = lambda params, x: (x @ params["w"])[x[:, 0] > 0].sum()
    with pytest.raises(zf.ZfunError, match=r"depend on data; got index\(\).* take where\(\)"):
        planned(loss, {"w": torch.empty(3, 4)}, torch.empty(2, 3), "cpu")
