"""Handlers of ``accelerate``: options of autocast, of the loss scale, and of DDP."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import examples
from zfun import optim
from zfun.errors import OptionError
from zfun.interop.accelerate import Accelerator


@settings(max_examples=examples(60))
@given(
    init_scale=st.sampled_from([1.0, 2.0**16, 3.0, 2.0**127]),
    growth_factor=st.sampled_from([2.0, 1.5, 4.0]),
    backoff_factor=st.sampled_from([0.5, 0.25, 0.7]),
    growth_interval=st.integers(1, 4),
    are_finite=st.lists(st.booleans(), max_size=20),
)
def test_the_loss_scale_is_that_of_torchs_scaler(are_finite: list[bool], **options: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", **options)
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler.scale(torch.ones(()))  # Makes its tensors.
    rule = optim.grad_scaler(**options)
    state = rule.init()
    for is_finite in are_finite:
        param.grad = torch.tensor([1.0 if is_finite else torch.inf])
        scaler.step(optimizer)
        scaler.update()
        state = rule.update(state, is_finite)
        assert float(state.scale) == scaler.get_scale()


class Notes(nn.Module):
    """Notes the dtype in which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        self.dtypes.append(out.dtype)
        return out


HANDLERS: dict[str, Any] = {
    "none": lambda: None,
    "on": lambda: AutocastKwargs(enabled=True),
    "off": lambda: AutocastKwargs(enabled=False),
}


@pytest.mark.parametrize("around", HANDLERS)
@pytest.mark.parametrize("whole", HANDLERS)
def test_autocast_is_on_where_that_of_accelerate_is(whole: str, around: str) -> None:
    """By the handler of the context, or else of the run; the forward of a model by the latter."""

    def dtypes(cls: Any) -> list[torch.dtype]:
        handler = HANDLERS[whole]()
        accelerator = cls(
            cpu=True, mixed_precision="bf16", kwargs_handlers=[handler] if handler else []
        )
        model, weight = Notes(), torch.ones(2, 2)
        net, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        net(torch.ones(1, 2))
        with accelerator.autocast(HANDLERS[around]()):
            model.dtypes.append((weight @ weight).dtype)
            net(torch.ones(1, 2))
            # A part in another dtype than what is around it, also than an autocast of the script.
            for inner in HANDLERS.values():
                with accelerator.autocast(inner()):
                    model.dtypes.append((weight @ weight).dtype)
        with torch.autocast("cpu", torch.float16), accelerator.autocast(HANDLERS[around]()):
            model.dtypes.append((weight @ weight).dtype)
        return model.dtypes

    assert dtypes(Accelerator) == dtypes(accelerate.Accelerator)


@pytest.mark.parametrize("kind", ["layer", "net"])
@pytest.mark.parametrize("stage", [1, 3])
def test_an_unwrapped_model_without_its_wrapper_computes_in_float32(stage: int, kind: str) -> None:
    """Then training goes on without autocast too, as under ``accelerate``."""

    def outputs(cls: Any, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        accelerator = cls(cpu=True, mixed_precision="bf16", **options)
        layer = nn.Linear(16, 16)
        model = layer if kind == "layer" else nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        net, optimizer = accelerator.prepare(model, optimizer)
        found, x = [], torch.randn(4, 16)
        for keeps in (True, False, True):
            plain = accelerator.unwrap_model(net, keep_fp32_wrapper=keeps)
            for _ in range(2):
                found.append(plain(x))
                accelerator.backward(found[-1].square().sum())
                optimizer.step()
                optimizer.zero_grad()
        return [x.detach() for x in found]

    for ours, plain in zip(
        outputs(Accelerator, zero=stage), outputs(accelerate.Accelerator), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_scaler_of_a_run_is_the_handlers(is_on: bool) -> None:
    handler = GradScalerKwargs(
        init_scale=8.0, growth_interval=2, growth_factor=4.0, backoff_factor=0.25, enabled=is_on
    )
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler], zero=1)
    model = nn.Linear(2, 1)
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (engine,) = accelerator._engines
    scales = []
    for factor in (1.0, 1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        accelerator.backward(net(torch.ones(1, 2)).sum() * factor)
        optimizer.step()
        scales.append(engine.loss_scale)
    assert scales == ([8.0, 32.0, 8.0, 8.0] if is_on else [1.0] * 4)


def test_a_hook_of_ddp_is_refused() -> None:
    """Gradients would be sent without it."""
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)
    with pytest.raises(OptionError, match=r"got comm_hook='power_sgd' in Distr.*; leave it out"):
        Accelerator(cpu=True, kwargs_handlers=[handler])
    Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])


def test_another_precision_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(OptionError, match=r"mixed_precision is one of 'no', .*got 'fp8'; pass"):
        Accelerator.of(accelerator, 2, "fp8")


def test_axes_beside_data_are_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
    with pytest.raises(OptionError, match=r"are data ranks under zfun; got tp_size=2 in paral"):
        Accelerator.of(accelerator, 2)


def test_uneven_inputs_are_refused_where_accelerate_joins_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPUs ``accelerate`` joins nothing."""
    accelerator = Accelerator(cpu=True, zero=2)
    model = nn.Linear(2, 1)
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train(even_batches: bool | None) -> None:
        with accelerator.join_uneven_inputs([net], even_batches=even_batches):
            accelerator.backward(net(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()

    train(even_batches=False)
    monkeypatch.setattr(Accelerator, "multi_device", True)  # as on several GPUs
    train(even_batches=True)
    train(even_batches=None)
    refused = pytest.raises(OptionError, match=r"needs all ranks, .*even_batches=False; leave even")
    with refused:
        train(even_batches=False)
    monkeypatch.setattr(Accelerator, "even_batches", False)
    with refused:
        train(even_batches=None)
