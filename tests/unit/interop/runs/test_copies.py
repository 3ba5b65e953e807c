"""A copy of a live module has values and code of its own, however it is made."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun.interop import Engine
from zfun.interop.accelerate import Accelerator

WIDTH = 4


def scaled(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return 1.5 * forward(x)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        return checkpoint(super().forward, x, use_reentrant=False)


def layers(kind: type = nn.Sequential, between: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return kind(nn.Linear(WIDTH, WIDTH), between or nn.Tanh(), nn.Linear(WIDTH, 1))


def compiled() -> Any:
    net = layers()
    net[0].compile(backend="eager")
    return net


def compiled_whole() -> Any:
    net = layers()
    net.compile(backend="eager")
    return net


def patched() -> Any:
    net = layers()
    net[0].forward = functools.partial(scaled, net[0].forward)
    return net


MODULES: dict[str, Callable[[], Any]] = {
    "plain": layers,
    "checkpoints": lambda: layers(Checkpointed),
    "batch norm": lambda: layers(between=nn.BatchNorm1d(WIDTH)),
    "compiled": compiled,
    "compiled whole": compiled_whole,
    "patched": patched,
}


def saved(net: Any) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": saved,
}


def of_engine(net: Any, stage: int) -> tuple[Any, Callable[[Tensor], None]]:
    engine = Engine(net, zf.optim.sgd(0.1), zero=stage, group=zf.process_group())

    def train(x: Tensor) -> None:
        engine.backward(net(x).square().mean())
        engine.step()

    return net, train


def of_accelerate(
    net: Any, stage: int, kind: Any = Accelerator, **options: Any
) -> tuple[Any, Callable[[Tensor], None]]:
    if kind is Accelerator:
        options["zero"] = stage
    accelerator = kind(cpu=True, **options)
    rule = torch.optim.SGD(net.parameters(), 0.1)
    net, rule = accelerator.prepare(net, rule)

    def train(x: Tensor) -> None:
        accelerator.backward(net(x).square().mean())
        rule.step()
        rule.zero_grad()

    return accelerator.unwrap_model(net), train


HOSTS: dict[str, Callable[[Any, int], tuple[Any, Callable[[Tensor], None]]]] = {
    "engine": of_engine,
    "accelerate": of_accelerate,
    "accelerate in bf16": functools.partial(of_accelerate, mixed_precision="bf16"),
}


def numbers_of(net: Any, found: Any, train: Callable[[Tensor], None]) -> list[Tensor]:
    """Return what a copy computes: as it is made, with other values, and after the net trains."""
    x = torch.linspace(-1.0, 1.0, 3 * WIDTH).view(3, WIDTH)
    seen = [found(x).detach()]
    with torch.no_grad():
        for value in found.parameters():
            value.mul_(0.5)
    found(x).sum().backward()
    seen += [found(x).detach(), *(value.grad for value in found.parameters())]
    train(x)
    return [*seen, found(x).detach(), net(x).detach()]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("kind", MODULES)
def test_a_copy_has_values_and_code_of_its_own(kind: str, host: str, way: str, stage: int) -> None:
    """Under autocast of ``accelerate`` a copy computed with the values of the model."""
    if host == "accelerate in bf16":
        plain = of_accelerate(MODULES[kind](), 0, accelerate.Accelerator, mixed_precision="bf16")
    else:
        net = MODULES[kind]()
        rule = torch.optim.SGD(net.parameters(), 0.1)

        def train(x: Tensor) -> None:
            net(x).square().mean().backward()
            rule.step()
            rule.zero_grad()

        plain = net, train
    live = HOSTS[host](MODULES[kind](), stage)
    results = []
    for its, advance in (plain, live):
        its.eval()
        advance(torch.ones(2, WIDTH))
        results.append(numbers_of(its, COPIES[way](its), advance))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


SHARED = nn.Tanh()


@pytest.mark.parametrize("stage", [0, 3])
def test_models_share_parts_without_parameters(stage: int) -> None:
    """As openai-gpt shares its function of activation; the second engine was refused."""
    nets = [layers(between=SHARED), layers(between=SHARED)]
    plain = layers(between=SHARED)
    (first, train), (second, train_second) = (of_engine(net, stage) for net in nets)
    x = torch.ones(2, WIDTH)
    train(x)
    torch.testing.assert_close(second(x), plain(x))
    train_second(x)
    torch.testing.assert_close(second(x), first(x))


def test_a_copy_that_an_evaluation_makes_moves(tmp_path: Any) -> None:
    """``to`` of the copy gave the model."""
    transformers = pytest.importorskip("transformers")
    trainers = pytest.importorskip("tests.interop.trainers")
    from zfun.interop.transformers import Trainer, TrainingArguments

    copies: list[Any] = []

    class Copies(transformers.TrainerCallback):
        def on_prediction_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            copies.append(copy.deepcopy(model).to(torch.float64))

    arguments: Any = TrainingArguments
    args = arguments(output_dir=str(tmp_path), zero=2, use_cpu=True, max_steps=1, report_to=[])
    trainer: Any = Trainer(
        model=trainers.model(),
        args=args,
        train_dataset=trainers.rows(),
        eval_dataset=trainers.rows()[:4],
        callbacks=[Copies()],
    )
    trainer.train()
    trainer.evaluate()
    assert copies
    assert all(x is not trainer.model for x in copies)
    assert {value.dtype for value in copies[0].parameters()} == {torch.float64}
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
