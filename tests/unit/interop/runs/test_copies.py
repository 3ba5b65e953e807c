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


class Own(nn.Module):
    """A module whose class code patches, and whose copies have other attributes."""

    times = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.times * self.out(self.into(x).tanh())


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        return 2 * super().forward(x)


def cloned(module: Any) -> Any:
    """A copy as ``clone_module`` of learn2learn makes it: by attributes, with tensors for MAML."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {name: x.clone() for name, x in module._parameters.items()}
    clone._modules = {name: cloned(x) for name, x in module._modules.items()}
    return clone


def of_a_clone(net: Any, x: Tensor) -> Tensor:
    """One step of MAML."""
    clone = cloned(net)
    parts = [clone.into, clone.out]
    names = [(part, name) for part in parts for name in part._parameters]
    own = [part._parameters[name] for part, name in names]
    grads = torch.autograd.grad(clone(x).square().mean(), own, create_graph=True)
    for (part, name), value, grad in zip(names, own, grads, strict=True):
        part._parameters[name] = value - 0.5 * grad
    return clone(x)


def of_a_shallow_copy(net: Any, x: Tensor) -> Tensor:
    other = copy.copy(net)
    other.times = 3.0
    return other(x)


def of_a_patched_class(net: Any, x: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Own, "forward", lambda self, x: self.out(self.into(x).relu()))
        return net(x)


def of_a_swapped_class(net: Any, x: Tensor) -> Tensor:
    net.into.__class__ = Twice
    return net(x)


def of_a_replica(net: Any, x: Tensor) -> Tensor:
    replica = net._replicate_for_data_parallel()
    replica.into, replica.out = nn.Linear(WIDTH, WIDTH, bias=False), net.out
    nn.init.ones_(replica.into.weight)
    return replica(x)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("is_call", [False, True])
@pytest.mark.parametrize(
    "used",
    [of_a_clone, of_a_shallow_copy, of_a_patched_class, of_a_swapped_class, of_a_replica],
)
def test_the_code_that_runs_is_that_of_now_and_of_the_copy(
    used: Callable[..., Tensor], is_call: bool, stage: int
) -> None:
    """The forward of the original, as it was when the engine was made, ran in its place."""
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    plain = Own()
    for _ in range(2):
        plain.zero_grad()
        used(plain, x).square().mean().backward()
        torch.optim.SGD(plain.parameters(), 0.1).step()

    def main(group: zf.Group) -> Any:
        net = Own()
        engine = Engine(net, torch.optim.SGD(net.parameters(), 0.1), zero=stage, group=group)
        for _ in range(2):
            out = engine.run(used, net, x) if is_call else used(net, x)
            engine.backward(out.square().mean())
            engine.step()
        return engine.state_dict()

    torch.testing.assert_close(zf.simulate(1, main)[0], plain.state_dict())
