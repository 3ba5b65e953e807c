"""Code writes parameters through views between the steps, as functions of torch.nn.init do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun import optim
from zfun.errors import PlacementError, ZfunError
from zfun.interop import Engine

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
RANKS, WIDTH = 2, 6
THREE = torch.ones(3, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, WIDTH, padding_idx=1)
        self.line = nn.Linear(WIDTH, WIDTH)
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.kernel = nn.Conv1d(WIDTH, WIDTH, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.still(self.line(self.table(x)).tanh())
        return self.kernel(out.T[None])


def rows(net: Net) -> None:
    for row in net.line.weight:
        row.mul_(2.0)


def chunks(net: Net) -> None:
    for part in net.line.weight.chunk(2):
        part.add_(1.0)
    net.line.weight.data.split(4)[0].fill_(0.5)


def several(net: Net) -> None:
    net.line.weight.T.mul_(2.0)
    net.still.weight.view(-1)[2:4].fill_(7.0)
    net.line.weight[0].add_(net.line.weight[1])
    net.line.weight.data[:, 1] += 1.0
    net.line.bias.data[1:].zero_()
    net.kernel.weight.data.flatten(1).copy_(net.kernel.weight.flatten(1).flip(0).clone())
    net.line.bias.mul_(3.0)


def outputs(net: Net) -> None:
    torch.add(net.line.weight[0], 1.0, out=net.line.weight[1])
    net.line.weight.diagonal().zero_()
    torch._foreach_mul_([net.line.weight[2:], net.still.weight.data.t()], 0.5)


WRITES: dict[str, Callable[[Net], Any]] = {
    "rows": rows,
    "chunks": chunks,
    "several": several,
    "outputs": outputs,
    "orthogonal": lambda net: nn.init.orthogonal_(net.line.weight, 0.5),
    "orthogonal data": lambda net: nn.init.orthogonal_(net.still.weight.data),
    "identity": lambda net: nn.init.eye_(net.line.weight),
    "sparse": lambda net: nn.init.sparse_(net.line.weight, 0.5),
    "dirac": lambda net: nn.init.dirac_(net.kernel.weight),
    "padding": lambda net: net.table.reset_parameters(),
}
THEN: dict[str, Callable[[Any, Net, Tensor], Any]] = {
    "a call": lambda engine, net, x: net(x),
    "a call without gradients": lambda engine, net, x: torch.no_grad()(net)(x),
    "a read": lambda engine, net, x: [p.clone() for p in net.parameters()],
    "a norm": lambda engine, net, x: [p.detach().norm() for p in net.parameters()],
    "a state": lambda engine, net, x: {
        name: x.clone() for name, x in (engine or net).state_dict().items()
    },
}


def run(net: Net, engine: Any, write: str, then: str, rank: int | None) -> Any:
    x = torch.arange(7)
    own = [x, x.flip(0)] if rank is None else [[x, x.flip(0)][rank]]
    optimizer = torch.optim.SGD(net.parameters(), 0.1) if engine is None else None
    results = []
    for turn in range(3):
        losses = [net(part).square().mean() for part in own]
        if engine is None:
            assert optimizer is not None
            (sum(losses) / RANKS).backward()  # pyrefly: ignore[missing-attribute]
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(losses[0])
            engine.step()
        # Ranks may draw other numbers; those of rank 0 count.
        torch.manual_seed(turn + 10 * (rank or 0))
        with torch.no_grad():
            WRITES[write](net)
        results.append(THEN[then](engine, net, x))
    return results, dict((engine or net).state_dict())


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("write", WRITES)
@EACH_STAGE
@pytest.mark.shows(
    "a write through a view of a parameter, as of a row",
    "right",
    "all ranks write, and the values of rank 0 are taken when something reads next",
)
def test_a_write_through_a_view_is_one_to_the_parameter(stage: int, write: str, then: str) -> None:
    expected = run(Net(), None, write, then, None)

    def main(group: zf.Group) -> None:
        net = Net()
        trained = [p for p in net.parameters() if p.requires_grad]
        engine = Engine(net, torch.optim.SGD(trained, 0.1), zero=stage, group=group)
        found = run(net, engine, write, then, group.rank)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert not torch.equal(found[1]["line.weight"], Net().line.weight)

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_view_that_code_keeps_is_written_after_a_step(stage: int) -> None:
    """At stage 3 it is a copy from before the step, so a write to it is refused."""

    def main(group: zf.Group) -> None:
        net = Net()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        view = net.line.weight.data.view(-1)
        engine.backward(net(torch.arange(7)).square().mean())
        engine.step()
        before = net.line.weight.detach().clone()
        if stage == 3:
            view.mul_(2.0)
            with pytest.raises(PlacementError, match=r"leaf 'line\.weight' through a view"):
                net(torch.arange(7))
        else:
            torch.testing.assert_close(view, before.view(-1), rtol=0, atol=0)
            view.mul_(2.0)
            torch.testing.assert_close(net.line.weight.detach(), 2 * before, rtol=0, atol=0)

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_two_views_of_one_leaf(stage: int) -> None:
    """At stage 3 each is of a gathered value of its own."""

    def main(group: zf.Group) -> None:
        net = Net()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        with torch.no_grad():
            first, second = net.line.weight[0], net.line.weight[1]
            first.zero_()
            second.fill_(1.0)
        if stage == 3:
            with pytest.raises(ZfunError, match=r"leaf 'line\.weight' through a view"):
                engine.state_dict()
        else:
            assert engine.state_dict()["line.weight"].sum(1)[:2].tolist() == [0.0, WIDTH]

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_values_do_not_stay_with_views_that_are_gone(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = nn.ModuleList(nn.Linear(2, 2) for _ in range(20))
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        with torch.no_grad():
            for p in net.parameters():
                p.view(-1).norm()
            assert len(engine._live._watched._roots) <= (1 if stage == 3 else 8)
            engine.state_dict()
            assert not engine._live._watched._roots

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_master_weight_takes_what_a_view_has_written(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = nn.Linear(4, 4).bfloat16()
        precision = zf.recipes.Precision(param=torch.bfloat16)
        engine = Engine(net, optim.sgd(0.0), zero=stage, group=group, precision=precision)
        with torch.no_grad():
            net.weight[0].fill_(3.0)
        engine.backward(net(torch.ones(1, 4).bfloat16()).float().sum())
        engine.step()
        assert engine.state_dict()["weight"][0].tolist() == [3.0] * 4

    zf.simulate(RANKS, main)


OTHER_ARGUMENTS: dict[str, Callable[[Net], Tensor]] = {
    "by name": lambda net: torch.transpose(input=net.line.weight, dim0=0, dim1=1),
    "second": lambda net: torch.broadcast_tensors(torch.ones(2, 1, 1), net.line.weight)[1],
    "of several": lambda net: torch.atleast_3d(net.line.bias, net.line.weight)[1],
    "in a list": lambda net: torch.meshgrid([THREE, net.line.bias], indexing="ij")[1],
}


@pytest.mark.parametrize("view", OTHER_ARGUMENTS)
@EACH_STAGE
def test_a_write_to_a_view_of_another_argument_is_refused(stage: int, view: str) -> None:
    """At stage 3 it is one of the gathered value, and was lost."""

    def main(group: zf.Group) -> None:
        net = Net()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        with torch.no_grad():
            OTHER_ARGUMENTS[view](net).fill_(7.0)
        with pytest.raises(PlacementError, match=r"leaf 'line\.\w+' through a view"):
            engine(torch.arange(7))

    zf.simulate(1, main)
