"""Averages of parameters in engines and in the Trainer, beside averages of plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun.errors import CheckpointError, OptionError
from zfun.interop.engine import Engine, ParamGroups, named_leaves
from zfun.interop.engine._values import without_average

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

from tests.interop import trainers  # noqa: E402
from zfun.interop.transformers import EmaCallback, Trainer  # noqa: E402

DECAY = 0.6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def engine_of(
    group: zf.Group, stage: int, module: nn.Module, optimizer: Any = None, **options: Any
) -> Engine:
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=0.05)
    groups = ParamGroups(optimizer, named_leaves(module))
    groups.ema_decay = DECAY
    return Engine(module, groups, zero=stage, group=group, **options)


def train(engine: Engine, steps: range) -> None:
    params = engine.state.params
    for step in steps:
        x = batch_of(step, params.group.rank).to(params.layout.buckets[0].dtype)
        engine.backward(engine(x).square().mean())
        engine.step()


def plain_run(ranks: int, steps: range) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a module and its averages, as one process trains on the batches of all ranks."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    average = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in steps:
        optimizer.zero_grad()
        x = torch.cat([batch_of(step, rank) for rank in range(ranks)])
        module(x).square().mean().backward()
        optimizer.step()
        for name, p in module.named_parameters():
            average[name].lerp_(p.detach(), 1 - DECAY)
    return module, average


# Writes that would be lost at the end of the context, or would change the average.
CHANGES: dict[str, Callable[[Engine], Any]] = {
    "step": lambda engine: train(engine, range(1)),
    "state": lambda engine: setattr(engine, "state", engine.state),
    "load": lambda engine: engine.load("nowhere"),
    "weights": lambda engine: engine.load_state_dict(engine.state_dict()),
    "write": lambda engine: engine.write({"0.bias": torch.zeros(6)}),
    "numbers": lambda engine: engine.set_hyperparams(lr=0.5),
    "torch": lambda engine: engine.load_optimizer_state(engine.optimizer_state()),
    "offload": lambda engine: engine.offload(),
    "close": lambda engine: engine.close(),
    "hand over": lambda engine: engine.hand_over(),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_shows_the_average_in_a_context(stage: int) -> None:
    plain, average = plain_run(2, range(4))

    def main(group: zf.Group) -> None:
        engine = engine_of(group, stage, net())
        train(engine, range(4))
        with engine.averaged():
            found = engine.state_dict()
            output = engine(batch_of(9, 0)).detach()
            for change in CHANGES.values():
                with pytest.raises(OptionError, match=r"inside of engine\.averaged\(\)"):
                    change(engine)
            engine.zero_grad()
        for name, value in average.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        expected = torch.func.functional_call(plain, average, (batch_of(9, 0),))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(engine.state_dict()[name], p, rtol=1e-5, atol=1e-6)
        # And the run goes on.
        train(engine, range(4, 5))

    zf.simulate(2, main)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_an_average_behind_clipping_is_found(precision: Any) -> None:
    """An engine with a norm puts its clipping before the optimizer that keeps the average."""

    def main(group: zf.Group) -> None:
        rule = zf.optim.ema(DECAY, zf.optim.sgd(0.1))
        options: dict[str, Any] = {"zero": 2, "group": group, "precision": precision}
        engine, bare = Engine(net(), rule, clip_norm=1e9, **options), Engine(net(), rule, **options)
        for each in (engine, bare):
            train(each, range(2))
        expected = zf.unshard(bare.state.params)["0.weight"].clone()
        assert engine.state_dict()["0.weight"].equal(expected)
        with engine.averaged(), bare.averaged():
            found = engine.state_dict()["0.weight"]
            assert found.equal(bare.state_dict()["0.weight"])
            assert not found.equal(expected)
        for each in (engine, bare):
            each.close(average=True)
        weights = [each.module.get_parameter("0.weight") for each in (engine, bare)]
        assert weights[0].equal(weights[1])

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_write_to_the_module_does_not_reach_the_average(stage: int) -> None:
    engine = engine_of(zf.process_group(), stage, net())
    train(engine, range(2))
    with engine.averaged():
        expected = engine.state_dict()
        for buffer in engine.state.params.buffers:
            buffer.zero_()
    with engine.averaged():
        torch.testing.assert_close(engine.state_dict(), expected, rtol=0, atol=0)


def test_contexts_that_use_other_values_are_refused() -> None:
    def main(group: zf.Group) -> None:
        engine = engine_of(group, 3, net())
        train(engine, range(1))
        with engine.averaged(), engine.uneven():
            engine.eval()(batch_of(0, 0))
        with (
            engine.uneven(),
            pytest.raises(OptionError, match=r"got averaged\(\) inside of uneven"),
            engine.averaged(),
        ):
            pass
        engine.offload()
        with pytest.raises(OptionError, match="call reload"), engine.averaged():
            pass
        with pytest.raises(OptionError, match="call reload"):
            engine.close(average=True)
        engine.reload()
        train(engine, range(1, 2))

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_in_the_average_leaves_the_parameters(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(zf.process_group(), stage, net())
    train(engine, range(2))
    before = engine.state_dict()
    own, shown = engine._show, []

    def show() -> None:
        shown.append(None)
        if len(shown) % 2:
            raise RuntimeError("lost")
        own()

    monkeypatch.setattr(engine, "_show", show)
    for act in (lambda: engine.averaged().__enter__(), lambda: engine.close(average=True)):
        with pytest.raises(RuntimeError, match="lost"):
            act()
        torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)


def test_a_torch_state_is_not_read_from_an_average_inside_of_a_chain() -> None:
    chained = zf.optim.chain(zf.optim.ema(DECAY, zf.optim.sgd(0.1)))
    state = chained.init({"w": torch.zeros(2)})
    with pytest.raises(OptionError, match=r"got one inside of another, such as chain\(\)"):
        without_average(state)


@pytest.mark.parametrize("stage", [2, 3])
def test_unfrozen_leaves_join_the_average(stage: int) -> None:
    """The average of the others goes on; that of a new leaf begins at its value."""

    def main(group: zf.Group) -> None:
        module = net()
        module[2].requires_grad_(False)
        engine = engine_of(group, stage, module, torch.optim.SGD(module.parameters(), lr=0.1))
        train(engine, range(2))
        with engine.averaged():
            before = engine.state_dict()
        first = engine.state_dict()["2.weight"]
        module[2].requires_grad_(True)
        train(engine, range(2, 3))
        now = engine.state_dict()
        with engine.averaged():
            found = engine.state_dict()
        for name, old in (("0.weight", before["0.weight"]), ("2.weight", first)):
            torch.testing.assert_close(found[name], old.lerp(now[name], 1 - DECAY))

    zf.simulate(2, main)


def test_the_state_of_a_torch_optimizer_has_no_average_and_is_refused() -> None:
    def main(group: zf.Group) -> None:
        engine = engine_of(group, 2, net())
        train(engine, range(2))
        saved = engine.optimizer_state()
        assert {name for entry in saved["state"].values() for name in entry} == {
            "step",
            "exp_avg",
            "exp_avg_sq",
        }
        with pytest.raises(CheckpointError, match="in zfun's checkpoints alone"):
            engine.load_optimizer_state(saved)

    zf.simulate(2, main)


def test_a_saved_run_goes_on_with_its_average(tmp_path: Path) -> None:
    def run(group: zf.Group, stage: int, steps: range, load: bool) -> dict[str, Tensor]:
        engine = engine_of(group, stage, net())
        if load:
            engine.load(tmp_path / "run")
        train(engine, steps)
        engine.save(tmp_path / ("run" if not load else "next"))
        with engine.averaged():
            return engine.state_dict()

    zf.simulate(2, run, 3, range(2), False)
    resumed = zf.simulate(2, run, 1, range(2, 4), True)[0]
    for name, value in plain_run(2, range(4))[1].items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)


class PlainAverage(transformers.TrainerCallback):
    """The average of a plain loop."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.values = {n: p.detach().clone() for n, p in kwargs["model"].named_parameters()}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, p in kwargs["model"].named_parameters():
            self.values[name].lerp_(p.detach(), 1 - DECAY)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_trainer_evaluates_and_saves_the_average(stage: int, tmp_path: Path) -> None:
    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    ours = trainers.make(Trainer, str(tmp_path / "ours"), options=options, zero=stage)
    ours.add_callback(EmaCallback(DECAY))
    ours.train()
    theirs = trainers.make(transformers.Trainer, str(tmp_path / "theirs"), options=options)
    plain = PlainAverage()
    theirs.add_callback(plain)
    theirs.train()
    last = {name: p.detach().clone() for name, p in theirs.model.named_parameters()}
    theirs.model.load_state_dict(plain.values, strict=False)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)
    ours.save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name in saved:
        torch.testing.assert_close(saved[name], plain.values[name], rtol=1e-4, atol=1e-6)
    # Outside of evaluation the model has its parameters.
    for name, p in ours.gather_model().named_parameters():
        torch.testing.assert_close(p, last[name], rtol=1e-4, atol=1e-6)
