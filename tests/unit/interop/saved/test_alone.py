"""``accelerate`` on two processes beside plain accelerate, also calls of one rank alone."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.distributed import processes
from zfun.collectives import Group, Workers
from zfun.errors import CollectiveMismatch

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402, needs accelerate

from zfun.interop.accelerate import Accelerator  # noqa: E402, needs accelerate

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
WIDTH = 4


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with processes(2, timeout_s=200.0, collective_timeout_s=30.0) as held:
        yield held


class Loop:
    """A loop of accelerate with two models and an optimizer, plain without a stage."""

    def __init__(self, group: Group, zero: int | None, **options: Any) -> None:
        words = {"LOCAL_RANK": group.rank, "RANK": group.rank, "WORLD_SIZE": group.size}
        os.environ.update({name: str(number) for name, number in words.items()})
        AcceleratorState._reset_state()
        GradientState._reset_state()
        given: dict[str, Any] = {} if zero is None else {"zero": {"stage": zero, "group": group}}
        cls: Any = accelerate.Accelerator if zero is None else Accelerator
        self.accelerator: Any = cls(cpu=True, **given, **options)
        torch.manual_seed(0)
        frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        bare = nn.Linear(WIDTH, WIDTH, bias=False)  # statistics follow
        self.first = nn.Sequential(bare, nn.BatchNorm1d(WIDTH), frozen)
        self.second = nn.Linear(WIDTH, 1)
        params = [p for x in (self.first, self.second) for p in x.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, 0.05)
        self.models = self.accelerator.prepare(self.first, self.second, optimizer)
        self.rank = group.rank

    def train(self, count: int) -> None:
        first, second, optimizer = self.models
        for index in range(count):
            generator = torch.Generator().manual_seed(10 * index + self.rank)
            x = torch.randn(3, WIDTH, generator=generator)
            self.accelerator.backward(second(first(x)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        parts = (self.first, self.second)
        return [x.detach().clone() for part in parts for x in part.parameters()]


def saved_whole(accelerator: Any, model: Any) -> list[Any]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return [*torch.load(file, weights_only=False).state_dict().values()]


@torch.no_grad()
def output(accelerator: Any, model: Any) -> list[Any]:
    model.eval()
    out = model(torch.ones(2, WIDTH))
    model.train()
    return [out]


READS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "state_dict()": lambda _, model: list(model.state_dict().values()),
    "get_state_dict()": lambda accelerator, model: [*accelerator.get_state_dict(model).values()],
    "parameters": lambda _, model: [p.detach().norm() for p in model.parameters()],
    "an array": lambda _, model: [torch.tensor(p.data.numpy()) for p in model.parameters()],
    "a copy": lambda _, model: list(copy.deepcopy(model).parameters()),
    "a file of the module": saved_whole,
    "a call": output,
}


def hooked(group: Group, zero: int | None, read: str, folder: str) -> Any:
    """Save and load with hooks that read on rank 0 alone; return what they read, and the values."""
    loop = Loop(group, zero)
    accelerator, found = loop.accelerator, list[Tensor]()

    def note(models: Any) -> None:
        for model in models if accelerator.is_main_process else ():
            values = READS[read](accelerator, accelerator.unwrap_model(model))
            found.extend(x.detach().clone() for x in values)

    def save(models: Any, weights: list[Any], output_dir: str) -> None:
        note(models)
        with torch.no_grad():
            loop.second.weight.mul_(2.0)  # on all ranks
        note(models)
        if accelerator.is_main_process:  # DDP's other ranks have buffers of their own
            found.extend(x.clone() for values in weights for x in values.values())

    def load(models: Any, input_dir: str) -> None:
        note(models)
        with torch.no_grad():
            next(loop.first.parameters()).add_(1.0)
        note(models)
        models.pop()

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    loop.train(2)
    accelerator.save_state(f"{folder}/{zero}")
    accelerator.wait_for_everyone()
    for file in sorted(Path(folder, str(zero)).glob("*.safetensors")):
        found.extend(load_file(file).values())
    loop.train(2)
    accelerator.load_state(f"{folder}/{zero}")
    loop.train(2)
    return found, loop.values()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_of_states_read_a_model_on_one_rank(
    stage: int, read: str, workers: Workers, tmp_path: Path
) -> None:
    expected = workers.run(hooked, None, read, str(tmp_path))
    found = workers.run(hooked, stage, read, str(tmp_path))
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def inside(group: Group, zero: int | None) -> Any:
    """Train, and use the model that DDP wraps."""
    loop = Loop(group, zero)
    loop.train(2)
    model = loop.models[0]
    module = model.module if hasattr(model, "module") else model
    own, keys = loop.accelerator.unwrap_model(model), [*module.state_dict()]
    parts = [name for name, _ in module.named_modules()]
    assert own is module
    assert own is loop.first
    copied = copy.deepcopy(model).module
    loop.train(1)
    values = [x.detach().clone() for x in copied.parameters()]
    return keys, parts, output(None, module), values, loop.values()


@pytest.mark.parametrize("stage", range(4))
def test_a_prepared_model_has_module_as_under_ddp(stage: int, workers: Workers) -> None:
    expected, found = (workers.run(inside, zero) for zero in (None, stage))
    for ours, plain in zip(found, expected, strict=True):
        assert ours[:2] == plain[:2]
    # The other rank has statistics of its own under DDP.
    torch.testing.assert_close(found[0][2:], expected[0][2:], rtol=1e-4, atol=1e-6)


CALLS: dict[str, Callable[[Any, Any, str], Any]] = {
    "save_state": lambda accelerator, _, folder: accelerator.save_state(folder),
    "load_state": lambda accelerator, _, folder: accelerator.load_state(folder),
    "save_model": lambda accelerator, model, folder: accelerator.save_model(model, folder),
    "a read": lambda accelerator, model, _: accelerator.unwrap_model(model).state_dict(),
}


def main_alone(group: Group, zero: int, call: str, folder: str) -> None:
    """Call on the main process alone, as scripts under DDP do, beside a call of the other."""
    loop = Loop(group, zero)
    accelerator = loop.accelerator
    loop.train(1)
    if accelerator.is_main_process:
        CALLS[call](accelerator, loop.first, folder)
    accelerator.wait_for_everyone()


ALONE = [
    (0, "save_state", r"save_state\(\)"),
    (2, "save_state", r"save_state\(\)"),
    (3, "save_state", r"save_state\(\)"),
    (3, "load_state", r"load_state\(\)"),
    (3, "save_model", r"get_state_dict\(\) or save_model\(\)"),
    (3, "a read", r"state_dict\(\)"),
]


@pytest.mark.parametrize(("stage", "call", "words"), ALONE)
def test_a_call_of_one_rank_is_named_and_no_rank_waits(
    stage: int, call: str, words: str, tmp_path: Path
) -> None:
    other = (
        r"wait_for_everyone\(\) of an Accelerator, which all ranks call: take it out of any .if."
    )
    with processes(2, timeout_s=100.0, collective_timeout_s=90.0) as workers:
        outcomes = workers.outcomes(main_alone, stage, call, str(tmp_path))
    for outcome in outcomes:
        with pytest.raises(CollectiveMismatch, match=words) as caught:
            raise outcome  # pyrefly: ignore[bad-raise]
        caught.match(other)
