"""Runs that go on from a checkpoint: the numbers and the constants of parameter groups."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import batch, config, net, ranks, trained, weights
from zfun.errors import CheckpointError, OptionError
from zfun.interop import Engine, from_ds_config
from zfun.interop._configured import ConfiguredOptimizer
from zfun.optim import HyperparamsState

MUON = {"type": "Muon", "params": {"lr": 0.01}}


def made(group: zf.Group, stage: int, model: nn.Module, **more: Any) -> Any:
    return deepspeed.initialize(model=model, config=config(stage, **more), mpu=ranks(group))[0]


def early(state: Any) -> Any:
    """A state as earlier versions saved it, whose Muon had one number in the state."""
    if isinstance(state, HyperparamsState):
        numbers = {name: x for name, x in state.hyperparams.items() if name in ("lr", "max_norm")}
        return state._replace(hyperparams=numbers, inner=early(state.inner))
    if isinstance(state, dict):
        return {name: early(x) for name, x in state.items()}
    if isinstance(state, tuple) and not isinstance(state, zf.Flat):
        parts = map(early, state)
        return state._make(parts) if hasattr(state, "_make") else tuple(parts)
    return state


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_takes_a_muon_of_earlier_versions(stage: int, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        engine, other = (made(group, stage, net(seed), optimizer=MUON) for seed in (0, 1))
        trained(engine, group, 0, 2)
        data = {"lr": [0.01], "counters": {"global_steps": 2}}
        zf.save(tmp_path / "early", early(engine._core.state), data=data)
        other.load_checkpoint(tmp_path, "early")
        assert trained(other, group, 2, 2) == trained(engine, group, 2, 2)
        torch.testing.assert_close(weights(other), weights(engine), rtol=0, atol=0)

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trainer_trains_and_resumes_a_muon(stage: int) -> None:
    trainers = pytest.importorskip("tests.interop.trainers")
    from zfun.interop.transformers import Trainer

    section = {"type": "Muon", "params": {"lr": "auto", "adam_lr": 3e-3}}
    zero = {"optimizer": section, "zero_optimization": {"stage": stage}}
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        first = trainers.make(Trainer, folder, options=options, zero=zero)
        first.train()
        saved = Path(folder) / "checkpoint-2"
        assert any(saved.iterdir())
        resumed = trainers.make(Trainer, folder, options=options, zero=zero)
        resumed.train(resume_from_checkpoint=str(saved))
        assert trainers.history(resumed) == trainers.history(first)
        # The same steps with a state of earlier versions.
        state = zf.load(saved / "zfun", resumed.engine.state, rng=False).state
        zf.save(saved / "zfun", early(state), step=2, keep=1)
        old = trainers.make(Trainer, folder, options=options, zero=zero)
        old.train(resume_from_checkpoint=str(saved))
        assert trainers.history(old) == trainers.history(first)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_lightning_trains_and_resumes_a_muon(stage: int, tmp_path: Path) -> None:
    lightnings = pytest.importorskip("tests.interop.lightnings")
    import lightning as L

    from zfun.interop.lightning import ZfunStrategy

    class Small(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.losses = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), list[float]()

        def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(rows).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            raise AssertionError("the optimizer of the configuration goes first")

    section = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01}}
    options = {"optimizer": section, "gradient_clipping": 0.0}
    rows: Any = torch.linspace(-1, 1, 16).view(8, 2)

    def fitted(epochs: int, path: Path | None = None) -> Any:
        strategy = ZfunStrategy(config={"zero_optimization": {"stage": stage}, **options})
        more = {"max_epochs": epochs, "enable_checkpointing": False}
        trainer = lightnings.trainer_of(strategy, 1, tmp_path, **more)
        module = Small()
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=path)
        return trainer, module

    trainer, first = fitted(1)
    trainer.save_checkpoint(tmp_path / "new")
    path = tmp_path / "old"
    trainer.save_checkpoint(path)
    (engine,) = trainer.strategy._run.engines
    found = zf.load(path, engine.state)
    zf.save(path, early(found.state), data=found.data, keep=1)
    straight = fitted(2)[1].losses
    assert first.losses == straight[:4]
    for saved in (tmp_path / "new", path):
        assert fitted(2, saved)[1].losses == straight[4:]


SGD = {"lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p, on: torch.optim.SGD(p, **SGD, nesterov=on), "nesterov"),
        (lambda p, on: torch.optim.SGD(p, **SGD, maximize=on), "maximize"),
        # With dampening the rule is torch's own, whose numbers have other names.
        (lambda p, on: torch.optim.SGD(p, **SGD, dampening=0.5 * on), "dampening"),
        (lambda p, on: torch.optim.RAdam(p, betas=(0.5 if on else 0.9, 0.9)), "betas"),
        (lambda p, on: torch.optim.Adam(p, amsgrad=on), "amsgrad"),
    ],
)
@pytest.mark.parametrize("of_facade", [True, False])
def test_a_constant_of_another_run_is_refused_by_name(
    make: Callable[[Any, bool], Any], name: str, of_facade: bool, tmp_path: Path
) -> None:
    def begun(group: zf.Group, is_on: bool, seed: int) -> Any:
        model = net(seed)
        options = {"model": model, "optimizer": make(model.parameters(), is_on)}
        return deepspeed.initialize(**options, config=config(2), mpu=ranks(group))[0]

    def main(group: zf.Group) -> None:
        for saved, loaded in ((True, False), (False, True)):
            engine, other = begun(group, saved, 0), begun(group, loaded, 1)
            trained(engine, group, 0, 1)
            engine.save_checkpoint(tmp_path, str(saved))
            before = weights(other)
            state = engine.optimizer.state_dict()
            load = (
                partial(other.load_checkpoint, tmp_path, str(saved))
                if of_facade
                else partial(other.optimizer.load_state_dict, state)
            )
            with pytest.raises(CheckpointError, match=rf"has constant {name}; got .* saved group"):
                load()
            torch.testing.assert_close(weights(other), before, rtol=0, atol=0)
            trained(other, group, 0, 1)

    zf.simulate(1, main)


def test_options_that_deepspeed_keeps_outside_of_groups_are_those_of_the_configuration(
    tmp_path: Path,
) -> None:
    def main(group: zf.Group, kind: str, name: str, saved: Any, own: Any) -> None:
        def begun(value: Any) -> Any:
            section = {"type": kind, "params": {"lr": 0.1, name: value}}
            return made(group, 1, net(), optimizer=section, gradient_clipping=0.0)

        engine, other = begun(saved), begun(own)
        engine.save_checkpoint(tmp_path, kind)
        other.load_checkpoint(tmp_path, kind)
        third = begun(own)
        third.optimizer.load_state_dict(engine.optimizer.state_dict())
        for resumed in (other, third):
            assert resumed.optimizer.param_groups[0][name] == own
        expected = trained(begun(own), group, 0, 2)
        assert trained(other, group, 0, 2) == expected
        assert trained(third, group, 0, 2) == expected

    zf.simulate(1, partial(main, kind="Adam", name="adam_w_mode", saved=True, own=False))
    zf.simulate(1, partial(main, kind="OneBitAdam", name="freeze_step", saved=2, own=3))


def test_a_rate_that_a_script_has_set_is_loaded_behind_the_scheduler(tmp_path: Path) -> None:
    warmup = {"warmup_max_lr": 0.1, "warmup_num_steps": 4}
    section = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": warmup}}

    def main(group: zf.Group) -> None:
        engine, other = made(group, 2, net(), **section), made(group, 2, net(1), **section)
        trained(engine, group, 0, 1)
        engine.set_lr(0.03)
        engine.save_checkpoint(tmp_path)
        other.load_checkpoint(tmp_path)
        assert other.get_lr() == [0.03]
        assert trained(other, group, 1, 2) == trained(engine, group, 1, 2)

    zf.simulate(2, main)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_decay", None, "weight_decay; got None in a group, and 0"),
        ("maximize", True, "maximize; got True in a group, and False before"),
        ("nesterov", None, "nesterov; got None in a group, and False before"),
        ("dampening", 0.5, r"dampening; got 0\.5 in a group, and 0 before"),
    ],
)
def test_a_number_that_becomes_a_constant_is_refused(name: str, value: Any, message: str) -> None:
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), **SGD)
    engine = Engine(module, optimizer, zero=1, group=zf.process_group())
    engine.backward(engine(torch.ones(1, 2)).sum())
    optimizer.param_groups[0][name] = value
    with pytest.raises(OptionError, match=message):
        engine.step()


def test_numbers_of_a_state_without_groups_are_loaded(tmp_path: Path) -> None:
    """Only groups of torch have numbers of their own."""
    rule = zf.optim.inject_hyperparams(zf.optim.sgd)
    first, second = (Engine(nn.Linear(2, 1), rule(rate)) for rate in (0.1, 0.2))
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.hyperparams["learning_rate"] == 0.1


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("is_read", [True, False])
def test_gradients_under_a_loss_scale_are_shown_without_the_scale(
    is_read: bool, stage: int
) -> None:
    half = {"enabled": True, "loss_scale": 8.0}
    section = {"type": "SGD", "params": {"lr": 0.1}}
    utils = deepspeed.utils

    def main(group: zf.Group) -> None:
        clip = {"gradient_clipping": 0.0, "gradient_accumulation_steps": 1}
        engine = made(group, stage, net(), optimizer=section, fp16=half, **clip)
        x, y = batch(0, group.rank, group.size)
        engine.backward((engine(x.half()).float() - y).square().mean())
        weight = engine.module.body[0].weight
        whole = utils.safe_get_full_grad(weight)
        assert whole is not None
        if is_read:
            # The engine has moved the scaled gradient to .grad.
            torch.testing.assert_close(weight.grad.float(), 8 * whole, rtol=0, atol=0)
            torch.testing.assert_close(utils.safe_get_full_grad(weight), whole, rtol=0, atol=0)
        utils.safe_set_full_grad(weight, whole * 0.5)
        torch.testing.assert_close(utils.safe_get_full_grad(weight), whole * 0.5)
        before = utils.safe_get_full_fp32_param(weight)
        engine.step()
        assert before is not None
        after = utils.safe_get_full_fp32_param(weight)
        torch.testing.assert_close(after, before - 0.1 * 0.5 * whole, rtol=0, atol=1e-7)

    zf.simulate(2, main)


def prepared(make: Callable[[Any], Any]) -> Any:
    """Return a prepared loop of accelerate: the accelerator, the model, the optimizer."""
    pytest.importorskip("accelerate")
    from zfun.interop.accelerate import Accelerator

    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True, zero=1), nn.Linear(3, 1)
    return accelerator, *accelerator.prepare(model, make(model.parameters()))


def accelerated(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_of_accelerate_refuses_other_constants_where_it_loads(tmp_path: Path) -> None:
    first = prepared(partial(torch.optim.SGD, **{**SGD, "nesterov": True}))
    accelerated(*first)
    first[0].save_state(str(tmp_path))
    other = prepared(partial(torch.optim.SGD, **SGD))
    with pytest.raises(CheckpointError, match="has constant nesterov; got True in a saved group"):
        other[0].load_state(str(tmp_path))
    accelerated(*other)
    assert other[2].param_groups[0]["nesterov"] is False


def test_a_loop_of_accelerate_keeps_the_mode_of_adam_of_its_own_run(tmp_path: Path) -> None:
    """As DeepSpeed, whose optimizers keep the mode outside of the groups."""

    def make(is_on: bool) -> Any:
        options = {"lr": 0.1, "weight_decay": 0.5, "adam_w_mode": is_on}
        rule: Any = from_ds_config({"optimizer": {"type": "Adam", "params": options}}).rule
        return prepared(lambda params: ConfiguredOptimizer(params, rule))

    first = make(True)
    accelerated(*first)
    first[0].save_state(str(tmp_path))
    other = make(False)
    other[0].load_state(str(tmp_path))
    accelerated(*other)
    (group,) = other[2].param_groups
    assert (group["adam_w_mode"], group["weight_decay"]) == (False, 0.5)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9),
}


@pytest.mark.parametrize("holds_tensor", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_that_resumes_has_the_numbers_of_its_groups(
    schedule: str, stage: int, holds_tensor: bool, tmp_path: Path
) -> None:
    """Schedulers compute a rate from the one before, which a load left at that of a new run."""

    def run(group: zf.Group, resumes: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        model = net()
        rate = torch.tensor(0.1) if holds_tensor else 0.1
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, "lr": rate, "weight_decay": 0.2}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        scheduler = SCHEDULES[schedule](optimizer)
        engine = Engine(model, optimizer, zero=stage, group=group)
        begin = 0
        if resumes:
            begin = 4
            loaded = engine.load(tmp_path)
            scheduler.load_state_dict(loaded["scheduler"])
            assert optimizer.param_groups[0]["weight_decay"] == 0.3
        rates = []
        for step in range(begin, 8):
            x, y = batch(step, group.rank, group.size)
            engine.backward(torch.nn.functional.mse_loss(model(x), y))
            engine.step()
            scheduler.step(*([1.0] if schedule == "plateau" else []))
            rates.append([float(x["lr"]) for x in optimizer.param_groups])
            if step == 3 and not resumes:
                optimizer.param_groups[0]["weight_decay"] = 0.3
                state = {**scheduler.state_dict()}
                state.pop("optimizer", None)
                engine.save(tmp_path, {"scheduler": _plain(state)})
        return rates[-4:], {name: x.clone() for name, x in engine.state_dict().items()}

    whole, resumed = zf.simulate(2, run, False), zf.simulate(2, run, True)
    assert resumed[0][0] == whole[0][0]
    torch.testing.assert_close(resumed[0][1], whole[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("reads", [False, True])
def test_gradients_before_a_load_stay(reads: bool, stage: int, tmp_path: Path) -> None:
    """A load dropped them, as with a number of micro-batches that does not divide an epoch."""
    accelerate = pytest.importorskip("accelerate")
    from zfun.interop.accelerate import Accelerator

    found = []
    for accelerator in (accelerate.Accelerator(cpu=True), Accelerator(cpu=True, zero=stage)):
        model = net()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
        norms = []
        for step in range(5):
            x, y = batch(step, 0, 1)
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            if reads:
                norms += [float(x.grad.norm()) for x in model.parameters()]
            if step in (1, 4):
                optimizer.step()
                optimizer.zero_grad()
            folder = tmp_path / str(len(found))
            if step == 1:
                accelerator.save_state(str(folder))
            if step == 3:
                accelerator.load_state(str(folder))
        values = model.state_dict().items()  # of a DDP, where an earlier test left a group
        found.append((norms, {name.removeprefix("module."): x.clone() for name, x in values}))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1])


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    number = lambda x: float(x) if isinstance(x, torch.Tensor) else x
    return {
        name: list(map(number, x)) if isinstance(x, list) else number(x)
        for name, x in state.items()
        if isinstance(x, (bool, int, float, str, list, type(None), torch.Tensor))
    }


def test_groups_keep_their_numbers_in_a_load_that_asks_for_it(tmp_path: Path) -> None:
    group = zf.collectives.single_group()

    def engine_of(**options: Any) -> tuple[Any, Engine]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), **options)
        return optimizer, Engine(model, optimizer, group=group)

    engine_of(lr=0.1, amsgrad=True)[1].save(tmp_path / "a", "mine")
    optimizer, engine = engine_of(lr=0.2, amsgrad=True)
    assert engine.load(tmp_path / "a", keeps_groups=True) == "mine"
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert engine.load(tmp_path / "a") == "mine"
    assert optimizer.param_groups[0]["lr"] == 0.1
    # An earlier version saved the caller's values alone.
    zf.save(tmp_path / "b", engine.state, data={"mine": 1})
    assert engine.load(tmp_path / "b") == {"mine": 1}
    optimizer, engine = engine_of(lr=0.2, betas=(0.5, 0.9), amsgrad=True)
    before = engine.state
    with pytest.raises(CheckpointError, match=r"Adam has constant .*; make the optimizer with the"):
        engine.load(tmp_path / "a")
    assert engine.state.opt_state is before.opt_state
