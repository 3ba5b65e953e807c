"""A call may write frozen parameters, such as those of a momentum encoder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun.errors import PlacementError, ZfunError
from zfun.interop import Engine

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
RANKS, WIDTH, DECAY = 2, 5, 0.7


def assigned(net: Net) -> None:
    for k, q in net.pairs():
        k.data = k.data * DECAY + q.data * (1 - DECAY)


def in_place_on_data(net: Net) -> None:
    for k, q in net.pairs():
        k.data.mul_(DECAY).add_(q.data, alpha=1 - DECAY)


def in_place(net: Net) -> None:
    for k, q in net.pairs():
        k.mul_(DECAY).add_(q, alpha=1 - DECAY)


def copied(net: Net) -> None:
    for k, q in net.pairs():
        k.copy_(DECAY * k + (1 - DECAY) * q.detach())


def into(net: Net) -> None:
    for k, q in net.pairs():
        torch.lerp(k, q, 1 - DECAY, out=k)


def by_rows(net: Net) -> None:
    for k, q in net.pairs():
        k[1:] = q[1:]
        k.data[0] = k[0] * DECAY


def for_each(net: Net) -> None:
    own: Any = list(net.key.parameters())
    others: Any = list(net.query.parameters())
    torch._foreach_mul_(own, DECAY)
    torch._foreach_add_(own, others, alpha=1 - DECAY)


def loaded(net: Net) -> None:
    net.key.load_state_dict({k: x * DECAY for k, x in net.query.state_dict().items()})


STALE = r"needed for gradient|leaf 'key\.\d.*after backward"
Update = Callable[[Any], None]
UPDATES = [assigned, in_place_on_data, in_place, copied, into, by_rows, for_each, loaded]


class Net(nn.Module):
    """A trained encoder, and one that follows it; its activations have gradients too."""

    def __init__(self, update: Update, order: str) -> None:
        super().__init__()
        self.update, self.order = torch.no_grad()(update), order
        torch.manual_seed(0)
        self.query = self.encoder()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        # Frozen too, in the buckets of the others; backward needs it.
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.double()

    @staticmethod
    def encoder() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def pairs(self) -> Any:
        return zip(self.key.parameters(), self.query.parameters(), strict=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.still(self.query(x).tanh())
        if self.order == "before":
            self.update(self)
            return out - self.key(self.query(x + 1))
        with torch.no_grad():
            first = self.key(x)
        self.update(self)
        if self.order == "between":
            first = first + self.key(x).detach()
        return out - first


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(3, WIDTH, generator=generator).double() for _ in range(RANKS)]
        for _ in range(4)
    ]


def plain_run(net: Net, between: Callable[[Net], Any] = lambda net: None) -> dict[str, Tensor]:
    """Train as DDP does, and return the changes."""
    start = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
    for data in batches():
        key = copy.deepcopy(net.key.state_dict())
        for x in data:
            # Each rank has a key encoder of its own.
            net.key.load_state_dict(key)
            (net(x).square().mean() / RANKS).backward()
        between(net)
        optimizer.step()
        optimizer.zero_grad()
    return {name: x - start[name] for name, x in net.state_dict().items()}


def run(
    make: Callable[[], Net],
    stage: int,
    between: Callable[[Net], Any],
    data: list[list[Tensor]],
    group: zf.Group,
) -> dict[str, Tensor]:
    net = make()
    start = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
    engine = Engine(net, optimizer, zero=stage, group=group)
    for batch in data:
        loss = engine(batch[group.rank]).square().mean()
        between(net)
        engine.backward(loss)
        engine.step()
    return {name: x - start[name] for name, x in engine.state_dict().items()}


def assert_as_ddp(
    make: Callable[[], Net], stage: int, between: Callable[[Net], Any] = lambda net: None
) -> None:
    expected = plain_run(make(), between)
    assert expected["key.0.weight"].any()
    for found in zf.simulate(RANKS, partial(run, make, stage, between, batches())):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", ["before", "between", "after"])
@pytest.mark.parametrize("update", UPDATES)
@EACH_STAGE
@pytest.mark.shows(
    "a momentum encoder that `forward` or `training_step` updates",
    "right",
    "its parameters are frozen and in no optimizer; the values of rank 0 stay",
)
def test_a_call_updates_a_frozen_encoder(stage: int, update: Update, order: str) -> None:
    """Later reads of the call have the new values, at stage 3 of sharded sources."""
    assert_as_ddp(partial(Net, update, order), stage)


@EACH_STAGE
def test_one_rank_alone_updates_a_frozen_encoder(stage: int) -> None:
    for order in ("before", "after"):
        data = [batch[:1] for batch in batches()]
        net = Net(in_place, order)
        start, optimizer = copy.deepcopy(net.state_dict()), torch.optim.SGD(net.parameters(), 0.1)
        for (x,) in data:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        expected = {name: x - start[name] for name, x in net.state_dict().items()}
        group = zf.process_group()
        found = run(partial(Net, in_place, order), stage, lambda net: None, data, group)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@EACH_STAGE
def test_a_call_without_gradients_updates_a_frozen_encoder(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net, plain = Net(in_place, "before"), Net(in_place, "before")
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=stage, group=group)
        with torch.no_grad():
            next(plain.key.parameters()).zero_()
            next(net.key.parameters()).zero_()
            for x in (torch.ones(1, WIDTH).double(), torch.zeros(1, WIDTH).double()):
                torch.testing.assert_close(net(x), plain(x))
        torch.testing.assert_close(engine.state_dict(), dict(plain.state_dict()))

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_the_values_of_rank_0_stay_after_a_call(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = Net(lambda net: next(net.key.parameters()).fill_(group.rank + 1.0), "before")
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=stage, group=group)
        engine.backward(engine(batches()[0][group.rank]).square().mean())
        assert next(net.key.parameters()).tolist() == [[1.0] * WIDTH] * WIDTH
        engine.step()

    zf.simulate(RANKS, main)


def ema(net: Net) -> None:
    with torch.no_grad():
        in_place(net)


@EACH_STAGE
def test_an_average_follows_between_a_call_and_its_backward_pass(stage: int) -> None:
    """As in on_before_zero_grad of Lightning; the call has read the average without a graph."""
    assert_as_ddp(partial(Net, lambda net: None, "after"), stage, ema)


@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("way", ["in a call", "between"])
@EACH_STAGE
def test_a_write_to_a_value_that_backward_needs_is_refused(
    stage: int, way: str, ranks: int
) -> None:
    def loss(net: Net, x: Tensor) -> Tensor:
        out = net.key(net.query(x)).square().mean()
        if way == "in a call":
            ema(net)
        return out

    def main(group: zf.Group) -> None:
        net = Net(in_place, "before")
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=stage, group=group)
        x = batches()[0][group.rank]
        for _ in range(2):
            # The second step of a rank alone gathers nothing.
            engine.backward(engine.run(lambda: net.query(x).square().mean()))
            engine.step()
        out = engine.run(loss, net, x)
        if way == "between":
            ema(net)
        with pytest.raises((RuntimeError, PlacementError), match=STALE):
            engine.backward(out)

    zf.simulate(ranks, main)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_value_that_backward_gathers_again_is_refused(reentrant: bool) -> None:
    def main(group: zf.Group) -> None:
        net = Net(in_place, "before")
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=3, group=group)
        x = batches()[0][group.rank]
        block = lambda x: net.key(net.query(x))
        start = x.requires_grad_()
        out = engine.run(lambda: checkpoint(block, start, use_reentrant=reentrant).sum())
        ema(net)
        with pytest.raises(PlacementError, match=r"leaf 'key\.0\.\w+' between a call"):
            engine.backward(out)

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_write_in_a_block_that_backward_runs_again_is_refused(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = Net(in_place, "before")
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=stage, group=group)
        x = batches()[0][group.rank]
        out = engine.run(lambda: checkpoint(net.forward.own, x, use_reentrant=False).sum())  # pyrefly: ignore[missing-attribute]
        with pytest.raises(PlacementError, match=r"runs again; got .* leaf 'key\.0\.weight'"):
            engine.backward(out)

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("leaf", ["query.0.weight", "still.weight"])
@EACH_STAGE
def test_a_call_that_writes_a_leaf_of_an_optimizer_is_refused(stage: int, leaf: str) -> None:
    """Its moments belong to the old value, also while it is frozen."""

    def main(group: zf.Group) -> None:
        net = Net(lambda net: dict(net.named_parameters())[leaf].mul_(0.5), "before")
        trained = [*net.query.parameters(), *net.still.requires_grad_(True).parameters()]
        engine = Engine(net, torch.optim.SGD(trained, 0.1), zero=stage, group=group)
        net.still.requires_grad_(False)
        with pytest.raises(PlacementError, match=rf"on leaf '{leaf}'; write between the steps"):
            engine(batches()[0][group.rank])

    zf.simulate(RANKS, main)


AROUND: dict[str, Update] = {
    "an attribute": lambda net: net.key[0].weight.mul_(DECAY),
    "data of an attribute": lambda net: net.key[0].weight.data.mul_(DECAY),
    "a row": lambda net: next(net.key.parameters())[0].zero_(),
    "a view": lambda net: next(net.key.parameters()).data.view(-1).mul_(DECAY),
    "numpy": lambda net: next(net.key.parameters()).detach().numpy().fill(1.0),
}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("way", AROUND)
@EACH_STAGE
def test_a_write_around_the_parameter_in_a_call_is_refused(
    stage: int, way: str, order: str
) -> None:
    def main(group: zf.Group) -> None:
        net = Net(AROUND[way], order)
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=stage, group=group)
        with pytest.raises(ZfunError, match=r"leaf 'key\.0\.weight'"):
            engine.backward(engine(batches()[0][group.rank]).square().mean())

    zf.simulate(RANKS, main)


def test_a_write_where_ranks_call_differently_often_is_refused() -> None:
    def main(group: zf.Group) -> None:
        net = Net(in_place, "before")
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=3, group=group)
        with pytest.raises(PlacementError, match=r"on leaf 'key\.0\.weight'"):  # noqa: SIM117
            with engine.uneven(), torch.no_grad():
                engine(batches()[0][group.rank])

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_call_that_fails_has_written_nothing(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = Net(in_place, "before")
        optimizer = torch.optim.SGD(net.query.parameters(), 0.1)
        engine = Engine(net, optimizer, zero=stage, group=group)
        before = {name: x.clone() for name, x in engine.state_dict().items()}

        def fails() -> None:
            net(batches()[0][group.rank])
            raise KeyError

        with pytest.raises(KeyError):
            engine.run(fails)
        torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)

    zf.simulate(RANKS, main)
