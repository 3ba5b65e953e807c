"""Leaves that go unused take no step, wherever their gradients lie, as in plain accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from tests.unit.interop.gradients.test_scaled import SCALE
from zfun.interop.accelerate import Accelerator


class Net(nn.Module):
    """A leaf that no call uses, and a branch that some calls leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.branch, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, *, short: bool) -> Tensor:
        hidden = self.inner(x).tanh()
        return self.out(hidden if short else hidden + self.branch(hidden).tanh())


def clip_value(accelerator: Any, net: Net) -> None:
    accelerator.clip_grad_value_(net.parameters(), 0.05)


def clip_norm(accelerator: Any, net: Net) -> None:
    accelerator.clip_grad_norm_(net.parameters(), 0.05)


def unscale(accelerator: Any, net: Net) -> None:
    accelerator.unscale_gradients()


def stray(accelerator: Any, net: Net) -> None:
    accelerator.backward(net.out.weight.square().sum() * 0.1)


def stray_and_clip(accelerator: Any, net: Net) -> None:
    stray(accelerator, net)
    clip_value(accelerator, net)


def keep(*_: Any) -> None: ...


def freeze(net: Net) -> None:
    net.inner.requires_grad_(False)


def trained(accelerator: Any, touch: Any, count: int, late: Any) -> tuple[Any, Any]:
    """Return the changes of the values and the counts of steps."""
    torch.manual_seed(0)
    net = Net()
    before = {name: x.detach().clone() for name, x in net.named_parameters()}
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.05))
    for index in range(4):
        if index == 2:
            late(net)
        for place in range(count):
            x = torch.linspace(-1, 1 + index + place, 12).view(4, 3)
            # At the last, the branch trains again.
            loss = model(x, short=index in (1, 2)).float().square().mean()
            accelerator.backward(loss)
        touch(accelerator, net)
        optimizer.step()
        optimizer.zero_grad()
    values = accelerator.get_state_dict(model)
    steps = {key: float(x["step"]) for key, x in optimizer.state_dict()["state"].items()}
    return {name: values[name] - x for name, x in before.items()}, steps


def accelerator_of(zero: Any, *, is_half: bool) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    if zero is not None:
        handlers = [accelerate.utils.GradScalerKwargs(init_scale=SCALE)]
        options = {"mixed_precision": "fp16", "kwargs_handlers": handlers} if is_half else {}
        return Accelerator(cpu=True, zero=zero, **options)
    plain = accelerate.Accelerator(cpu=True)
    if is_half:
        plain.state._mixed_precision = "fp16"
        plain.native_amp, plain.scaler = True, torch.amp.GradScaler("cpu", init_scale=SCALE)
    return plain


# Stage 3 has no values outside of calls, where stray gradients arise.
CASES: list[tuple[Any, str, bool]] = [
    (touch, store, is_half)
    for is_half, ways in [
        (False, [keep, clip_value, clip_norm, stray, stray_and_clip]),
        (True, [unscale, clip_value]),
    ]
    for touch in ways
    for store in ["host", "nvme", "parameters too"]
    if not (touch in (stray, stray_and_clip) and store == "parameters too")
]


@pytest.mark.parametrize("late", [keep, freeze])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("touch", "store", "is_half"), CASES)
def test_unused_leaves_take_no_step_where_gradients_lie_in_a_store(
    tmp_path: Path, touch: Any, store: str, is_half: bool, count: int, late: Any
) -> None:
    kept = zf.stores.nvme(tmp_path) if store == "nvme" else zf.stores.host()
    params = kept if store == "parameters too" else None
    offload = zf.stores.Offload(optimizer=kept, grads=kept, params=params)
    zero = {"stage": 2 if params is None else 3, "offload": offload}
    expected = trained(accelerator_of(None, is_half=is_half), touch, count, late)
    found = trained(accelerator_of(zero, is_half=is_half), touch, count, late)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert found[1] == expected[1]
    assert not found[0]["idle"].any()
    bounds: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-3} if is_half else {}
    torch.testing.assert_close(found[0], expected[0], **bounds)
