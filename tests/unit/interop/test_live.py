"""The module of an engine is the user's own: any loop has the numbers of plain torch."""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun import optim
from zfun.errors import PlacementError, ZfunError
from zfun.interop import Engine
from zfun.interop.engine import compile_blocks
from zfun.testing import assert_same_bits

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
RANKS, WIDTH = 2, 5
SEEDING = threading.Lock()


class Times(torch.autograd.Function):
    """A kernel of another library, which takes plain tensors only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Net(nn.Module):
    """Tied layers, a recurrent one, a weight norm, and a head that a loss may read."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.into = nn.Linear(WIDTH, WIDTH)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.into.weight

    def body(self, x: Tensor) -> Tensor:
        x = self.normed(self.into(x).tanh())
        x = self.rnn(x[None])[0][0]
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.tied(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def made(**options: Any) -> Net:
    with SEEDING:
        torch.manual_seed(0)
        return Net(**options).double()


def batches(steps: int = 3) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        [torch.randn(4, WIDTH, generator=g, dtype=torch.float64) for _ in range(RANKS)]
        for _ in range(steps)
    ]


Loss = Callable[[Net, Tensor], Tensor]


def through_the_module(net: Net, x: Tensor) -> Tensor:
    return net(x).square().mean()


def through_parts(net: Net, x: Tensor) -> Tensor:
    """The layers one by one, and the head by a kernel, as chunked losses do."""
    return Times.apply(net.body(x), net.head.weight).square().mean()


def test_a_kernel_takes_a_plain_tensor_in_a_call_and_is_refused_outside() -> None:
    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=3, group=group)
        assert engine.run(lambda: net.head.weight.data_ptr() > 0)
        assert engine.run(lambda: type(net.head.weight)) is Tensor
        with pytest.raises(PlacementError, match=r"data_ptr\(\) of leaf 'head\.weight' outside"):
            net.head.weight.data_ptr()

    zf.simulate(RANKS, main)


def with_a_penalty(net: Net, x: Tensor) -> Tensor:
    """The parameters themselves in the loss."""
    return net(x).square().mean() + 0.1 * sum(p.square().sum() for p in net.parameters())


def with_a_hook(net: Net, x: Tensor) -> Tensor:
    """A tensor that a hook has caught."""
    caught: list[Tensor] = []
    handle = net.block.register_forward_hook(lambda module, args, out: caught.append(out))
    out = net(x)
    handle.remove()
    return caught[0].square().mean() + 0.0 * out.sum()


def twice(net: Net, x: Tensor) -> Tensor:
    return net(x).square().mean() + net(2 * x).abs().mean()


def with_a_gradient_penalty(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net.block(net.into(x)).sum(), x, create_graph=True)
    return grad.square().sum() + net(x).square().mean()


LOSSES = [through_the_module, through_parts, with_a_penalty, with_a_hook, twice]


def plain(loss: Loss, net: Net, *, clip: float | None = None) -> dict[str, Tensor]:
    """Train on the batches of all ranks, one after the other."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    for step in batches():
        optimizer.zero_grad()
        for x in step:
            (loss(net, x) / RANKS).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return dict(net.state_dict())


def assert_trained(found: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name] - start[name], value - start[name], rtol=1e-7, atol=1e-10
        )
    assert any(not value.equal(start[name]) for name, value in expected.items())


def check(stage: int, loss: Loss, way: str, make: Callable[[], Net] = made) -> None:
    start = copy.deepcopy(make().state_dict())
    expected = plain(loss, make())

    def main(group: zf.Group) -> Any:
        net = make()
        engine = Engine(net, optim.sgd(0.05, momentum=0.9), zero=stage, group=group)
        for step in batches():
            x = step[group.rank]
            # As in most loops, the last loss lives on during the next call.
            total = engine.run(loss, net, x) if way == "run" else loss(net, x)
            if way == "plain backward":
                total.backward()
            else:
                engine.backward(total)
            engine.step()
        assert_trained(engine.state_dict(), expected, start)
        assert_trained(dict(net.state_dict()), expected, start)
        return engine.state_dict()

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("way", ["run", "outside", "plain backward"])
@pytest.mark.parametrize("loss", LOSSES)
@EACH_STAGE
@pytest.mark.shows(
    "a loss through parts of the model, hooks or kernels on a weight",
    "right",
    "the module is your own, at every stage",
)
def test_any_loss_has_the_numbers_of_plain_torch(stage: int, loss: Loss, way: str) -> None:
    check(stage, loss, way)


@pytest.mark.parametrize("way", ["run", "plain backward"])
@EACH_STAGE
def test_a_gradient_penalty_is_differentiated_twice(stage: int, way: str) -> None:
    check(stage, with_a_gradient_penalty, way, made)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss", [through_the_module, twice])
@EACH_STAGE
def test_recomputed_blocks_of_both_kinds(stage: int, loss: Loss, reentrant: bool) -> None:
    check(stage, loss, "run", lambda: made(reentrant=reentrant))


def beside_a_reference(net: Net, x: Tensor) -> Tensor:
    """A call without gradients whose frozen parameters differ, as with PEFT's disable_adapter."""
    out = net(x)
    net.block.requires_grad_(False)
    with torch.no_grad():
        reference = net(2 * x)
    net.block.requires_grad_(True)
    return (out - reference).square().mean()


def beside_a_hooked_reference(net: Net, x: Tensor) -> Tensor:
    """A hook that counts in the call without gradients only."""
    out = net(x)
    handle = net.head.weight.register_hook(torch.zeros_like)
    with torch.no_grad():
        reference = net(2 * x)
    handle.remove()
    return (out - reference).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss", [beside_a_reference, beside_a_hooked_reference])
@pytest.mark.parametrize("way", ["outside", "plain backward"])
@EACH_STAGE
def test_recomputed_blocks_have_the_marks_of_their_own_call(
    stage: int, way: str, loss: Loss, reentrant: bool
) -> None:
    check(stage, loss, way, lambda: made(reentrant=reentrant))


@EACH_STAGE
def test_a_kept_graph_gives_its_gradients_again(stage: int) -> None:
    def main(group: zf.Group) -> None:
        once, again = (
            Engine(made(), optim.sgd(0.1), zero=stage, group=group, accumulate=2) for _ in range(2)
        )
        x = batches()[0][group.rank]
        for _ in range(2):
            once.backward(once(x).square().mean())
        loss = again(x).square().mean()
        again.backward(loss, retain_graph=True)
        again.backward(loss)
        infos = [engine.step() for engine in (once, again)]
        assert infos[0] is not None
        assert infos[1] is not None
        torch.testing.assert_close(infos[0].grad_norm, infos[1].grad_norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(once.state_dict(), again.state_dict())

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_vector_goes_backward_with_its_gradient(stage: int) -> None:
    def main(group: zf.Group) -> None:
        x = batches()[0][group.rank]
        engines = [Engine(made(), optim.sgd(0.1), zero=stage, group=group) for _ in range(2)]
        engines[0].backward((engines[0](x) * x).sum())
        engines[1](x).backward(x)
        for engine in engines:
            engine.step()
        torch.testing.assert_close(engines[0].state_dict(), engines[1].state_dict())

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_hooks_of_parameters_see_whole_gradients(stage: int) -> None:
    """A hook that masks rows, as for new tokens of an embedding, trains only these rows."""

    def main(group: zf.Group) -> None:
        net, seen = made(), []
        mask = torch.zeros(WIDTH, 1, dtype=torch.float64)
        mask[1] = 1.0

        def masked(grad: Tensor) -> Tensor:
            seen.append(grad.shape)
            return grad * mask

        net.head.weight.register_hook(masked)
        before = net.head.weight.detach().clone()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        for step in batches():
            engine.backward(engine(step[group.rank]).square().mean())
            engine.step()
        change = (engine.state_dict()["head.weight"] - before).abs().sum(1)
        assert change[1] > 0
        assert change.sum() == change[1]
        assert seen == [(WIDTH, WIDTH)] * 3

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_frozen_parameter_of_one_step_keeps_still(stage: int) -> None:
    """requires_grad may change between steps, as toggle_optimizer() and GANs do."""

    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        changes = []
        for turn, step in enumerate(batches()):
            net.head.weight.requires_grad_(turn != 1)
            before = engine.state_dict()
            engine.backward(engine(step[group.rank]).square().mean())
            engine.step()
            after = engine.state_dict()
            changes.append({name: not after[name].equal(x) for name, x in before.items()})
        assert [change["head.weight"] for change in changes] == [True, False, True]
        assert all(change["into.weight"] for change in changes)

    zf.simulate(RANKS, main)


@pytest.mark.shows(
    "a parameter of stage 3, read or written outside of calls",
    "different",
    "gathered where it is read, on all ranks together; the values of rank 0 are written",
)
def test_a_sharded_parameter_is_read_and_written_anywhere() -> None:
    """All ranks together; the values of rank 0 are written."""

    def main(group: zf.Group) -> None:
        net = made()
        expected = made()
        engine = Engine(net, optim.adamw(0.1), zero=3, group=group)
        weight = net.head.weight
        assert isinstance(weight, nn.Parameter)
        assert weight is dict(net.named_parameters())["head.weight"]
        assert weight.shape == (WIDTH, WIDTH)
        assert weight.requires_grad
        assert "LiveParameter(head.weight" in repr(weight)
        with torch.no_grad():
            for name, param in net.named_parameters():
                own = expected.get_parameter(name)
                torch.testing.assert_close(param.norm(), own.norm())
                torch.testing.assert_close(torch.stack([param, param]), torch.stack([own, own]))
            weight.mul_(2.0).add_(float(group.rank))
            net.into.weight.data += 1.0
            net.into.bias.data = torch.full((WIDTH,), 3.0 + group.rank, dtype=torch.float64)
            nn.init.zeros_(net.block[0].weight)  # pyrefly: ignore[bad-argument-type]
        with torch.no_grad():
            torch.testing.assert_close(weight.detach(), 2 * expected.head.weight)
            torch.testing.assert_close(net.tied.weight.clone(), expected.into.weight + 1)
        found = net.state_dict()
        assert found["into.bias"].tolist() == [3.0] * WIDTH
        assert not found["block.0.weight"].any()
        assert type(copy.deepcopy(net).head.weight) is nn.Parameter
        assert net.to("cpu").double() is net
        engine.backward(engine(batches()[0][group.rank]).square().mean())
        engine.step()
        assert not torch.equal(net.state_dict()["head.weight"], found["head.weight"])

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_writes_of_all_ranks_count_once(stage: int) -> None:
    """As in the clipping of weights of a GAN, although ranks of one host may share memory."""

    def main(group: zf.Group) -> None:
        net, expected = made(), made()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        engine.backward(engine(batches()[0][group.rank]).square().mean())
        engine.step()
        expected.load_state_dict(engine.state_dict())
        for module in (net, expected):
            with torch.no_grad():
                module.head.weight.mul_(0.5)
                module.into.bias.data.add_(1.0)
                module.into.weight.data.clamp_(-0.1, 0.1)
                module.block[0].bias.data[1:3] = 2.0  # pyrefly: ignore[unsupported-operation]
                module.block[2].weight[0] = 0.0  # pyrefly: ignore[unsupported-operation]
                torch.add(module.block[2].bias, 1.0, out=module.block[2].bias)  # pyrefly: ignore[no-matching-overload]
                module.rnn.weight_hh_l0.data = module.rnn.weight_hh_l0.data * 3.0  # pyrefly: ignore[bad-argument-type, bad-assignment, missing-attribute, unsupported-operation]
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], value)
            torch.testing.assert_close(engine.state_dict()[name], value)
        net.load_state_dict({k: x + 1 for k, x in expected.state_dict().items()})
        torch.testing.assert_close(
            engine.state_dict()["head.weight"], expected.head.weight.detach() + 1
        )
        with pytest.raises(PlacementError, match=r"keeps shape, dtype and device; leaf 'into\.w"):
            net.half()

    zf.simulate(RANKS, main)


@EACH_STAGE
@pytest.mark.shows(
    "a write through `detach()` or an array of numpy",
    "refused",
    "write to the parameter, or to its `.data`, under `torch.no_grad()`",
)
def test_a_write_around_the_parameter_is_refused_by_name(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        x = batches()[0][group.rank]
        kept = net.head.weight.detach()
        engine.backward(engine(x).sum())
        engine.step()
        view = net.head.weight.detach().view(-1)
        view[2:4] = 7.0
        with pytest.raises(PlacementError, match=r"leaf 'head\.weight' through a view or detach"):
            engine(x)
        assert kept is not None

    zf.simulate(RANKS, main)


WRITES: dict[str, Callable[[Any], Any]] = {
    "detach": lambda weight: weight.detach().zero_(),
    "copy": lambda weight: weight.detach().copy_(torch.ones_like(weight)),
    "an array of a view": lambda weight: weight[1:].numpy().fill(7.0),
    "an element": lambda weight: weight.detach()[0].add_(1.0),
    "transposed": lambda weight: weight.detach().T.mul_(2.0),
    "an output": lambda weight: torch.add(weight, 1.0, out=weight.detach()),
}
NEXT: dict[str, Callable[[Any, Any], Any]] = {
    "a call": lambda engine, x: engine(x),
    "a state dict": lambda engine, x: engine.state_dict(),
    "the end": lambda engine, x: engine.close(),
}


@EACH_STAGE
@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("way", WRITES)
def test_a_write_to_a_value_that_is_gone_is_refused_by_name(
    way: str, then: str, stage: int
) -> None:
    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        x = batches()[0][group.rank]
        with torch.no_grad():
            engine.state_dict()
            WRITES[way](net.head.weight)
        with pytest.raises(PlacementError, match=r"leaf 'head\.weight' through a view or detach"):
            NEXT[then](engine, x)

    zf.simulate(RANKS, main)


def test_many_reads_are_watched_a_part_at_a_time() -> None:
    net = made()
    engine = Engine(net, optim.sgd(0.1), zero=3, group=zf.process_group())
    with torch.no_grad():
        for _ in range(5000):
            net.head.weight.detach()
        assert len(engine._live._watched._seen) <= 4096
        net.head.weight.detach().zero_()
    with pytest.raises(PlacementError, match=r"leaf 'head\.weight' through a view or detach"):
        engine.state_dict()


@pytest.mark.shows(
    "a parameter of stage 3 that one rank reads, or a trained one that a call writes",
    "refused",
    "by the name of the parameter",
)
def test_reads_of_one_rank_and_writes_in_a_call_are_refused_by_name() -> None:
    def lonely(group: zf.Group) -> None:
        engine = Engine(made(), optim.sgd(0.1), zero=3, group=group)
        if group.rank == 0:
            engine.module.head.weight.sum()  # pyrefly: ignore[missing-attribute]
        engine.backward(engine(batches()[0][group.rank]).sum())

    with pytest.raises(ZfunError, match=r"head\.weight|bucket"):
        zf.simulate(RANKS, lonely)

    def writing(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=3, group=group)
        held = net.head.weight

        def loss() -> Tensor:
            with torch.no_grad():
                held.mul_(2.0)
            return net(batches()[0][group.rank]).sum()

        with pytest.raises(PlacementError, match=r"in place on leaf 'head\.weight'; write between"):
            engine.run(loss)

    zf.simulate(RANKS, writing)


@pytest.mark.shows(
    "a gathered tensor that is kept past its step",
    "refused",
    "read the attribute again, or keep a `clone()`",
)
def test_a_tensor_that_is_kept_past_its_step_is_refused_by_name() -> None:
    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=3, group=group)
        whole = net.head.weight.t()
        loss = lambda: net.body(batches()[0][group.rank]).matmul(whole).sum()
        engine.backward(loss())
        engine.step()
        with pytest.raises(PlacementError, match=r"gradient of leaf 'head\.weight' from before"):
            engine.backward(loss())

    zf.simulate(RANKS, main)


class Words(nn.Module):
    """A table that is read sparsely, and by the head of half of the calls."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=sparse)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", sparse=sparse)

    def forward(self, x: Tensor, *, head: bool = False) -> Tensor:
        out = self.table(x) + self.bag(x[:, None])
        return out @ self.table.weight.T if head else out


@EACH_STAGE
def test_sparse_gradients_have_the_numbers_of_dense_ones(stage: int) -> None:
    torch.manual_seed(0)
    start = Words(sparse=False).state_dict()

    def main(group: zf.Group, *, sparse: bool) -> Any:
        net = Words(sparse=sparse).double()
        net.load_state_dict(start)
        engine = Engine(net, optim.sgd(0.1, momentum=0.9), zero=stage, group=group)
        x = torch.tensor([1, 1, 2 + group.rank])
        for _ in range(2):
            outside = nn.functional.embedding(x, net.table.weight, sparse=sparse)
            loss = net(x).square().sum() + net(x, head=True).sum() + net(x).sum() + outside.sum()
            engine.backward(loss)
            engine.step()
        return engine.state_dict()

    found, expected = (zf.simulate(RANKS, partial(main, sparse=x)) for x in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert not found[0]["table.weight"].equal(start["table.weight"])


@EACH_STAGE
def test_a_module_in_eval_mode_trains(stage: int) -> None:
    """from_pretrained() returns a module in eval mode, and many scripts leave it so."""

    def main(group: zf.Group) -> None:
        engine = Engine(made().eval(), optim.sgd(0.05), zero=stage, group=group)
        losses = []
        for _ in range(3):
            loss = engine(batches()[0][group.rank]).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.shows(
    "unfreezing, and parameter groups that are added later", "right", "between steps"
)
def test_leaves_are_unfrozen_and_groups_are_added(stage: int) -> None:
    """With torch's numbers, also of the moments that both sets of leaves have."""

    def train(net: Net, optimizer: Any, step: Callable[[Net, Tensor], None]) -> None:
        for turn, data in enumerate(batches(6)):
            if turn == 2:
                net.block.requires_grad_(True)
                optimizer.add_param_group({"params": list(net.block.parameters()), "lr": 0.02})
            if turn == 4:
                net.rnn.requires_grad_(True)
            step(net, torch.stack(data))

    def start() -> tuple[Net, Any]:
        net = made()
        net.block.requires_grad_(False)
        net.rnn.requires_grad_(False)
        first = [p for name, p in net.named_parameters() if not name.startswith("block")]
        return net, torch.optim.AdamW(first, 0.01, weight_decay=0.1, eps=1e-3)

    plain_net, plain_optimizer = start()

    def plain_step(net: Net, x: Tensor) -> None:
        plain_optimizer.zero_grad()
        (sum(net(part).square().mean() for part in x) / RANKS).backward()  # pyrefly: ignore[missing-attribute]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        plain_optimizer.step()

    train(plain_net, plain_optimizer, plain_step)

    def main(group: zf.Group) -> None:
        net, optimizer = start()
        engine = Engine(net, optimizer, zero=stage, group=group, clip_norm=1.0)

        def step(net: Net, x: Tensor) -> None:
            engine.backward(engine(x[group.rank]).square().mean())
            engine.step()

        train(net, optimizer, step)
        assert_trained(engine.state_dict(), plain_net.state_dict(), made().state_dict())

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_has_unfrozen_leaves_is_loaded(stage: int, rule: Any, tmp_path: Any) -> None:
    """Into an engine whose leaves are still frozen, also where no moment tells which are."""

    def main(group: zf.Group) -> None:
        def start() -> Engine:
            net = made()
            net.block.requires_grad_(False)
            optimizer = rule(net.parameters(), 0.01)
            return Engine(net, optimizer, zero=stage, group=group)

        def train(engine: Engine, turns: range) -> None:
            for turn in turns:
                engine.module.block.requires_grad_(turn > 0)
                engine.backward(engine(batches(4)[turn][group.rank]).square().mean())
                engine.step()

        straight, first, second = start(), start(), start()
        train(straight, range(4))
        train(first, range(2))
        first.save(tmp_path)
        second.load(tmp_path)
        train(second, range(2, 4))
        assert_same_bits(second.state_dict(), straight.state_dict())

    zf.simulate(RANKS, main)


@EACH_STAGE
@pytest.mark.shows("quantised weights", "right", "whole, on every rank, and frozen")
def test_a_quantised_weight_stays_whole_in_the_module(stage: int) -> None:
    """A frozen parameter of another class is opaque; a trained one is refused by name."""

    class Packed(nn.Parameter):
        pass

    def main(group: zf.Group) -> None:
        net = made()
        net.head.weight = Packed(net.head.weight.detach(), requires_grad=False)
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        assert type(net.head.weight) is Packed
        engine.backward(engine(batches()[0][group.rank]).square().mean())
        engine.step()
        assert "head.weight" in engine.state_dict()
        other = made()
        other.head.weight = Packed(other.head.weight.detach())
        with pytest.raises(zf.errors.LeafError, match=r"leaf 'head\.weight' is a Packed; freeze"):
            Engine(other, optim.sgd(0.1), zero=stage, group=group)

    zf.simulate(RANKS, main)


def test_functions_of_a_live_module_are_pure() -> None:
    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=2, group=group)
        apply = zf.functional(net)
        x = batches()[0][group.rank]
        halves, plain = {name: value / 2 for name, value in apply.params.items()}, made()
        plain.load_state_dict({k: v / 2 for k, v in plain.state_dict().items()})
        torch.testing.assert_close(apply(halves, x), plain(x))
        assert F.mse_loss(engine(x), net(x)) == 0

    zf.simulate(RANKS, main)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.into(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["blocks", "block.compile", "torch.compile of a block", "all"])
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks_have_the_same_numbers(stage: int, form: str) -> None:
    torch.compiler.reset()
    options: dict[str, Any] = {"backend": "eager", "fullgraph": True}
    found: list[list[float]] = []
    for its_form in ("", form):
        torch.manual_seed(0)
        module: Any = Stack()
        if its_form == "blocks":
            compile_blocks(module, **options)
        elif its_form == "block.compile":
            module.blocks[1].compile(**options)
        elif its_form == "torch.compile of a block":
            module.blocks[1] = torch.compile(module.blocks[1], **options)
        elif its_form == "all":
            module = torch.compile(module, **options)
        engine = Engine(module, optim.sgd(0.1), zero=stage, group=zf.process_group())
        losses = []
        for turn in range(3):
            loss = engine(torch.full((2, WIDTH), 0.5 * turn)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine(torch.ones(2, WIDTH)).sum().item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert len(set(found[0])) == 4


COMPILED_LATER: dict[str, Callable[[Any], Any]] = {
    "a block": lambda x: setattr(x.blocks, "1", torch.compile(x.blocks[1], backend="eager")) or x,
    "block.compile": lambda x: x.blocks[1].compile(backend="eager") or x,
    "module.compile": lambda x: x.compile(backend="eager") or x,
    "the module": lambda x: torch.compile(x, backend="eager"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", COMPILED_LATER)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_live_module_that_is_compiled_has_the_same_numbers(stage: int, form: str) -> None:
    """It ended in internal errors of Dynamo; its own code runs uncompiled."""
    torch.compiler.reset()
    losses: list[list[float]] = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        module: Any = Stack()
        engine = Engine(module, optim.sgd(0.1), zero=stage, group=zf.process_group())
        call = COMPILED_LATER[form](module) if is_compiled else module
        losses.append([])
        for turn in range(3):
            loss = call(torch.full((2, WIDTH), 0.5 * turn)).square().mean()
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert losses[1] == losses[0]


def swapped_in(net: Net, kept: dict[str, Any]) -> None:
    """Train an average, swap the average in to evaluate, and swap it out: no copy is made."""
    backup = {}
    for name, p in net.named_parameters():
        kept[name] = 0.5 * kept.get(name, p.data) + 0.5 * p.data
    for name, p in net.named_parameters():
        backup[name] = p.data
        p.data = kept[name]
    with torch.no_grad():
        kept["out"] = net(torch.ones(1, WIDTH, dtype=torch.float64))
    for name, p in net.named_parameters():
        p.data = backup[name]


def read_before_and_after(net: Net, kept: dict[str, Any]) -> None:
    """The second norm is that of the new values, also where a gradient may follow."""
    before = net.head.weight.norm().detach()
    net.head.weight.data.mul_(0.5)
    kept["norms"] = before, net.head.weight.norm().detach()


def added_to_rows(net: Net, kept: dict[str, Any]) -> None:
    net.head.weight.data[1] += 0.5
    with torch.no_grad():
        net.into.weight[0] *= 2.0


@torch.no_grad()
def by_any_kind_of_operation(net: Net, kept: dict[str, Any]) -> None:
    F.relu(net.head.weight, inplace=True)
    torch.ops.aten.mul_.Scalar(net.into.weight, 0.5)
    places = torch.empty(0, dtype=torch.int64)
    torch.max(torch.ones(2, WIDTH).double(), 0, out=(net.into.bias.data, places))


def from_a_vector(net: Net, kept: dict[str, Any]) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(0.9 * vector.detach(), net.parameters())


MEANT = [swapped_in, read_before_and_after, added_to_rows, by_any_kind_of_operation, from_a_vector]


@pytest.mark.parametrize("write", MEANT)
@pytest.mark.parametrize("stage", [1, 3])
def test_writes_between_the_steps_are_those_of_torch(stage: int, write: Any) -> None:
    def train(net: Net, step: Callable[[Tensor], Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for data in batches(2):
            step(torch.cat(data))
            write(net, kept)
        return kept | net.state_dict()

    plain_net = made()
    optimizer = torch.optim.SGD(plain_net.parameters(), 0.05)

    def plain_step(x: Tensor) -> None:
        optimizer.zero_grad()
        plain_net(x).square().mean().backward()
        optimizer.step()

    expected = train(plain_net, plain_step)

    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.05), zero=stage, group=group)

        def step(x: Tensor) -> None:
            engine.backward(engine(x).square().mean())
            engine.step()

        torch.testing.assert_close(train(net, step), expected, rtol=1e-7, atol=1e-10)

    zf.simulate(RANKS, main)


def by_hand(net: Net, x: Tensor) -> None:
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.1)


def by_torch_func(net: Net, x: Tensor) -> None:
    params = {name: 1.5 * p for name, p in net.named_parameters()}
    torch.func.functional_call(net, params, (x,)).square().mean().backward()


def of_a_copy(net: Net, x: Tensor) -> None:
    """As in Reptile and in asynchronous actors."""
    other = copy.deepcopy(net)
    other(x).square().mean().backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        p.grad = q.grad


def projected(net: Net, x: Tensor) -> None:
    """As in PCGrad: each loss alone, and then a combination of the gradients."""
    out = net(x)
    own = []
    for loss in (out.square().mean(), out.sum()):
        net.zero_grad()
        loss.backward(retain_graph=True)
        own.append([p.grad.clone() for p in net.parameters()])  # pyrefly: ignore[missing-attribute]
    net.zero_grad()
    for p, first, second in zip(net.parameters(), *own, strict=True):
        p.grad = first - 0.1 * second


@pytest.mark.parametrize("gradients", [by_hand, by_torch_func, of_a_copy, projected])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_takes_gradients_that_no_backward_pass_of_the_engine_gave(
    stage: int, gradients: Callable[[Net, Tensor], None]
) -> None:
    x = torch.cat(batches(1)[0])
    plain_net = made()
    optimizer = torch.optim.SGD(plain_net.parameters(), 0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        gradients(plain_net, x)
        optimizer.step()

    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.05, momentum=0.9), zero=stage, group=group)
        for _ in range(2):
            gradients(net, x)
            assert engine.is_boundary
            assert engine.step() is not None
        assert_trained(dict(net.state_dict()), plain_net.state_dict(), made().state_dict())

    zf.simulate(RANKS, main)


AROUND: dict[str, Callable[[Net, Tensor], Any]] = {
    "numpy": lambda net, old: net.head.weight.detach().numpy().fill(1.0),
    "order of elements": lambda net, old: net.head.weight.detach().numpy().sort(),
    "numpy of .data": lambda net, old: net.head.weight.data.numpy().fill(1.0),
    "numpy of a view": lambda net, old: net.head.weight.detach()[1:].T.numpy().fill(1.0),
    "a state dict": lambda net, old: net.state_dict()["head.weight"].numpy().fill(1.0),
    "dlpack": lambda net, old: torch.from_dlpack(net.head.weight.detach()).zero_(),
    "set_": lambda net, old: net.head.weight.set_(torch.ones(WIDTH, WIDTH).double()),  # pyrefly: ignore[bad-argument-type]
    "swap_tensors": lambda net, old: torch.utils.swap_tensors(
        net.head.weight, nn.Parameter(torch.ones(WIDTH, WIDTH).double())
    ),
    "an old detach()": lambda net, old: old.mul_(2.0),
}


@pytest.mark.parametrize("way", AROUND)
@EACH_STAGE
def test_a_write_that_no_operation_on_the_parameter_makes_is_refused(stage: int, way: str) -> None:
    def main(group: zf.Group) -> None:
        net = made()
        old = net.head.weight.detach()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        x = batches()[0][group.rank]
        engine.backward(engine(x).sum())
        engine.step()
        with torch.no_grad():
            AROUND[way](net, old)
        with pytest.raises(PlacementError, match=r"leaf 'head\.weight' through a view or detach"):
            engine(x)

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_parameter_does_not_take_the_memory_of_another(stage: int) -> None:
    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        with pytest.raises(PlacementError, match=r"leaf 'head\.weight'.*assign a clone\(\)"):
            net.into.weight.data = net.head.weight.data
        engine.close()

    zf.simulate(RANKS, main)


class Constrained(nn.Linear):
    """Keeps the weight small, as a layer of EEGNet does."""

    def __init__(self, way: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        if self.way == "assignment":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        elif self.way == "in place":
            self.weight.data.clamp_(-0.1, 0.1)
        else:
            self.weight.detach().numpy()[0] = 0.0
        return super().forward(x)


@pytest.mark.parametrize("way", ["assignment", "in place", "numpy"])
@pytest.mark.parametrize(("stage", "grads"), [(0, True), (2, True), (3, True), (3, False)])
def test_a_call_that_writes_its_parameters_is_refused_by_name(
    stage: int, grads: bool, way: str
) -> None:
    def main(group: zf.Group) -> None:
        net = Constrained(way).double()
        engine = Engine(net, optim.sgd(0.1), zero=stage, group=group)
        refused = pytest.raises(PlacementError, match=r"in place on leaf 'weight'; write between")
        with torch.set_grad_enabled(grads), refused:
            engine(batches()[0][group.rank])

    zf.simulate(RANKS, main)


LEAVES = [name for name, _ in made().named_parameters()]
CHANGED = r"modified by an inplace operation|write to leaf '[\w.]+' between a call"


def after_a_write(net: Any, loss: Callable[[], Tensor], step: Callable[[Tensor], None], leaf: str):
    """Return the parameters after a step whose backward pass follows a write, or its error."""
    out = loss()
    with torch.no_grad():
        net.get_parameter(leaf).mul_(1.5)
    try:
        step(out)
    except (RuntimeError, PlacementError) as error:
        return str(error)
    return {name: x.detach().clone() for name, x in net.named_parameters()}


@functools.cache
def plain_after_a_write(leaf: str, reentrant: bool | None) -> Any:
    net, (each, *_) = made(reentrant=reentrant), batches()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()

    mean = lambda: sum(through_the_module(net, x) for x in each) / RANKS
    return after_a_write(net, mean, step, leaf)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("leaf", LEAVES)
@EACH_STAGE
def test_a_write_between_a_call_and_its_backward_pass_is_that_of_torch(
    stage: int, leaf: str, reentrant: bool | None
) -> None:
    """Backward has the old value where it needs none; else torch refuses, and so does an engine."""
    expected = plain_after_a_write(leaf, reentrant)

    def main(group: zf.Group) -> None:
        net = made(reentrant=reentrant)
        engine = Engine(net, torch.optim.SGD(net.parameters(), 0.1), zero=stage, group=group)

        def step(loss: Tensor) -> None:
            engine.backward(loss)
            engine.step()

        loss = lambda: through_the_module(net, batches()[0][group.rank])
        found = after_a_write(net, loss, step, leaf)
        if isinstance(found, str):
            assert re.search(CHANGED, found), found
            # At stage 3 a block that backward runs again refuses a value that torch would take.
            is_again = stage == 3 and reentrant is not None and leaf.startswith("block")
            assert isinstance(expected, str) or is_again
        else:
            torch.testing.assert_close(found, expected)

    zf.simulate(RANKS, main)


def test_a_module_whose_parameters_are_all_replaced_is_refused_by_name() -> None:
    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=3, group=group)
        net.load_state_dict(made().state_dict(), assign=True)
        net(batches()[0][group.rank]).sum().backward()
        with pytest.raises(zf.errors.OptionError, match=r"got another one at 'into\.weight'"):
            engine.step()

    zf.simulate(RANKS, main)


def test_values_that_code_reads_are_not_kept() -> None:
    """The watch for writes keeps as many gathered values as the code does."""

    def main(group: zf.Group) -> None:
        net = made()
        engine = Engine(net, optim.sgd(0.1), zero=3, group=group)
        with torch.no_grad():
            for _ in range(20):
                net.head.weight.detach()
        assert len(engine._live._watched._held) <= 1
        engine(batches()[0][group.rank])
        assert not engine._live._watched._held

    zf.simulate(RANKS, main)
