"""zfun.interop.Engine: imperative loops have the bits of zf.zero, and the values of plain torch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun import optim
from zfun.errors import OptionError, SpecMismatch, ZfunError
from zfun.interop import Engine
from zfun.testing import assert_same_bits

STAGES = [0, 1, 2, 3]
EACH_STAGE = pytest.mark.parametrize("stage", STAGES)
RANKS = 2


@dataclasses.dataclass
class Out:
    logits: Tensor
    features: Tensor
    rows: int


class Net(nn.Module):
    """Tied layers, running statistics, a frozen scale, a recomputed block, and a rich output."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 5, bias=False)
        self.out.weight = nn.Parameter(torch.randn(5, 6) / 3)
        self.back = nn.Linear(6, 5, bias=False)
        self.back.weight = self.out.weight
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, x: Tensor, *, power: float = 1.0) -> Out:
        y = self.norm(self.into(x) * self.scale)
        y = checkpoint(self.block, y, use_reentrant=False) if self.training else self.block(y)
        return Out(self.out(y) + self.back(y * power), y, len(x))

    def generate(self, x: Tensor, turns: int) -> Tensor:
        for _ in range(turns):
            x = self(x).logits
        return x


def batches(steps: int, size: int, rows: int = 8) -> list[list[tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(3)
    return [
        [
            (torch.randn(rows, 5, generator=g), torch.randint(5, (rows,), generator=g))
            for _ in range(size)
        ]
        for _ in range(steps)
    ]


SEEDING = threading.Lock()


def made(make: Callable[[], Any]) -> Any:
    """Make the same module on every rank; simulated ranks share torch's generator."""
    with SEEDING:
        torch.manual_seed(0)
        return make()


def linear(out: int = 2) -> nn.Module:
    return made(lambda: nn.Linear(5, out))


def mlp() -> nn.Module:
    return made(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)))


def net() -> Net:
    return made(Net)


def criterion(out: Out, y: Tensor) -> Tensor:
    return F.cross_entropy(out.logits, y) + 0.1 * out.features.pow(2).mean()


def rule() -> Any:
    return optim.adamw(0.02, eps=1e-3)


def loop(engine: Engine, group: zf.Group, data: Any, micro: int = 1) -> list[Any]:
    infos, info = [], None
    for step in data:
        x, y = step[group.rank]
        for part, label in zip(x.chunk(micro), y.chunk(micro), strict=True):
            engine.backward(criterion(engine(part, power=0.5), label))
            info = engine.step()
        assert info is not None
        infos.append((info.loss, info.grad_norm))
    return infos


@pytest.mark.parametrize("micro", [1, 2])
@EACH_STAGE
def test_a_loop_has_the_bits_of_zero(stage: int, micro: int) -> None:
    """The module's buffers, ties, frozen leaves and recomputed blocks included."""

    def main(group: zf.Group) -> None:
        data, module = batches(4, group.size), net()
        engine = Engine(module, rule(), zero=stage, group=group, accumulate=micro, clip_norm=0.5)
        apply = zf.functional(net())
        written = apply.buffers
        zero = zf.zero(
            # An engine sums each backward pass over the ranks, as stages 2 and 3 do.
            max(stage, 2),
            lambda p, batch: criterion(apply(p, batch[0], power=0.5), batch[1]),
            optim.chain(optim.clip_by_global_norm(0.5), rule()),
            group,
            num_micro_batches=micro,
            trainable=lambda path, _: path != "scale",
            buffers=lambda path, _: "rank 0" if path in written else None,
        )
        state, infos = zero.init({**apply.params, **written}), []
        for step in data:
            state, info = zero.step(state, step[group.rank])
            infos.append((info.loss, info.grad_norm))
        assert_same_bits(loop(engine, group, data, micro), infos)
        values, first = engine.state_dict(), net().state_dict()
        expected = zero.params(state)
        assert list(values) == list(first)
        assert_same_bits({name: values[name] for name in expected}, expected)
        changed = {name for name, value in values.items() if not value.equal(first[name])}
        assert set(values) - changed == {"scale"}
        assert_same_bits(module.state_dict(), values)

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_loop_is_that_of_plain_torch(stage: int) -> None:
    """On the batches of all ranks together, without batch statistics."""
    data = batches(5, RANKS)
    plain = mlp().double()
    start = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), 0.3, momentum=0.9)
    losses = []
    for step in data:
        x, y = (torch.cat(parts) for parts in zip(*step, strict=True))
        loss = F.cross_entropy(plain(x.double()), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
        optimizer.step()
        losses.append(loss.detach())

    def main(group: zf.Group) -> None:
        engine = Engine(
            copy.deepcopy(start),
            optim.sgd(0.3, momentum=0.9),
            zero=stage,
            group=group,
            accumulate=2,
            clip_norm=0.2,
        )
        info = None
        for step, loss in zip(data, losses, strict=True):
            x, y = step[group.rank]
            for part, label in zip(x.chunk(2), y.chunk(2), strict=True):
                assert not engine.is_boundary
                engine.backward(F.cross_entropy(engine(part.double()), label))
                info = engine.step()
            assert info is not None
            torch.testing.assert_close(info.loss, loss, rtol=1e-12, atol=0)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-9)

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_a_gan_has_two_engines(stage: int) -> None:
    """Gradients go through the discriminator into the generator, and only there."""
    data = [[x for x, _ in step] for step in batches(4, RANKS)]
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, width)).double() for width in (5, 1)
    ]
    start = copy.deepcopy(nets)
    made, judge = nets
    rules = [torch.optim.SGD(part.parameters(), 0.2) for part in nets]
    loss_of = lambda logits, real: F.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, real)
    )
    for step in data:
        x = torch.cat(step).double()
        fake = made(x.flip(1))
        rules[1].zero_grad()
        (loss_of(judge(x), 1.0) + loss_of(judge(fake.detach()), 0.0)).backward()
        rules[1].step()
        rules[0].zero_grad()
        loss_of(judge(fake), 1.0).backward()
        rules[0].step()

    def main(group: zf.Group) -> None:
        maker, critic = (
            Engine(copy.deepcopy(part), optim.sgd(0.2), zero=stage, group=group) for part in start
        )
        for step in data:
            x = step[group.rank].double()
            fake = maker(x.flip(1))
            critic.backward(loss_of(critic(x), 1.0) + loss_of(critic(fake.detach()), 0.0))
            critic.step()
            maker.backward(loss_of(critic(fake), 1.0))
            maker.step()
        for engine, part in ((maker, made), (critic, judge)):
            for name, value in engine.state_dict().items():
                torch.testing.assert_close(value, part.state_dict()[name], rtol=1e-9, atol=1e-12)

    zf.simulate(RANKS, main)


def engine_of(group: zf.Group, stage: int = 2, **options: Any) -> Engine:
    return Engine(net(), rule(), zero=stage, group=group, **options)


@pytest.mark.parametrize("rule_of_buffers", ["rank 0", "mean", "by rank"])
def test_buffers_are_merged_by_rule(rule_of_buffers: str) -> None:
    def main(group: zf.Group) -> Tensor:
        engine = engine_of(group, buffers=rule_of_buffers)
        loop(engine, group, batches(2, group.size))
        assert int(engine.state_dict()["norm.num_batches_tracked"]) == 2
        return engine.state_dict()["norm.running_mean"]

    first, second = zf.simulate(RANKS, main)
    assert first.equal(second) is (rule_of_buffers != "by rank")
    assert bool(first.any())


@EACH_STAGE
def test_no_grad_uses_the_state_and_keeps_nothing(stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine = engine_of(group, stage)
        loop(engine, group, batches(2, group.size))
        x = batches(1, group.size)[0][group.rank][0]
        plain = net()
        plain.load_state_dict(engine.state_dict())
        assert not engine.eval().training
        with torch.no_grad():
            for module in (engine, engine.module):
                out, expected = module(x), plain.eval()(x)
                assert not out.logits.requires_grad
                torch.testing.assert_close(out.logits, expected.logits)
        torch.testing.assert_close(
            engine.generate(x, 2 + group.rank), plain.generate(x, 2 + group.rank)
        )
        with engine.bound() as module:
            assert module is engine.module
            assert_same_bits(module.state_dict(), plain.state_dict())
            assert module.get_parameter("back.weight") is module.get_parameter("out.weight")
        assert engine.train().training
        assert engine(x).logits.requires_grad

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_names_of_parameters_are_those_of_the_module(stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine = engine_of(group, stage)
        named = dict(engine.named_parameters())
        first = {name: x for name, x in net().named_parameters() if name != "scale"}
        assert set(named) == set(first)
        assert not any(x.requires_grad for x in engine.parameters())
        if stage < 3:
            assert_same_bits(named, {name: x.detach() for name, x in first.items()})
        else:
            own = sum(x.numel() for x in named.values())
            assert 0 < own < sum(x.numel() for x in first.values())

    zf.simulate(RANKS, main)


def test_scale_and_boundary_are_the_callers() -> None:
    """Weights of 3/4 and 1/4 make the mean over rows of different micro-batches."""

    def main(group: zf.Group) -> None:
        x, y = batches(1, group.size)[0][group.rank]
        whole, parts = (Engine(linear(5), optim.sgd(0.5), group=group) for _ in range(2))
        whole.backward(F.cross_entropy(whole(x), y))
        info = whole.step()
        with parts.no_sync():
            parts.backward(F.cross_entropy(parts(x[:6]), y[:6]), scale=0.75)
            assert parts.step() is None
        parts.backward(F.cross_entropy(parts(x[6:]), y[6:]), scale=0.25)
        assert parts.is_boundary
        assert parts.step(boundary=False) is None
        found = parts.step(boundary=True)
        assert info is not None
        assert found is not None
        torch.testing.assert_close(found.loss, info.loss)
        torch.testing.assert_close(parts.state_dict(), whole.state_dict())

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("micro", [1, 2])
@EACH_STAGE
def test_weighted_means_are_those_of_zero(stage: int, micro: int) -> None:
    """Ranks and micro-batches have different numbers of rows."""
    mean = lambda logits, y: zf.weighted_mean(F.cross_entropy(logits, y, reduction="sum"), len(y))

    def main(group: zf.Group) -> None:
        module = linear(5)
        engine = Engine(module, optim.sgd(0.5), zero=stage, group=group, accumulate=micro)
        apply = zf.functional(module)
        loss_fn = lambda p, batch: mean(apply(p, batch[0]), batch[1])
        zero = zf.zero(stage, loss_fn, optim.sgd(0.5), group, num_micro_batches=micro)
        state = zero.init(apply.params)
        for step in batches(3, group.size):
            x, y = step[group.rank]
            cut = [(x[: 2 + group.rank], y[: 2 + group.rank]), (x[3:], y[3:])][:micro]
            state, info = zero.step(state, zf.transforms.MicroBatches(cut) if micro > 1 else cut[0])
            found = None
            for part, label in cut:
                engine.backward(mean(engine(part), label))
                found = engine.step()
            assert found is not None
            torch.testing.assert_close(found.loss, info.loss)
        torch.testing.assert_close(engine.state_dict(), zero.params(state), rtol=1e-6, atol=1e-6)
        if micro == 1:
            assert_same_bits(engine.state_dict(), zero.params(state))

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("count", [2, 3])
def test_weighted_means_of_one_step_need_no_number_of_calls(count: int) -> None:
    """The mean over all tokens, also where no_sync() or a boundary ends the step."""
    mean = lambda logits, y: zf.weighted_mean(F.cross_entropy(logits, y, reduction="sum"), len(y))

    def main(group: zf.Group) -> None:
        cut = [(x[: 1 + 2 * i], y[: 1 + 2 * i]) for i, (x, y) in enumerate(batches(1, 3)[0])]
        engines = [
            Engine(linear(5), optim.sgd(0.5), group=group, accumulate=n) for n in (count, 1, 8)
        ]
        for engine in engines:
            with engine.no_sync() if engine.accumulate == 1 else contextlib.nullcontext():
                for x, y in cut[: count - 1]:
                    engine.backward(mean(engine(x), y))
            engine.backward(mean(engine(cut[count - 1][0]), cut[count - 1][1]))
        losses = [info.loss for engine in engines if (info := engine.step(boundary=True))]
        assert_same_bits(losses, losses[:1] * 3)
        for engine in engines[1:]:
            assert_same_bits(engine.state_dict(), engines[0].state_dict())

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH_STAGE
def test_half_precision_has_the_bits_of_zero(stage: int, dtype: torch.dtype) -> None:
    def main(group: zf.Group) -> None:
        module = mlp()
        options = {"precision": dtype}
        engine = Engine(module, rule(), zero=stage, group=group, **options)
        apply = zf.functional(mlp())
        loss_fn = lambda p, batch: F.cross_entropy(apply(p, batch[0]).float(), batch[1])
        zero = zf.zero(stage, loss_fn, rule(), group, **options)
        state, skips = zero.init(apply.params), 0
        for turn, step in enumerate(batches(4, group.size)):
            x, y = step[group.rank]
            x = x * (torch.inf if turn == 1 else 1.0)
            state, info = zero.step(state, (x, y))
            engine.backward(F.cross_entropy(engine(x).float(), y))
            found = engine.step()
            assert found is not None
            skips += found.skipped
            assert_same_bits([found.loss_scale, found.skipped], [info.loss_scale, info.skipped])
        assert skips == 1
        assert_same_bits(engine.state_dict(), zero.params(state))

    zf.simulate(RANKS, main)


@pytest.mark.parametrize(
    "precision",
    [torch.bfloat16, torch.float16, zf.recipes.Precision(compute=torch.bfloat16)],
    ids=["bfloat16", "float16", "float32 kept"],
)
@EACH_STAGE
def test_a_call_without_gradients_computes_in_the_dtype_of_training(
    stage: int, precision: Any
) -> None:
    def main(group: zf.Group) -> None:
        module = mlp()
        engine = Engine(module, rule(), zero=stage, group=group, precision=precision)
        x, _ = batches(1, group.size)[0][group.rank]
        expected = engine(x).detach()
        assert expected.dtype is not torch.float32
        with torch.no_grad():
            assert_same_bits([engine(x), engine.run(module, x)], [expected] * 2)
            with engine.uneven() as same:
                assert_same_bits([same(x) for _ in range(1 + group.rank)][-1], expected)
        with torch.inference_mode():
            assert_same_bits(engine(x).clone(), expected)

    zf.simulate(RANKS, main)


class Filling(nn.Module):
    """A module that writes into what its caller passes, as layers with losses of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, losses: list[Tensor], memory: dict[str, Any]) -> Tensor:
        x = self.layer(x)
        losses.append(x.square().mean())
        memory["count"] = memory.get("count", 0) + 1
        return x


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@EACH_STAGE
def test_forward_fills_the_containers_of_its_caller(stage: int, precision: Any) -> None:
    alone = zf.collectives.single_group()
    engine = Engine(Filling(), rule(), zero=stage, group=alone, precision=precision)
    losses: list[Tensor] = []
    memory: dict[str, Any] = {}
    for _ in range(2):
        engine(torch.ones(2, 3), losses, memory=memory)
    with torch.no_grad():
        engine(torch.ones(2, 3), losses, memory)
    assert (len(losses), memory) == (3, {"count": 3})
    before = engine.state_dict()
    engine.backward(losses[0] + losses[1])
    engine.step(boundary=True)
    assert not torch.equal(engine.state_dict()["layer.weight"], before["layer.weight"])


@EACH_STAGE
def test_values_go_out_and_in(stage: int, tmp_path: Path) -> None:
    """A checkpoint goes on with other stages; a state dict also with master weights."""

    def main(group: zf.Group) -> None:
        data = batches(4, group.size)
        engine = engine_of(group, stage)
        loop(engine, group, data[:2])
        engine.save(tmp_path / "run", extra={"epoch": 1})
        other = engine_of(group, 3 - stage)
        assert other.load(tmp_path / "run") == {"epoch": 1}
        assert_same_bits(loop(other, group, data[2:]), loop(engine, group, data[2:]))
        narrow = Engine(net(), rule(), zero=stage, group=group, precision=torch.bfloat16)
        narrow.load_state_dict(engine.state_dict())
        before = {k: x.to(torch.bfloat16) for k, x in engine.state_dict().items()}
        assert_same_bits(narrow.state_dict()["into.weight"], before["into.weight"])
        frozen = Engine(made(lambda: nn.Linear(2, 2)), optim.sgd(0.0), zero=stage, group=group)
        x = torch.ones(1, 2)
        frozen.backward(frozen(x).sum())
        frozen.step()
        frozen.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        frozen.backward(frozen(x).sum())
        frozen.step()
        assert frozen.state.step == 2
        assert_same_bits(frozen.state_dict()["weight"], torch.eye(2))

    zf.simulate(RANKS, main)


class Counting(nn.Module):
    """A module with a value that is no tensor in its state dict, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_extra_state_of_the_module_goes_out_and_in() -> None:
    def main(group: zf.Group) -> None:
        engine = Engine(Counting(), optim.sgd(0.5), group=group, init="broadcast")
        values = engine.state_dict()
        assert list(values) == ["_extra_state", "inner.weight", "inner.bias"]
        engine.load_state_dict({**values, "_extra_state": 3})
        assert engine.module.count == engine.state_dict()["_extra_state"] == 3
        with pytest.raises(SpecMismatch, match=r"missing are \['_extra_state'\]"):
            engine.load_state_dict({k: x for k, x in values.items() if k != "_extra_state"})
        name, weight = "inner.weight", torch.full((1, 2), 7.0)
        engine.module.get_submodule("inner").register_state_dict_post_hook(
            lambda m, found, *_: found.__delitem__(name)
        )
        engine.load_state_dict({**values, name: weight})
        assert_same_bits(dict(engine.named_parameters())[name], weight)

    zf.simulate(RANKS, main)


def test_a_module_has_one_engine() -> None:
    def main(group: zf.Group) -> None:
        module = linear()
        engine = Engine(module, optim.sgd(0.5), zero=3, group=group)
        with pytest.raises(OptionError, match=r"got a Linear that another engine holds.*deepcopy"):
            Engine(module, optim.sgd(0.5), zero=3, group=group)
        other = Engine(copy.deepcopy(module), optim.sgd(0.5), zero=3, group=group)
        assert_same_bits(other.state_dict(), engine.state_dict())

    zf.simulate(RANKS, main)


def test_hyperparameters_are_set_between_steps() -> None:
    def main(group: zf.Group) -> None:
        make = optim.inject_hyperparams(optim.sgd)
        engine = Engine(nn.Linear(2, 1), make(0.5), group=group, clip_norm=1.0, init="broadcast")
        assert engine.hyperparams["learning_rate"] == 0.5
        before = engine.state_dict()
        engine.set_hyperparams(learning_rate=0.0)
        engine.backward(engine(torch.ones(1, 2)).sum())
        info = engine.step()
        assert info is not None
        assert info.learning_rate == 0.0
        assert_same_bits(engine.state_dict(), before)
        engine.set_hyperparams(learning_rate=0.25)
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert not engine.state_dict()["weight"].equal(before["weight"])

    zf.simulate(RANKS, main)


def test_a_recipe_that_is_made_already() -> None:
    def main(group: zf.Group) -> None:
        zero = zf.zero(3, lambda params, batch: params["weight"].sum(), optim.sgd(0.5), group)
        engine = Engine(made(lambda: nn.Linear(2, 1)), None, zero=zero)
        assert engine.recipe is zero
        before = engine.state_dict()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        torch.testing.assert_close(engine.state_dict()["weight"], before["weight"] - 0.5)
        beside: dict[str, Any] = {"group": group, "buffers": "mean", "clip_norm": 1.0}
        for name, value in {**beside, "trainable": bool, "optimizer": optim.sgd(0.5)}.items():
            options: dict[str, Any] = {"optimizer": None, name: value}
            with pytest.raises(OptionError, match=rf"{name} beside .*made already"):
                Engine(nn.Linear(2, 1), **options, zero=zero)

    zf.simulate(RANKS, main)


def test_options_of_a_dict_stand_once() -> None:
    def main(group: zf.Group) -> None:
        make = lambda zero, **options: Engine(linear(), optim.sgd(0.5), zero=zero, **options)
        assert make({"stage": 2, "group": group}).state.params.group is group
        half = {"stage": 2, "precision": torch.bfloat16}
        with pytest.raises(OptionError, match=r"got precision in zero= too"):
            make(half, group=group, precision=torch.float16)
        with pytest.raises(OptionError, match=r"got num_micro_batches in zero=.*accumulate="):
            make({"stage": 2, "num_micro_batches": 4}, group=group)

    zf.simulate(RANKS, main)


@EACH_STAGE
def test_forward_passes_may_be_dropped_or_share_a_loss(stage: int) -> None:
    def main(group: zf.Group) -> None:
        x = batches(1, group.size)[0][group.rank][0]
        engine = Engine(linear(), optim.sgd(0.5), zero=stage, group=group)
        weight = engine.state_dict()["weight"]
        engine(x)
        kept = engine(x)
        engine.backward(engine(x).sum() + engine(2 * x).sum())
        engine.zero_grad()
        engine.backward(engine(x).sum() + engine(2 * x).sum())
        engine.step()
        mean = torch.stack([b[0].sum(0) for b in batches(1, group.size)[0]]).mean(0)
        expected = weight - 0.5 * 3 * mean
        torch.testing.assert_close(engine.state_dict()["weight"], expected)
        with pytest.raises(ZfunError, match=r"since the last step; got outputs of an earlier"):
            engine.backward(kept.sum())

    zf.simulate(RANKS, main)


class Token:
    """Lives as long as the graph that has it."""


class Watched(nn.Module):
    """Knows whether the graphs of earlier calls are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5))
        self.seen: list[weakref.ref[Token]] = []

    def forward(self, x: Tensor) -> Tensor:
        out, token = F.linear(x, self.weight), Token()
        if out.requires_grad:
            out.register_hook(lambda grad, token=token: None)
        self.seen.append(weakref.ref(token))
        return out


def test_a_dropped_forward_pass_keeps_no_graph() -> None:
    def main(group: zf.Group) -> None:
        module, x = made(Watched), torch.ones(3, 5)
        engine = Engine(module, optim.sgd(0.5), zero=3, group=group)
        for _ in range(3):
            out = engine(x)
            engine(x)
            assert [ref() is None for ref in module.seen] == [False, True]
            engine.backward(out.sum())
            engine.step()
            del out
            assert [ref() for ref in module.seen] == [None, None]
            module.seen.clear()

    zf.simulate(RANKS, main)


def test_a_loss_that_is_kept_keeps_no_inputs() -> None:
    def main(group: zf.Group) -> None:
        engine, kept = Engine(linear(), optim.sgd(0.5), zero=3, group=group), []
        x = torch.ones(3, 5, requires_grad=True) * 2
        memory = weakref.ref(x.untyped_storage())
        kept.append(engine(x).sum())
        engine.backward(kept[0])
        del x
        assert memory() is None

    zf.simulate(RANKS, main)


WRONG: list[tuple[Callable[[Engine, Tensor], Any], str]] = [
    (lambda e, x: e.step(), r"step\(\) takes the gradients of backward\(\); got none"),
    (lambda e, x: e.backward(e(x)), r"takes a scalar loss; got Tensor; reduce it with mean"),
    (lambda e, x: e.backward(x.sum()), "since the last step; got a loss of none"),
    (
        lambda e, x: [e(x), e.backward(x.clone().requires_grad_().sum())],
        "depends on none of them",
    ),
    (
        lambda e, x: [e.backward(e(x).sum()), e.backward(e(x).sum(), scale=0.5)],
        "weights of one kind",
    ),
    (lambda e, x: e.backward(zf.weighted_mean(e(x).sum(), 2), scale=1.0), "leave scale out"),
    (lambda e, x: e.load_state_dict({"weight": x}), r"missing are \['bias'\]"),
    (
        lambda e, x: e.load_state_dict({"weight": x, "bias": x, "b": x}),
        r"unknown are \['b'\]",
    ),
    (
        lambda e, x: e.load_state_dict({"weight": x, "bias": x}),
        r"'weight' has \(2, 5\); got \(3, 5\)",
    ),
]


@pytest.mark.parametrize(("use", "match"), WRONG)
def test_a_wrong_use_is_told_and_leaves_the_state(use: Any, match: str) -> None:
    def main(group: zf.Group) -> None:
        engine = Engine(linear(), optim.sgd(0.5), zero=3, group=group)
        before, x = engine.state_dict(), torch.ones(3, 5)
        with pytest.raises(ZfunError, match=match) as caught:
            use(engine, x)
        assert isinstance(caught.value, (OptionError, SpecMismatch, ZfunError))
        assert_same_bits(engine.state_dict(), before)
        engine.train().zero_grad()
        engine.backward(engine(x).sum())
        assert engine.step() is not None

    zf.simulate(RANKS, main)


def test_a_loss_of_another_engine_is_refused() -> None:
    def main(group: zf.Group) -> None:
        first, second = (Engine(linear(), optim.sgd(0.5), group=group) for _ in range(2))
        outs = [engine(torch.ones(3, 5)).sum() for engine in (first, second)]
        with pytest.raises(ZfunError, match="depends on none of them; call backward"):
            first.backward(outs[1])

    zf.simulate(RANKS, main)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimizer_has_parameters_of_the_module_alone(frozen: bool) -> None:
    """torch would step the other one, and an engine does not."""
    module, other = linear(), nn.Parameter(torch.ones(7), requires_grad=not frozen)
    rule = torch.optim.SGD([*module.parameters(), other], 0.5)
    with pytest.raises(OptionError, match=r"of the model; got one of shape \(7,\) that is none"):
        Engine(module, rule)
    late = torch.optim.SGD(module.parameters(), 0.5)
    engine = Engine(module, late)
    late.add_param_group({"params": [other]})
    with pytest.raises(OptionError, match=r"got one of shape \(7,\) that is none of them"):
        engine(torch.ones(3, 5))
