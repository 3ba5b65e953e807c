"""A loop of any lines has the numbers of plain accelerate: random programs, with both beside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.conftest import examples
from zfun.interop.accelerate import Accelerator

WIDTH = 4
# Names of the parts that a test may add to the net.
PARTS = ["norm", "tied", "weight norm", "spectral norm", "recurrent", "twice", "mean", "checkpoint"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, 0.02, eps=1e-3),
    "amsgrad": lambda params: torch.optim.Adam(params, 0.02, eps=1e-3, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.05, eps=1e-3),
}


class Net(nn.Module):
    """A net of parts, whose call uses one of two heads."""

    def __init__(self, parts: frozenset[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = parts
        self.first, self.body = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale, self.norm = nn.Parameter(torch.tensor(1.5)), nn.BatchNorm1d(WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True) if "recurrent" in parts else None
        self.register_buffer("mean", torch.zeros(WIDTH))
        if "tied" in parts:
            self.heads[0].weight = self.first.weight
        if "weight norm" in parts:
            parametrizations.weight_norm(self.body)
        if "spectral norm" in parts:
            parametrizations.spectral_norm(self.first)
        self.double()

    def forward(self, x: Tensor, head: int) -> Tensor:
        x = self.first(x)
        if "norm" in self.parts:
            x = self.norm(x)
        if self.recurrent is not None:
            x = x + self.recurrent(x[None])[0][0]
        for _ in range(2 if "twice" in self.parts else 1):
            if "checkpoint" in self.parts:
                x = torch.utils.checkpoint.checkpoint(self.body, x.tanh(), use_reentrant=False)
            else:
                x = self.body(x.tanh())
        if "mean" in self.parts:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            x = x - self.mean
        return self.heads[head](x.tanh()) * self.scale


class Loop:
    """The names of a script, and what the script has read."""

    def __init__(self, accelerator: Any, parts: frozenset[str], optimizer: str) -> None:
        self.accelerator, self.seen = accelerator, list[Any]()
        inner = Net(parts)
        self.net, self.optimizer = accelerator.prepare(
            inner, OPTIMIZERS[optimizer]([*inner.parameters()])
        )
        self.saved: Any = None

    def param(self, number: int) -> nn.Parameter:
        params = [*self.net.parameters()]
        return params[number % len(params)]

    def see(self, *values: Any) -> None:
        self.seen += [x.detach().clone() if isinstance(x, Tensor) else x for x in values]

    def loss(self, number: int) -> Tensor:
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number)).double()
        return self.net(x, number % 2).square().mean()


def backward(loop: Loop, number: int) -> None:
    loss = loop.loss(number)
    loop.accelerator.backward(loss)
    loop.see(loss)


def backward_twice(loop: Loop, number: int) -> None:
    first, second = loop.loss(number), loop.loss(number + 1)
    loop.accelerator.backward(second, retain_graph=True)
    loop.accelerator.backward(0.5 * second + first)


def penalised(loop: Loop, number: int) -> None:
    terms = sum(x.square().sum() for x in loop.net.parameters())
    loop.accelerator.backward(loop.loss(number) + 0.01 * terms)


def frozen_backward(loop: Loop, number: int) -> None:
    loop.net.heads.requires_grad_(False)
    backward(loop, number)
    loop.net.heads.requires_grad_(True)


def hooked_backward(loop: Loop, number: int) -> None:
    hook = loop.net.body.register_forward_hook(lambda module, args, out: 1.1 * out)
    backward(loop, number)
    hook.remove()


def step(loop: Loop, number: int) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=number % 3 > 0)


def zero(loop: Loop, number: int) -> None:
    loop.optimizer.zero_grad(set_to_none=number % 2 > 0)


def zero_net(loop: Loop, number: int) -> None:
    loop.net.zero_grad()


def clip(loop: Loop, number: int) -> None:
    loop.see(loop.accelerator.clip_grad_norm_(loop.net.parameters(), [0.05, 0.5, 5.0][number % 3]))


def clip_value(loop: Loop, number: int) -> None:
    backward(loop, number)  # torch fails where there are no gradients
    loop.accelerator.clip_grad_value_(loop.net.parameters(), 0.05)


def read_grads(loop: Loop, number: int) -> None:
    loop.see(*(x.grad for x in loop.net.parameters()))


def scale_grad(loop: Loop, number: int) -> None:
    if (grad := loop.param(number).grad) is not None:
        grad.mul_(0.5)


def replace_grad(loop: Loop, number: int) -> None:
    param = loop.param(number)
    if param.requires_grad:
        param.grad = torch.full_like(param, 0.1) if number % 2 else None


def write(loop: Loop, number: int) -> None:
    with torch.no_grad():
        loop.param(number).mul_(0.9)


def assign_data(loop: Loop, number: int) -> None:
    param = loop.param(number)
    param.data = param.data.clamp(-0.5, 0.5)


def freeze(loop: Loop, number: int) -> None:
    loop.param(number).requires_grad_(False)


def unfreeze(loop: Loop, number: int) -> None:
    loop.param(number).requires_grad_(True)


def rate(loop: Loop, number: int) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5 + number % 2


def read(loop: Loop, number: int) -> None:
    loop.see(*loop.net.parameters(), *loop.net.buffers())


def evaluate(loop: Loop, number: int) -> None:
    loop.net.eval()
    with torch.no_grad():
        loop.see(loop.loss(number))
    loop.net.train()


def average(loop: Loop, number: int) -> None:
    """Evaluate a copy whose parameters are half of those of the net."""
    other = copy.deepcopy(loop.net).eval()
    with torch.no_grad():
        for x, y in zip(other.parameters(), loop.net.parameters(), strict=True):
            x.lerp_(0 * y, 0.5)
        loop.see(other(torch.ones(2, WIDTH).double(), 0))


def save(loop: Loop, number: int) -> None:
    loop.saved = copy.deepcopy((loop.net.state_dict(), loop.optimizer.state_dict()))


def load(loop: Loop, number: int) -> None:
    if loop.saved is not None:
        values, moments = copy.deepcopy(loop.saved)
        loop.net.load_state_dict(values)
        loop.optimizer.load_state_dict(moments)


LINES = [
    *[backward, step] * 4,
    *[backward_twice, penalised, frozen_backward, hooked_backward, zero, zero_net, clip],
    *[clip_value, read_grads, scale_grad, replace_grad, write, assign_data, freeze, unfreeze],
    *[rate, read, evaluate, average, save, load],
]
PROGRAMS = st.lists(st.tuples(st.sampled_from(LINES), st.integers(0, 99)), min_size=3, max_size=16)


def run(loop: Loop, program: list[tuple[Callable[[Loop, int], None], int]]) -> list[Any]:
    for line, number in program:
        line(loop, number)
    step(loop, 1)
    read(loop, 0)
    return loop.seen


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@given(
    parts=st.frozensets(st.sampled_from(PARTS), max_size=4),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    stage=st.sampled_from([0, 2, 3]),
    program=PROGRAMS,
)
@settings(max_examples=examples(200))
def test_a_loop_of_any_lines_has_the_numbers_of_accelerate(
    parts: frozenset[str], optimizer: str, stage: int, program: Any
) -> None:
    expected = run(Loop(accelerate.Accelerator(cpu=True), parts, optimizer), program)
    found = run(Loop(Accelerator(cpu=True, zero=stage), parts, optimizer), program)
    # A norm is float32, whatever the gradients are.
    as_double = lambda values: [x.double() if isinstance(x, Tensor) else x for x in values]
    torch.testing.assert_close(as_double(found), as_double(expected), rtol=2e-6, atol=1e-8)
