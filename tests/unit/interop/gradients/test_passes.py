"""Gradients of an engine that are read between its backward passes, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun.interop import Engine

SHARDED_OR_NOT = pytest.mark.parametrize("stage", [1, 3])
# The leaves of one micro-batch are those that the other one misses.
BATCHES = torch.linspace(-1, 2, 12, dtype=torch.float64).view(2, 2, 3)


class Heads(nn.Module):
    """A body with two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
        self.double()
        for index, param in enumerate(self.parameters()):
            param.data = torch.linspace(-1, index + 1, param.numel()).double().view_as(param)

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).tanh()).square().mean()


def started() -> tuple[Heads, torch.optim.Optimizer]:
    net = Heads()
    return net, torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5, eps=1e-2)


class Plain:
    """The methods of an engine in plain torch."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
        self.module, self.optimizer, self.accumulate = net, optimizer, accumulate

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulate).backward()

    def norm(self) -> Tensor:
        return self.clip(torch.inf)

    def clip(self, max_norm: float) -> Tensor:
        trained = [x for group in self.optimizer.param_groups for x in group["params"]]
        return nn.utils.clip_grad_norm_(trained, max_norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def read(loop: Any) -> Any:
    return {name: None if x.grad is None else x.grad.clone() for name, x in named(loop.module)}


def read_one(loop: Any) -> Any:
    # The gradient of one parameter stands for all.
    return loop.module.body.weight.grad.clone()


def named(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(net.named_parameters())


def norm(loop: Any) -> Tensor:
    return loop.norm()


def clip(loop: Any) -> Tensor:
    return loop.clip(0.1)


def clip_less(loop: Any) -> Tensor:
    return loop.clip(0.5)


def penalty(loop: Any) -> None:
    """A gradient that comes after others, without a call of the engine."""
    (0.1 * loop.module.body.weight.square().sum()).backward()


def grads_of(loop: Any) -> list[Tensor]:
    return [x.grad for x in loop.module.parameters() if x.grad is not None]


def halve_and_clamp(loop: Any) -> None:
    for x in loop.module.parameters():
        if x.grad is not None:
            x.grad.mul_(0.5)
    nn.utils.clip_grad_value_(loop.module.parameters(), 0.05)


def write_held(loop: Any) -> Any:
    """Gradients that code holds are those of the parameters, also after writes and reads."""
    held = grads_of(loop)
    held[0].mul_(2.0)
    norms = [x.norm() for x in grads_of(loop)]
    for grad in held:
        grad.clamp_(-0.1, 0.1)
    return norms, [x is y for x, y in zip(held, grads_of(loop), strict=True)]


# The calls of a loop after each of the two passes of a step.
ACTS: dict[str, list[list[Callable[[Any], Any]]]] = {
    "read last": [[], [read]],
    "read first": [[read_one], []],
    "norm first": [[norm], []],
    "norms": [[norm], [norm]],
    "all": [[norm, read], [read, norm, read]],
    "clips": [[clip], [clip]],
    "clip and read": [[clip, read], [clip_less]],
    "two bounds": [[clip, clip_less], [clip_less, clip, norm]],
    "halved": [[], [halve_and_clamp, read]],
    "halved first": [[halve_and_clamp], [halve_and_clamp]],
    "held": [[write_held], [write_held, halve_and_clamp, write_held]],
}


def trained(loop: Any, acts: list[list[Callable[[Any], Any]]], extra: Any = None) -> Any:
    """Return what the acts have returned in two steps, and the values."""
    net, found = loop.module, []
    for _ in range(2):
        for head, x in enumerate(BATCHES):
            loss = net(x, head)
            if extra is not None:
                loss = loss * extra + net.body.weight.square().sum()
            loop.backward(loss)
            del loss  # whose graph has a tensor that was gathered outside of a call
            found += [act(loop) for act in acts[head]]
        loop.step()
        if extra is not None:
            extra.grad = None
    return found, {name: x.clone() for name, x in net.state_dict().items()}


def assert_as_in_torch(
    stage: int, acts: Any, *, strays: bool, clips: bool = True, accumulate: int = 2
) -> None:
    """Compare what a loop reads, and the values, with those of plain torch."""

    def run(make: Callable[[nn.Module, Any, Any], Any]) -> Any:
        net, extra = Heads(), nn.Parameter(torch.full((), 1.5, dtype=torch.float64))
        params = [*net.parameters(), *([extra] if strays else [])]
        # Two groups, and so two buckets.
        groups: list[Any] = [
            {"params": [x for x in params if (x.dim() > 1) is is_matrix], "weight_decay": decay}
            for is_matrix, decay in ((True, 0.5), (False, 0.0))
        ]
        optimizer = torch.optim.AdamW(groups, 0.1, eps=1e-2)
        loop = make(net, optimizer, extra if strays else None)
        return trained(loop, acts, extra if strays else None), extra.detach().clone()

    expected = run(lambda net, optimizer, extra: Plain(net, optimizer, accumulate))

    def main(group: zf.Group) -> None:
        def make(net: nn.Module, optimizer: Any, extra: Any) -> Engine:
            more: dict[str, Any] = {} if extra is None else {"extra": {"scale": extra}}
            more |= {"clip_norm": 1e9} if clips else {}
            return Engine(net, optimizer, zero=stage, group=group, accumulate=accumulate, **more)

        torch.testing.assert_close(run(make), expected, rtol=1e-5, atol=1e-7, check_dtype=False)

    zf.simulate(2, main)


@pytest.mark.parametrize("strays", [False, True], ids=["calls", "strays"])
@pytest.mark.parametrize("acts", ACTS)
@SHARDED_OR_NOT
def test_reads_and_clips_between_passes_are_those_of_torch(
    stage: int, acts: str, strays: bool
) -> None:
    """Also where parameters of a loss, and parameters outside of calls, have gradients."""
    assert_as_in_torch(stage, ACTS[acts], strays=strays)


@SHARDED_OR_NOT
def test_an_engine_that_never_clips_clips_when_it_is_told(stage: int) -> None:
    assert_as_in_torch(stage, ACTS["clips"], strays=False, clips=False)


@pytest.mark.parametrize("first", [norm, clip, read])
@SHARDED_OR_NOT
def test_a_gradient_that_comes_after_the_norm_counts(stage: int, first: Any) -> None:
    assert_as_in_torch(stage, [[first, penalty], [first, penalty]], strays=False, accumulate=1)


@SHARDED_OR_NOT
def test_a_leaf_that_no_rank_has_used_has_no_gradient(stage: int) -> None:
    """So AdamW does not decay it after a read; one rank that uses it is enough."""

    def main(group: zf.Group) -> None:
        for heads in ((0, 0), (0, 1)):
            net, optimizer = started()
            before = net.get_parameter("heads.1.weight").detach().clone()
            engine = Engine(net, optimizer, zero=stage, group=group)
            engine.backward(engine(BATCHES[0], heads[group.rank]))
            is_used = 1 in heads
            assert (net.get_parameter("heads.1.weight").grad is not None) is is_used
            engine.step()
            assert torch.equal(engine.state_dict()["heads.1.weight"], before) is not is_used

    zf.simulate(2, main)


@SHARDED_OR_NOT
def test_weighted_passes_go_on_after_the_norm(stage: int) -> None:
    weights = (1.0, 3.0, 2.0)

    def trained(group: zf.Group, *, reads: bool) -> dict[str, Any]:
        net, optimizer = started()
        engine = Engine(net, optimizer, zero=stage, group=group, accumulate=3)
        for turn, weight in enumerate(weights):
            loss = engine(BATCHES[turn % 2], turn % 2)
            engine.backward(zf.transforms.weighted_mean(loss * weight, torch.tensor(weight)))
            if reads:
                engine.norm()
        engine.step()
        return engine.state_dict()

    def main(group: zf.Group) -> None:
        torch.testing.assert_close(trained(group, reads=True), trained(group, reads=False))

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_plain_backward_adds_to_what_grad_shows(stage: int) -> None:
    """As in torch, and the step takes ``.grad``: passes of the engine are halves, and this is 1."""
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.zero_()
    sgd = torch.optim.SGD(net.parameters(), 1.0)
    engine = Engine(net, sgd, zero=stage, accumulate=2, group=zf.process_group())
    engine.backward(engine(torch.ones(1, 1)).sum())
    assert float(net.weight.grad) == 0.5  # pyrefly: ignore[bad-argument-type]
    net.weight.sum().backward()
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    assert float(engine.state_dict()["weight"]) == -2.0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_may_call_alone_where_parameters_are_whole(stage: int) -> None:
    """As under DDP: a call for a log, of a part too; and backward passes in an order of its own."""

    def main(group: zf.Group) -> dict[str, Any]:
        net, optimizer = started()
        engine = Engine(net, optimizer, zero=stage, group=group, accumulate=2)
        logs, own = [], group.rank == 0
        for _ in range(2):
            if own:
                logs.append(engine(BATCHES[0], 1))
            losses = [engine(x, head) for head, x in enumerate(BATCHES)]
            if own:
                logs += [net.heads[1](BATCHES[1]), engine(BATCHES[1], 0)]
            for loss in reversed(losses) if own else losses:
                engine.backward(loss)
            if own:
                logs.append(engine(BATCHES[1], 1))
            engine.step()
        assert not own or len({float(x.detach().sum()) for x in logs}) == len(logs)
        return engine.state_dict()

    net, optimizer = started()
    expected = trained(Plain(net, optimizer, 2), [[], []])[1]
    for found in zf.simulate(2, main):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@SHARDED_OR_NOT
def test_backward_of_another_model_on_a_rank_is_refused(stage: int) -> None:
    """Models of one form, whose gradients would be summed without a word."""

    def main(group: zf.Group) -> None:
        engines = [Engine(*started(), zero=stage, group=group) for _ in range(2)]
        losses = [engine(BATCHES[0], 0) for engine in engines]
        which = group.rank
        with pytest.raises(zf.errors.CollectiveMismatch, match="the same calls in the same order"):
            engines[which].backward(losses[which])

    zf.simulate(2, main)
