"""Graphs that a loop keeps, drops, or differentiates one by one, beside plain torch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import ranks
from zfun.errors import OptionError
from zfun.interop import Engine
from zfun.interop.deepspeed import utils

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
X = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 2, 3)


class Net(nn.Module):
    """Two blocks and a head, a leaf that no call uses, and blocks that backward may run again."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.unused = nn.Parameter(torch.ones(2))
        self.reentrant = reentrant
        self.results: list[StorageWeakRef] = []
        self.double()
        for index, param in enumerate(self.parameters()):
            param.data = torch.linspace(-1, index + 1, param.numel()).double().view_as(param)

    def again(self, x: Tensor) -> Tensor:
        return self.block(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        # The result is what sigmoid saves for backward.
        self.results.append(StorageWeakRef(x.untyped_storage()))
        if self.reentrant is None:
            x = self.again(x)
        else:
            x = checkpoint(self.again, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()


def decaying(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5, eps=1e-2)


class Plain:
    """The methods of an engine in plain torch."""

    def __init__(self, net: nn.Module) -> None:
        self.module, self.optimizer = net, decaying(net)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_as_in_torch(
    stage: int, reentrant: bool | None, turn: Callable[[Any, Tensor], None]
) -> None:
    """Compare the values after some steps, of which ``turn`` runs the passes."""

    def run(make: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
        net = Net(reentrant)
        loop = make(net)
        for step in range(4):
            # A leaf that has moments is frozen for two steps, and moves no further.
            net.head.weight.requires_grad_(step not in (1, 2))
            turn(loop, X * (step + 1))
            loop.step()
        return {name: x.clone() for name, x in net.state_dict().items()}

    expected = run(Plain)
    assert torch.equal(expected["unused"], Net().unused)

    def main(group: zf.Group) -> None:
        found = run(lambda net: Engine(net, decaying(net), zero=stage, group=group))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)

    zf.simulate(2, main)


def kept_once(loop: Any, xs: Tensor) -> None:
    loop.backward(loop.module(xs[0]), retain_graph=True)


def kept_and_again(loop: Any, xs: Tensor) -> None:
    loss = loop.module(xs[0])
    loop.backward(loss, retain_graph=True)
    loop.backward(loss * 0.5)


def two_losses(loop: Any, xs: Tensor) -> None:
    shared = loop.module(xs[0])
    loop.backward(shared.sin(), retain_graph=True)
    loop.backward(shared.cos())


@pytest.mark.parametrize("turn", [kept_once, kept_and_again, two_losses])
@EACH_STAGE
def test_a_kept_graph_moves_no_leaf_that_it_does_not_use(stage: int, turn: Any) -> None:
    """AdamW would decay a frozen leaf that counts as used."""
    assert_as_in_torch(stage, None, turn)


def in_order(loop: Any, xs: Tensor) -> None:
    losses = [loop.module(x) for x in xs]
    for loss in losses:
        loop.backward(loss)


def in_reverse(loop: Any, xs: Tensor) -> None:
    losses = [loop.module(x) for x in xs]
    for loss in reversed(losses):
        loop.backward(loss)


def with_a_kept_one(loop: Any, xs: Tensor) -> None:
    losses = [loop.module(x) for x in xs]
    loop.backward(losses[0], retain_graph=True)
    loop.backward(losses[1] + losses[2])
    loop.backward(losses[0] * losses[3])


def with_a_hook(loop: Any, xs: Tensor) -> None:
    """A hook of a parameter counts once for each call, also where a block runs again."""
    handle = loop.module.block.weight.register_hook(lambda grad: 2 * grad)
    in_reverse(loop, xs)
    handle.remove()


def with_a_late_hook(loop: Any, xs: Tensor) -> None:
    """A hook that comes after the calls counts too, once for all uses of a call."""
    losses = [loop.module(x) for x in xs]
    handle = loop.module.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    for loss in losses:
        loop.backward(loss)
    handle.remove()


def with_a_hook_and_a_penalty(loop: Any, xs: Tensor) -> None:
    """The parameter is used outside of calls too."""
    weight = loop.module.block.weight
    handle = weight.register_hook(lambda grad: 2 * grad)
    loop.backward(loop.module(xs[0]) + weight.square().sum())
    handle.remove()


TURNS = [
    in_order,
    in_reverse,
    with_a_kept_one,
    with_a_hook,
    with_a_late_hook,
    with_a_hook_and_a_penalty,
]


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "saved", "reentrant"])
@EACH_STAGE
def test_each_call_has_a_pass_of_its_own(stage: int, reentrant: bool | None, turn: Any) -> None:
    """A block that backward runs again reads the parameters of its own call."""
    assert_as_in_torch(stage, reentrant, turn)


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept and dropped"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "saved", "reentrant"])
@EACH_STAGE
def test_a_graph_is_freed_with_its_results(stage: int, reentrant: bool | None, keeps: bool) -> None:
    """Without garbage collection, and also where no backward pass frees what autograd saves."""

    def main(group: zf.Group) -> None:
        net = Net(reentrant)
        engine = Engine(net, decaying(net), zero=stage, group=group)
        for step in range(3):
            net.results.clear()
            losses = [net(x) for x in X]
            if keeps:
                for loss in losses:
                    engine.backward(loss, retain_graph=True)
            assert not any(x.expired() for x in net.results)
            del losses[:]
            loss = None
            assert all(x.expired() for x in net.results), step
            engine.zero_grad()
            engine.backward(net(X[0]))
            engine.step()

    zf.simulate(2, main)


def test_calls_without_a_pass_are_forgotten() -> None:
    """A loop without ``no_grad()`` and steps keeps a bounded number of calls."""
    net = Net(reentrant=True)
    engine = Engine(net, decaying(net), zero=0, group=zf.collectives.single_group())

    def num_tensors() -> int:
        net.results.clear()
        return sum(isinstance(x, Tensor) for x in gc.get_objects())

    counts = []
    for _ in range(3):
        for _ in range(80):
            engine(X[0])
        counts.append(num_tensors())
    assert counts[2] <= counts[1]


def facade(stage: int, group: zf.Group, gas: int = 1) -> Any:
    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=decaying(net),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
        },
        mpu=ranks(group),
    )
    return engine


@EACH_STAGE
def test_safe_gradients_are_those_that_the_step_takes(stage: int) -> None:
    """With a penalty, whose gradient comes from outside of calls, and for leaves without any."""
    plain = Net()
    (plain(X[0]) + plain.block.weight.square().sum()).backward()
    want = {name: x.grad.float() for name, x in plain.named_parameters() if x.grad is not None}

    def main(group: zf.Group) -> None:
        engine = facade(stage, group)
        net = engine.module
        assert utils.safe_get_full_grad(net.block.weight) is None
        engine.backward(engine(X[0]) + net.block.weight.square().sum())
        with pytest.raises(OptionError, match=r"'block.weight' from outside of calls.*_full_grad"):
            utils.safe_get_local_grad(net.block.weight)
        found = {name: utils.safe_get_full_grad(x) for name, x in net.named_parameters()}
        assert found.pop("unused") is None
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)

        before: Any = utils.safe_get_full_fp32_param(net.block.weight)
        utils.safe_set_full_grad(net.block.weight, torch.zeros(3, 3).double())
        utils.safe_set_full_grad(net.unused, torch.tensor([1.0, -1.0]).double())
        torch.testing.assert_close(utils.safe_get_full_grad(net.unused), torch.tensor([1.0, -1.0]))
        engine.step()
        # AdamW decays both: the first has a gradient of zero.
        after = utils.safe_get_full_fp32_param(net.block.weight)
        torch.testing.assert_close(after, before * (1 - 0.1 * 0.5))
        after = utils.safe_get_full_fp32_param(net.unused)
        expected = Net().unused.detach().float() * 0.95 + torch.tensor([-0.1, 0.1])
        torch.testing.assert_close(after, expected, atol=2e-3, rtol=0)

    zf.simulate(2, main)


@EACH_STAGE
def test_gradients_may_be_dropped_within_a_step(stage: int) -> None:
    def main(group: zf.Group) -> None:
        found = []
        for drops in (False, True):
            engine = facade(stage, group, gas=2)
            if drops:
                engine.backward(engine(X[1]))
            engine.zero_grad()
            engine.step()
            engine.backward(engine(X[0]))
            engine.step()
            assert (engine.micro_steps, engine.global_steps) == (2, 1)
            found.append(engine.module_state_dict())
        torch.testing.assert_close(*found, rtol=0, atol=0)

    zf.simulate(2, main)


@EACH_STAGE
def test_a_parameter_may_be_written_in_a_context_after_a_read(stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine = facade(stage, group)
        net = engine.module
        for _ in range(2):
            with deepspeed.zero.GatheredParameters(list(net.parameters())):
                before = net.head.weight.detach().clone()
            with (
                deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0),
                torch.no_grad(),
            ):
                if group.rank == 0:
                    net.head.weight.add_(1.0)
            engine(X[0])
            found = utils.safe_get_full_fp32_param(net.head.weight)
            torch.testing.assert_close(found, (before + 1).float())

    zf.simulate(2, main)
