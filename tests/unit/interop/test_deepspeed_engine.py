"""Loops of DeepSpeed's users in other forms than backward() and step(), beside plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, TensorDataset

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import (
    ADAMW,
    BATCH,
    MICRO_BATCHES,
    WARMUP,
    WIDTH,
    batch,
    config,
    net,
    ranks,
    trained,
    weights,
)
from zfun.errors import CheckpointError, OptionError, ZfunError

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
STAGES = (0, 1, 2, 3)
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
utils: Any = deepspeed.utils


def made(group: zf.Group, stage: int, model: nn.Module | None = None, **more: Any) -> Any:
    section = {"optimizer": SGD, "gradient_clipping": 0.0, **more}
    return deepspeed.initialize(
        model=net() if model is None else model, config=config(stage, **section), mpu=ranks(group)
    )[0]


def error(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


Pass = Callable[[Any, Tensor, Tensor], None]

# How a script may come to gradients, on an engine or on a plain module.
PASSES: dict[str, Pass] = {
    "loss": lambda model, x, y: error(model(x), y).backward(),
    "module": lambda model, x, y: error(getattr(model, "module", model)(x), y).backward(),
    "non-scalar": lambda model, x, y: model(x).backward(y),
    "twice": lambda model, x, y: _twice(model(x), y),
    "two losses": lambda model, x, y: (error(model(x), y) + model(y).mean()).backward(),
    "grad of an input": lambda model, x, y: error(model(x.requires_grad_()), y).backward(),
    "a part": lambda model, x, y: error(getattr(model, "module", model).body(x), y).backward(),
    "autograd": lambda model, x, y: torch.autograd.backward([model(x).mean(), model(y).sum()]),
}


def _twice(out: Tensor, y: Tensor) -> None:
    error(out, y).backward(retain_graph=True)
    out.sum().backward()


def plain(step: Pass, steps: int, size: int) -> dict[str, Tensor]:
    """The same in torch: the mean over the ranks and the micro-batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for first in range(0, steps * MICRO_BATCHES, MICRO_BATCHES):
        for micro in range(first, first + MICRO_BATCHES):
            for rank in range(size):
                step(model, *batch(micro, rank, size))
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= size * MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize("form", PASSES)
@pytest.mark.shows(
    "`loss.backward()`, `out.backward(grad)`",
    "right",
    "for every engine whose outputs the loss has, divided by the number of micro-batches",
)
def test_plain_backward_passes_are_divided_as_those_of_the_engine(form: str) -> None:
    def main(group: zf.Group, stage: int) -> Any:
        engine = made(group, stage)
        for micro in range(2 * MICRO_BATCHES):
            PASSES[form](engine, *batch(micro, group.rank, group.size))
            engine.step()
        return weights(engine)

    expected = plain(PASSES[form], 2, 2)
    first = None
    for stage in STAGES:
        for found in zf.simulate(2, partial(main, stage=stage)):
            first = found if first is None else first
            torch.testing.assert_close(found, first, rtol=0, atol=0)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, **CLOSE)
    assert not torch.equal(expected["body.0.weight"], net().body[0].weight)  # pyrefly: ignore


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_of_two_engines_trains_both(stage: int) -> None:
    def main(group: zf.Group) -> Any:
        one, other = (
            made(group, stage, net(seed), gradient_accumulation_steps=1) for seed in (0, 1)
        )
        for step in range(2):
            x, y = batch(step, group.rank, group.size)
            error(other(one(x)), y).backward()
            one.step()
            other.step()
        return weights(one), weights(other)

    models = [net(seed) for seed in (0, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for step in range(2):
        for rank in range(2):
            x, y = batch(step, rank, 2)
            (error(models[1](models[0](x)), y) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found in zf.simulate(2, main):
        for values, model in zip(found, models, strict=True):
            for name, value in model.named_parameters():
                torch.testing.assert_close(values[name], value.detach(), **CLOSE)


@pytest.mark.shows(
    "losses over several engines", "right", "`engine.backward` gives gradients to its own engine"
)
def test_a_gan_trains_each_engine_by_its_own_loss() -> None:
    """The discriminator's part of the generator's loss is dropped, as zero_grad() does in torch."""

    def main(group: zf.Group, stage: int) -> Any:
        generator, critic = (made(group, stage, net(seed)) for seed in (0, 1))
        for step in range(2 * MICRO_BATCHES):
            x, y = batch(step, group.rank, group.size)
            critic.backward(critic(generator(x).detach()).mean() - critic(y).mean())
            critic.step()
            generator.backward(-critic(generator(x)).mean())
            generator.step()
        return weights(generator), weights(critic)

    models = [net(seed) for seed in (0, 1)]
    of_generator, of_critic = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models
    )
    kept: list[list[Tensor]] = [[], []]
    for step in range(2 * MICRO_BATCHES):
        x, y = batch(step, 0, 1)
        losses = (
            lambda x=x, y=y: models[1](models[0](x).detach()).mean() - models[1](y).mean(),
            lambda x=x: -models[1](models[0](x)).mean(),
        )
        for which, optimizer in ((1, of_critic), (0, of_generator)):
            own = list(models[which].parameters())
            grads = torch.autograd.grad(losses[1 - which]() / MICRO_BATCHES, own)
            kept[which] = [
                a + b for a, b in zip(grads, kept[which] or [torch.zeros(())] * 99, strict=False)
            ]
            if step % MICRO_BATCHES:
                for param, grad in zip(own, kept[which], strict=True):
                    param.grad = grad
                optimizer.step()
                kept[which] = []
    for stage in (1, 3):
        for values, model in zip(
            zf.simulate(1, partial(main, stage=stage))[0], models, strict=True
        ):
            for name, value in model.named_parameters():
                torch.testing.assert_close(values[name], value.detach(), **CLOSE)


@pytest.mark.shows(
    "`loss.backward()` with a loss scale", "refused", "call `engine.scale(loss).backward()`"
)
def test_a_scaled_loss_knows_the_scale() -> None:
    half = {"enabled": True, "initial_scale_power": 4}

    def main(group: zf.Group, stage: int, form: str) -> Any:
        engine = made(group, stage, fp16=half)
        assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == engine.cur_scale == 16.0
        for step in range(2 * MICRO_BATCHES):
            x, y = batch(step, group.rank, group.size)
            loss = error(engine(x.half()).float(), y)
            if form == "scale":
                scaled = engine.scale(loss)
                assert float(scaled.detach()) == 16 * float(loss.detach())
                scaled.backward()
            elif form == "backward":
                engine.backward(loss)
            else:
                with pytest.raises(ZfunError, match="with a loss scale, backward begins with"):
                    (engine.scale(loss) + loss if form == "sum" else loss).backward()
                return None
            engine.step()
        x, y = batch(0, group.rank, group.size)
        with pytest.raises(OptionError, match="a scaled loss is a scalar, and takes retain_graph"):
            engine.scale(error(engine(x.half()).float(), y)).backward(create_graph=True)
        assert not engine.optimizer.overflow
        return weights(engine)

    for stage in (1, 3):
        found = {
            form: zf.simulate(2, partial(main, stage=stage, form=form))
            for form in ("scale", "backward", "sum", "plain")
        }
        torch.testing.assert_close(found["scale"], found["backward"], rtol=0, atol=0)
    full = zf.simulate(1, lambda group: made(group, 1).scale(loss := torch.ones(())) is loss)
    assert full == [True]


@pytest.mark.shows(
    "`no_sync`, `coalesce_grad_reduction`",
    "right",
    "at every stage; each backward pass sends its own gradients",
)
def test_blocks_without_a_step_have_the_numbers_of_the_loop() -> None:
    def main(group: zf.Group, stage: int, form: str) -> Any:
        engine = made(group, stage, gradient_accumulation_steps=1)
        for first in (0, 2):
            losses = lambda first=first: (
                error(engine(x), y)
                for x, y in (batch(first + i, group.rank, group.size) for i in (0, 1))
            )
            if form == "sum":
                engine.backward(sum(losses()))
            else:
                with getattr(engine, form)():
                    for loss in losses():
                        engine.backward(loss)
                    with pytest.raises(OptionError, match=rf"inside {form}\(\); call step\(\)"):
                        engine.step()
                    with pytest.raises(OptionError, match=rf"stands alone; got .* {form}\(\)"):
                        engine.no_sync().__enter__()
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (2, 2)
        return weights(engine)

    for stage in (0, 3):
        expected = zf.simulate(2, partial(main, stage=stage, form="sum"))
        for form in ("no_sync", "coalesce_grad_reduction"):
            found = zf.simulate(2, partial(main, stage=stage, form=form))
            torch.testing.assert_close(found, expected, **CLOSE)


def stepped(counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Steps of so many micro-batches in torch, each the mean over two ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    micro = 0
    for count in counts:
        for _ in range(count):
            for rank in range(2):
                x, y = batch(micro, rank, 2)
                (error(model(x), y) / count / 2).backward()
            micro += 1
        optimizer.step()
        optimizer.zero_grad()
    return {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize("way", ["managed", "unmanaged", "boundary"])
def test_who_says_where_a_step_ends(way: str) -> None:
    """Steps of 1, 3 and 2 backward passes, whose mean the script takes itself."""

    def main(group: zf.Group, stage: int) -> Any:
        more: dict[str, Any] = {"managed_gradient_accumulation": way != "unmanaged"}
        engine = made(group, stage, **more)
        micro = 0
        for count in (1, 3, 2):
            for last in range(count):
                x, y = batch(micro, group.rank, group.size)
                micro += 1
                if way == "boundary":
                    engine.set_gradient_accumulation_boundary(last == count - 1)
                engine.backward(error(engine(x), y) / count, scale_wrt_gas=False)
                if way == "managed":
                    engine.set_gradient_accumulation_boundary(last == count - 1)
                    engine.step()
            if way != "managed":
                assert engine.is_gradient_accumulation_boundary() == (way == "boundary")
                engine.step()
        assert engine.global_steps == 3
        assert engine.was_step_applied()
        return weights(engine)

    expected = stepped((1, 3, 2))
    for stage in (0, 2, 3):
        for found in zf.simulate(2, partial(main, stage=stage)):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.parametrize("managed", [True, False])
def test_samples_are_counted_as_deepspeed_counts_them(managed: bool) -> None:
    """Where the script ends the steps, by the calls of backward(), and steps are boundaries."""

    def main(group: zf.Group) -> None:
        engine = made(group, 2, managed_gradient_accumulation=managed)
        assert engine.managed_gradient_accumulation() == managed
        inside: list[bool] = []
        ask = lambda *_: inside.append(engine.is_gradient_accumulation_boundary())
        engine.optimizer.optimizer.register_step_pre_hook(ask)
        whole = BATCH * MICRO_BATCHES * group.size
        samples = []
        for count in (1, 3, 2):
            for _ in range(count):
                x, y = batch(0, group.rank, group.size)
                engine.backward(error(engine(x), y))
                assert engine.is_gradient_accumulation_boundary() == (
                    managed and engine.micro_steps % 2 == 1
                )
            engine.step()
            samples.append(engine.global_samples)
        micro = BATCH * group.size
        assert samples == ([0, whole, whole] if managed else [micro, 4 * micro, 6 * micro])
        assert inside == [True] * (1 if managed else 3)
        assert not engine.is_gradient_accumulation_boundary() or managed

    zf.simulate(2, main)


def test_a_scheduler_that_needs_a_number_gets_the_batch_size() -> None:
    """As in DeepSpeed, unless step() has another one for it."""

    def rates_of(optimizer: Any, numbers: list[float]) -> list[float]:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        rates = []
        for number in numbers:
            plateau.step(number)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    def main(group: zf.Group, given: Any) -> list[float]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
            config=config(1, gradient_accumulation_steps=1),
            mpu=ranks(group),
        )[0]
        rates = []
        for number in range(5):
            x, y = batch(number, group.rank, group.size)
            engine.backward(error(engine(x), y))
            engine.step(None if given is None else {"metrics": given[number]})
            rates += engine.get_lr()
        return rates

    falling = [5.0, 4.0, 4.0, 4.0, 3.0]
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    assert zf.simulate(1, partial(main, given=None))[0] == rates_of(optimizer, [4.0] * 5)
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    assert zf.simulate(1, partial(main, given=falling))[0] == rates_of(optimizer, falling)


def test_the_loader_has_its_sampler_by_the_name_of_deepspeed() -> None:
    def main(group: zf.Group) -> None:
        data = TensorDataset(torch.arange(32.0))
        engine, _, loader, _ = deepspeed.initialize(
            model=net(), config=config(1, optimizer=ADAMW), mpu=ranks(group), training_data=data
        )
        orders = []
        for epoch in (0, 1, 0):
            loader.data_sampler.set_epoch(epoch)
            orders.append([x.tolist() for (x,) in loader])
        assert orders[0] == orders[2] != orders[1]
        own = SequentialSampler(data)
        evaluated: Any = engine.deepspeed_io(data, data_sampler=own)
        assert evaluated.data_sampler is own

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [1, 3])
def test_no_parameter_is_gathered_in_place_of_a_bias_that_is_not_there(stage: int) -> None:
    layer = nn.Linear(2, 2, bias=False)
    engine = deepspeed.initialize(model=layer, config=config(stage, optimizer=ADAMW))[0]
    gathered = deepspeed.zero.GatheredParameters
    with gathered(cast("Any", engine.module.bias)), gathered(layer.bias, modifier_rank=0):
        pass
    with gathered([layer.weight, layer.bias], modifier_rank=0):
        layer.weight.data.fill_(0.5)
    with gathered(layer.weight):
        assert layer.weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.shows(
    "`initialize` without an optimizer",
    "right",
    "the engine answers, saves and loads; `backward` and `step` are refused",
)
def test_a_model_without_an_optimizer_answers_and_is_saved(stage: int, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        engine, optimizer, loader, scheduler = deepspeed.initialize(
            model=net(), config=config(stage), mpu=ranks(group)
        )
        assert (loader, scheduler) == (None, None)
        assert optimizer is engine.optimizer
        assert (optimizer is None) is (stage < 3)
        assert (engine.get_lr(), engine.get_mom(), engine.get_type()) == ([], [], [])
        x, _ = batch(0, 0, 1)
        for out in (engine(x), engine.eval()(x), engine.module(x)):
            torch.testing.assert_close(out.detach(), net()(x).detach(), rtol=0, atol=0)
        for method in (engine.step, partial(engine.backward, engine(x).sum())):
            with pytest.raises(OptionError, match=r"trains a model; got an engine .* without an o"):
                method()
        assert engine.save_16bit_model(tmp_path, f"{stage}.bin")
        engine.load_module_state_dict(net(seed=4).state_dict())
        torch.testing.assert_close(weights(engine)["scale"], net(seed=4).state_dict()["scale"])
        wanted = net(seed=4)(x).detach()
        torch.testing.assert_close(engine(x).detach(), wanted, rtol=0, atol=0)

    zf.simulate(2, main)
    saved = torch.load(tmp_path / f"{stage}.bin")
    torch.testing.assert_close(saved, dict(net().state_dict()), rtol=0, atol=0)


def test_a_reference_model_takes_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, 2)
        trained(engine, group, 0, 1)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        reference, *_ = deepspeed.initialize(model=net(seed=3), config=config(3), mpu=ranks(group))
        assert reference.load_checkpoint(tmp_path)[1] == {"epoch": 1}
        torch.testing.assert_close(weights(reference), weights(engine), rtol=0, atol=0)

    zf.simulate(2, main)


@pytest.mark.parametrize("scheduler", ["configured", "torch"])
@pytest.mark.shows("`load_checkpoint` in part", "right", "client state, counters and scheduler")
def test_a_checkpoint_without_the_optimizer_has_the_rest(scheduler: str, tmp_path: Path) -> None:
    def begun(group: zf.Group, stage: int) -> Any:
        model = net()
        if scheduler == "configured":
            return made(group, stage, optimizer=ADAMW, scheduler=WARMUP)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            config=config(stage),
            mpu=ranks(group),
        )[0]

    def main(group: zf.Group, stage: int) -> None:
        engine = begun(group, stage)
        trained(engine, group, 0, 3)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        last = engine.lr_scheduler.state_dict()
        later: list[float] = []
        for parts, has_counters, has_scheduler in (
            ({"load_optimizer_states": False}, True, True),
            ({"load_lr_scheduler_states": False}, True, False),
            ({"load_module_only": True}, False, False),
            ({}, True, True),
        ):
            other = begun(group, 5 - stage)
            first = other.lr_scheduler.state_dict()
            path, client_state = other.load_checkpoint(tmp_path, **parts)
            assert path == str(tmp_path / "global_step3")
            assert client_state == {"epoch": 3}
            assert other.loaded_checkpoint_tag == "global_step3"
            counters = (other.global_steps, other.micro_steps, other.global_samples)
            assert counters == ((3, 0, 48) if has_counters else (0, 0, 0))
            assert other.lr_scheduler.state_dict() == (last if has_scheduler else first)
            torch.testing.assert_close(weights(other), weights(engine), rtol=0, atol=0)
            key = "exp_avg"
            moment = utils.safe_get_full_optimizer_state(other.module.scale, key)
            kept = not parts.keys() & {"load_optimizer_states", "load_module_only"}
            assert bool(moment.any()) == kept
            # As in DeepSpeed, rates are those of the groups.
            assert other.get_lr() == (engine.get_lr() if kept else begun(group, stage).get_lr())
            if has_scheduler and scheduler == "configured":
                trained(other, group, 3, 1)
                assert other.get_lr() == (later := later or other.get_lr())

    zf.simulate(2, partial(main, stage=2))


def test_a_scheduler_that_is_loaded_alone_writes_rates_at_the_next_step() -> None:
    """As in DeepSpeed, where code loads the scheduler by itself."""

    def main(group: zf.Group) -> None:
        engine, other = (made(group, 2, optimizer=ADAMW, scheduler=WARMUP) for _ in range(2))
        trained(engine, group, 0, 3)
        first = other.get_lr()
        assert first != engine.get_lr()
        other.lr_scheduler.load_state_dict(engine.lr_scheduler.state_dict())
        assert other.get_lr() == first
        assert other.lr_scheduler.last_batch_iteration == engine.lr_scheduler.last_batch_iteration
        for each in (engine, other):
            trained(each, group, 3, 1)
        assert other.get_lr() == engine.get_lr()

    zf.simulate(2, main)


def test_a_function_of_the_script_writes_the_weights(tmp_path: Path) -> None:
    def halved(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: value / 2 for name, value in src.items()})

    def main(group: zf.Group, stage: int) -> None:
        engine = made(group, stage)
        engine.load_module_state_dict(net(seed=2).state_dict(), custom_load_fn=halved)
        for name, value in net(seed=2).state_dict().items():
            torch.testing.assert_close(weights(engine)[name], value / 2)
        engine.save_checkpoint(tmp_path / str(stage))
        engine.load_checkpoint(tmp_path / str(stage), custom_load_fn=halved)
        for name, value in net(seed=2).state_dict().items():
            torch.testing.assert_close(weights(engine)[name], value / 4)

    for stage in (0, 3):
        zf.simulate(2, partial(main, stage=stage))


def test_frozen_parameters_are_left_out_of_a_checkpoint(tmp_path: Path) -> None:
    def frozen(seed: int) -> nn.Module:
        model = net(seed)
        for param in model.body.parameters():
            param.requires_grad_(False)
        return model

    def main(group: zf.Group, stage: int) -> None:
        engine = made(group, stage, frozen(0))
        names = {name for name, x in net().named_parameters() if not name.startswith("body.")}
        for found in (
            engine.module_state_dict(exclude_frozen_parameters=True),
            engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) or {},
        ):
            assert not found or found.keys() == names | {"last.weight"}
        folder = tmp_path / str(stage)
        trained(engine, group, 0, 1)
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
        rows = trained(engine, group, 1, 1)
        other = made(group, 5 - stage, frozen(0))
        other.load_checkpoint(folder, load_module_strict=False)
        assert trained(other, group, 1, 1) == rows
        third = made(group, stage, frozen(7))
        third.load_checkpoint(folder, load_module_only=True, load_module_strict=False)
        kept = weights(third)
        torch.testing.assert_close(kept["body.0.weight"], net(7).state_dict()["body.0.weight"])
        found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        assert found.keys() == names | {"last.weight"}
        torch.testing.assert_close(kept["first.weight"], found["last.weight"])

    for stage in (2, 3):
        zf.simulate(2, partial(main, stage=stage))


def test_a_checkpoint_has_one_tag_and_a_script(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, 3)
        with pytest.raises(CheckpointError, match=r"save under one tag; got 'rank[01]' here"):
            engine.save_checkpoint(tmp_path, tag=f"rank{group.rank}")
        engine.save_checkpoint(tmp_path, tag="one")

    zf.simulate(2, main)
    script = (tmp_path / "zero_to_fp32.py").read_text(encoding="utf-8")
    assert "zfun.interop.deepspeed.utils.zero_to_fp32" in script
    compile(script, "zero_to_fp32.py", "exec")
    assert not (tmp_path / "rank0").exists()


def test_a_tag_that_is_saved_again_is_the_new_save_alone(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        late, early = made(group, 2), made(group, 2)
        trained(late, group, 0, 3)
        trained(early, group, 0, 1)
        for engine in (late, early):
            engine.save_checkpoint(tmp_path, tag="last", client_state={"at": engine.global_steps})
            fresh = made(group, 3)
            assert fresh.load_checkpoint(tmp_path)[1] == {"at": engine.global_steps}
            torch.testing.assert_close(weights(fresh), weights(engine), rtol=0, atol=0)
        assert len(list((tmp_path / "last").glob("step-*"))) == 1

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_state_dict_of_the_optimizer_has_the_loss_scale(stage: int) -> None:
    half = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    section = {"type": "AdamW", "params": {"lr": 1e-2}}

    def main(group: zf.Group) -> None:
        def begun() -> Any:
            return made(group, stage, net(), optimizer=section, fp16=half)

        def steps(engine: Any, count: int) -> None:
            for micro in range(count * MICRO_BATCHES):
                x, y = batch(micro, group.rank, group.size)
                engine.backward(error(engine(x.half()).float(), y))
                engine.step()

        engine, other = begun(), begun()
        steps(engine, 3)
        assert engine.cur_scale != other.cur_scale
        saved = copy.deepcopy(engine.optimizer.state_dict())
        other.load_module_state_dict(weights(engine))
        other.optimizer.load_state_dict(saved)
        assert other.cur_scale == engine.cur_scale
        steps(engine, 3)
        steps(other, 3)
        assert other.cur_scale == engine.cur_scale
        torch.testing.assert_close(weights(other), weights(engine), rtol=0, atol=0)
        del saved["loss_scaler"]
        with pytest.raises(CheckpointError, match=r"loss scale of fp16; got a dict without"):
            other.optimizer.load_state_dict(saved)

    zf.simulate(2, main)


@pytest.mark.shows(
    "a step after which the loss scale grows",
    "different",
    "divided by the scale of its backward passes; DeepSpeed's by the next one, so it is half",
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_loss_scale_that_grows_changes_no_step(stage: int) -> None:
    """SGD, because the size of a gradient hardly counts in Adam."""
    section = {"type": "SGD", "params": {"lr": 1e-2}}

    def main(group: zf.Group) -> None:
        def run(**scale: float) -> tuple[dict[str, torch.Tensor], float]:
            model = net()
            before = {name: x.detach().clone() for name, x in model.named_parameters()}
            half = {"enabled": True, **scale}
            engine = made(group, stage, model, optimizer=section, fp16=half)
            for micro in range(4 * MICRO_BATCHES):
                x, y = batch(micro, group.rank, group.size)
                engine.backward(error(engine(x.half()).float(), y))
                engine.step()
            get: Any = deepspeed.utils.safe_get_full_fp32_param
            params = engine.module.named_parameters()
            return {name: get(x) - before[name] for name, x in params}, engine.cur_scale

        growing, scale = run(initial_scale_power=4, loss_scale_window=2)
        assert scale > 16
        constant, scale = run(loss_scale=16)
        assert scale == 16
        for name, change in constant.items():
            assert (growing[name] - change).norm() <= 1e-2 * change.norm() != 0, name

    zf.simulate(2, main)


@pytest.mark.parametrize("kind", ["bf16", "Lion", "Adagrad", "Muon", "torch"])
@pytest.mark.shows(
    "`optimizer.state_dict()`",
    "different",
    "whole moments: every rank calls, also where rank 0 alone saves",
)
def test_the_state_dict_of_the_optimizer_goes_on_bitwise(kind: str) -> None:
    def begun(group: zf.Group, stage: int, seed: int = 0) -> Any:
        if kind == "torch":
            model = net(seed)
            optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
            return deepspeed.initialize(
                model=model, optimizer=optimizer, config=config(stage), mpu=ranks(group)
            )[0]
        name = "AdamW" if kind == "bf16" else kind
        more = {"bf16": {"enabled": True}} if kind == "bf16" else {}
        section = {"type": name, "params": {"lr": 1e-2}}
        return made(group, stage, net(seed), optimizer=section, **more)

    def steps(engine: Any, group: zf.Group, first: int) -> Any:
        dtype = engine.module.scale.dtype
        for micro in range(first * MICRO_BATCHES, (first + 2) * MICRO_BATCHES):
            x, y = batch(micro, group.rank, group.size)
            engine.backward(error(engine(x.to(dtype)).float(), y))
            engine.step()
        return weights(engine), float(engine.get_global_grad_norm())

    def main(group: zf.Group, stage: int) -> None:
        engine = begun(group, stage)
        steps(engine, group, 0)
        engine.optimizer.param_groups[0]["lr"] = 0.03
        values = weights(engine)
        saved = copy.deepcopy(engine.optimizer.state_dict())
        expected = steps(engine, group, 2)
        other = begun(group, stage, seed=5)
        other.load_module_state_dict(values)
        other.optimizer.load_state_dict(saved)
        assert other.get_lr() == [0.03]
        torch.testing.assert_close(steps(other, group, 2), expected, rtol=0, atol=0)
        groups = saved["param_groups"]
        for lacks in ({"param_groups": groups}, {"state": {}, "param_groups": groups}):
            with pytest.raises(CheckpointError, match=r"moments of each leaf; got none named '"):
                other.optimizer.load_state_dict(lacks)

    for size, stage in ((1, 0), (2, 0), (2, 2), (2, 3)):
        zf.simulate(size, partial(main, stage=stage))


def test_methods_that_return_a_value_are_those_of_the_class() -> None:
    class Own(deepspeed.DeepSpeedEngine):
        def get_lr(self) -> list[float]:
            return [2 * rate for rate in super().get_lr()]

    def main(group: zf.Group) -> None:
        engine, cls = made(group, 2), cast(Any, deepspeed.DeepSpeedEngine)
        assert cls.get_lr(engine) == engine.get_lr() == [0.1]
        assert {"get_lr", "fp16_enabled", "optimizer_name", "cur_scale"} <= {*dir(engine)}
        assert cls.zero_optimization_stage.__name__ == "zero_optimization_stage"
        engine.__class__ = Own
        assert (engine.get_lr(), engine.optimizer_name(), engine.cur_scale) == ([0.2], "sgd", 1.0)

    zf.simulate(2, main)


def test_an_optimizer_is_torchs_and_steps_its_engine() -> None:
    def main(group: zf.Group, stage: int) -> Any:
        model = net()
        client = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            optimizer=client,
            config=config(stage, gradient_accumulation_steps=1),
            mpu=ranks(group),
        )
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        made: Any = engine.optimizer
        assert made is optimizer
        assert made.optimizer is client
        assert made.param_groups is client.param_groups
        assert (made.defaults["lr"], made.overflow, made.loss_scale) == (0.1, False, 1.0)
        assert hasattr(made, "parameter_offload") == (stage == 3)
        if stage == 3:
            assert made.parameter_offload.module is model
            told: Any = model
            assert list(told.ds_external_parameters()) == []
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        before = weights(engine)
        made.backward(engine(batch(0, 0, 1)[0]).sum())
        made.zero_grad()
        with pytest.raises(ZfunError, match="got none since the last step"):
            made.step()
        made.backward(engine(batch(0, 0, 1)[0]).sum())
        made.step()
        schedule.step()
        assert not torch.equal(weights(engine)["scale"], before["scale"])
        assert (engine.global_steps, engine.get_lr()) == (1, [0.05])
        engine.set_lr(0.2)
        assert made.param_groups[0]["lr"] == 0.2
        with pytest.raises(OptionError, match=r"got step\(closure\); call engine.backward"):
            made.step(lambda: None)
        with pytest.raises(OptionError, match="got a copy or a pickle"):
            copy.deepcopy(made)

    for stage in (0, 3):
        zf.simulate(1, partial(main, stage=stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.shows(
    "`safe_get_...`, `safe_set_...`",
    "right",
    "whole or of this rank; gradients without the loss scale",
)
def test_single_parameters_have_values_gradients_and_moments(stage: int) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, stage, optimizer={"type": "Adam", "params": {"lr": 1e-2}})
        model = net()
        for micro in range(MICRO_BATCHES):
            for rank in range(group.size):
                x, y = batch(micro, rank, group.size)
                (error(model(x), y) / group.size / MICRO_BATCHES).backward()
            x, y = batch(micro, group.rank, group.size)
            assert (utils.safe_get_full_grad(engine.module.scale) is None) == (micro == 0)
            engine.backward(error(engine(x), y))
            if micro == 0:
                engine.step()
        for name, param in engine.module.named_parameters():
            want: Any = dict(model.named_parameters())[name]
            torch.testing.assert_close(utils.safe_get_full_grad(param), want.grad, **CLOSE)
            torch.testing.assert_close(
                utils.safe_get_full_fp32_param(param), want.detach(), rtol=0, atol=0
            )
            own = utils.safe_get_local_grad(param)
            parts = zf.collectives.all_reduce(torch.tensor([float(own.numel())]), group)
            whole = 2 if engine._core.grads.placement is not zf.S else 1
            assert float(parts) == param.numel() * whole
        scale = engine.module.scale
        utils.safe_set_full_grad(scale, torch.full((3,), 2.0))
        utils.safe_set_local_grad(
            engine.module.first.weight,
            torch.zeros_like(utils.safe_get_local_grad(engine.module.first.weight)),
        )
        utils.safe_set_full_optimizer_state(scale, torch.full((3,), 4.0), "exp_avg_sq")
        before = weights(engine)
        engine.step()
        moment = utils.safe_get_full_optimizer_state(scale, "exp_avg")
        torch.testing.assert_close(moment, torch.full((3,), 0.2))
        second = utils.safe_get_full_optimizer_state(scale, "exp_avg_sq")
        torch.testing.assert_close(second, torch.full((3,), 4.0 * 0.999 + 0.001 * 4))
        after = weights(engine)
        torch.testing.assert_close(after["first.weight"], before["first.weight"], rtol=0, atol=0)
        assert not torch.equal(after["scale"], before["scale"])
        local = utils.safe_get_local_optimizer_state(scale, "exp_avg")
        utils.safe_set_local_optimizer_state(scale, local + 1, "exp_avg")
        moment = utils.safe_get_full_optimizer_state(scale, "exp_avg")
        torch.testing.assert_close(moment, torch.full((3,), 1.2))
        with pytest.raises(OptionError, match=r"got 'nope', and leaf 'scale' has \['exp_avg', 'e"):
            utils.safe_get_full_optimizer_state(scale, "nope")
        own = utils.safe_get_local_fp32_param(scale)
        if stage == 3:
            utils.safe_set_local_fp32_param(scale, own + 1)
            torch.testing.assert_close(weights(engine)["scale"], after["scale"] + 1)
            with pytest.raises(CheckpointError, match=r"elements of leaf 'scale'; got 99"):
                utils.safe_set_local_fp32_param(scale, torch.ones(99))
        else:
            with pytest.raises(OptionError, match=r"'scale' at another stage; call safe_set_full"):
                utils.safe_set_local_fp32_param(scale, own + 1)

    zf.simulate(2, main)
    lone = nn.Linear(1, 1).weight
    assert utils.safe_get_full_grad(lone) is None
    assert utils.safe_get_local_optimizer_state(lone, "exp_avg") is None
    with pytest.raises(OptionError, match=r"safe_set_full_fp32_param\(\) takes a parameter of an"):
        utils.safe_set_full_fp32_param(lone, torch.ones(1, 1))
    with pytest.raises(OptionError, match=r"safe_set_full_grad\(\) takes a parameter of an engi"):
        utils.safe_set_full_grad(lone, torch.ones(1, 1))


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_was_read_is_still_the_one_of_the_step(stage: int) -> None:
    def main(group: zf.Group, is_read: bool) -> dict[str, Tensor]:
        engine = made(group, stage, gradient_accumulation_steps=1)
        scale, weight = engine.module.scale, engine.module.first.weight
        for first in (0, 2):
            for micro in (first, first + 1):
                x, y = batch(micro, group.rank, group.size)
                engine.backward(error(engine(x), y))
                before = utils.safe_get_full_grad(weight)
                if is_read:
                    assert weight.grad is not None
                    torch.testing.assert_close(weight.grad, before, rtol=0, atol=0)
                    with pytest.raises(OptionError, match=r"a read of \.grad"):
                        utils.safe_get_local_grad(weight)
                torch.testing.assert_close(utils.safe_get_full_grad(weight), before, **CLOSE)
            utils.safe_set_full_grad(scale, torch.full((3,), 2.0))
            torch.testing.assert_close(utils.safe_get_full_grad(scale), torch.full((3,), 2.0))
            engine.step()
            assert utils.safe_get_full_grad(weight) is None
        return weights(engine)

    for found, expected in zip(
        zf.simulate(2, partial(main, is_read=True)),
        zf.simulate(2, partial(main, is_read=False)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("read", [None, 0, 1])
def test_one_rank_alone_asks_for_its_own_elements(read: int | None, stage: int) -> None:
    # A read after the first backward pass is over by the second.
    def main(group: zf.Group) -> None:
        engine = made(group, stage, gradient_accumulation_steps=2)
        weight = engine.module.first.weight
        for micro in (0, 1):
            x, y = batch(micro, group.rank, group.size)
            engine.backward(error(engine(x), y))
            if micro == read:
                assert weight.grad is not None
        if group.rank == 1 and read == 1:
            with pytest.raises(OptionError, match=r"a read of \.grad"):
                utils.safe_get_local_grad(weight)
            with pytest.raises(OptionError, match=r"a read of \.grad"):
                utils.safe_set_local_grad(weight, torch.zeros(1))
        elif group.rank == 1:
            utils.safe_set_local_grad(weight, utils.safe_get_local_grad(weight))
        engine.step()
        engine.step()

    zf.simulate(2, main)


@pytest.mark.parametrize(
    ("name", "value", "other", "message"),
    [
        ("gradient_average", True, False, r"got False; multiply the loss by engine\.dp_world_size"),
        ("communication_data_type", torch.float32, torch.half, "write communication_data_type"),
        ("cur_scale", 1.0, 2.0, r"got 2\.0; write fp16\.loss_scale"),
    ],
)
def test_values_of_an_engine_are_those_of_the_run(
    name: str, value: Any, other: Any, message: str
) -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, 1)
        setattr(engine, name, value)
        with pytest.raises(OptionError, match=message):
            setattr(engine, name, other)
        assert getattr(engine, name) == value
        assert engine.config["zero_optimization"]["stage"] == 1
        engine.config = {"of": "the script"}
        assert engine.config == {"of": "the script"}

    zf.simulate(1, main)


def test_tensors_of_a_call_tell_what_partitioned_parameters_tell() -> None:
    seen: list[Any] = []

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WIDTH)
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.head, self.frozen):
                weight: Any = layer.weight
                status = deepspeed.zero.ZeroParamStatus.AVAILABLE
                seen.append((weight.ds_id, weight.ds_numel, weight.ds_status is status))
                # As code that gathers by itself does where a parameter is not there.
                away = [weight] if weight.ds_status != status else []
                with deepspeed.zero.GatheredParameters(away):
                    x = x @ weight.t()
            return x

    def main(group: zf.Group) -> None:
        seen.clear()
        engine = made(group, 3, Asking())
        for call in (engine, engine.module):
            call(torch.ones(1, WIDTH))
        with torch.no_grad():
            engine(torch.ones(1, WIDTH))
        told: Any = [engine.module.head.weight, engine.module.frozen.weight]
        ids = [param.ds_id for param in told]
        assert seen == [(i, WIDTH * WIDTH, True) for i in ids] * 3
        away = deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
        assert [param.ds_status for param in told] == [away] * 2
        assert told[0].ds_active_sub_modules == set()
        assert told[0].partition_numel() == WIDTH * WIDTH
        with deepspeed.zero.GatheredParameters(told[0]):
            assert told[0].ds_status is deepspeed.zero.ZeroParamStatus.AVAILABLE
        below = made(group, 2).module.scale
        assert not hasattr(below, "ds_id")

    zf.simulate(1, main)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_tensors_tell_that_values_are_there(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """install() gives tensors the status, for code that asks inside of backward."""
    status = deepspeed.zero.ZeroParamStatus.AVAILABLE
    monkeypatch.setattr(torch.Tensor, "ds_status", status, raising=False)

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyrefly: ignore
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # pyrefly: ignore
            x, weight = ctx.saved_tensors
            away = [weight] if weight.ds_status is not status else []
            with deepspeed.zero.GatheredParameters(away):
                return grad @ weight.t(), x.t() @ grad

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return Times.apply(self.net(x), self.net.first.weight)

    def main(group: zf.Group) -> Any:
        torch.manual_seed(0)
        model = Head()
        deepspeed.zero.Init(model, data_parallel_group=group, enabled=stage != 1)
        return trained(made(group, stage, model), group, 0, 2)

    def whole(group: zf.Group) -> Any:
        torch.manual_seed(0)
        return trained(made(group, 0, Head()), group, 0, 2)

    assert zf.simulate(2, main) == zf.simulate(2, whole)


@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_run_again_under_torchs_checkpoint(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            inner = self.net.first(x)
            mixed = torch.utils.checkpoint.checkpoint(self.net.body, inner, use_reentrant=reentrant)
            return self.net.last(mixed * self.net.scale.sum())

    def main(group: zf.Group, stage: int) -> Any:
        engine = made(group, stage, Again())
        return trained(engine, group, 0, 2)

    def whole(group: zf.Group, stage: int) -> Any:
        return trained(made(group, stage), group, 0, 2)

    for stage in (0, 2, 3):
        found = zf.simulate(2, partial(main, stage=stage))
        expected = zf.simulate(2, partial(whole, stage=stage))
        assert found == expected


def test_autocast_of_the_configuration_is_torchs() -> None:
    section = {"enabled": True, "dtype": "bfloat16"}

    def main(group: zf.Group, stage: int) -> Any:
        engine = made(group, stage, torch_autocast=section)
        assert engine(batch(0, 0, 1)[0]).dtype is torch.bfloat16
        trained(engine, group, 0, 2)
        assert engine.module.scale.dtype is torch.float32
        return weights(engine)

    def cast(model: nn.Module, x: Tensor, y: Tensor) -> None:
        # torch adds the gradients of a tied weight in bfloat16, through the one cast that it keeps.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = model(x)
        error(out, y).backward()

    expected = plain(cast, 2, 1)
    for stage in (1, 3):
        found = zf.simulate(1, partial(main, stage=stage))[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE)


def test_a_model_in_eval_mode_trains() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.drop = net(), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.drop(x))

    def main(group: zf.Group, stage: int) -> Any:
        model = Dropped().eval()
        engine = made(group, stage, model)
        assert not engine.module.training
        rows = trained(engine, group, 0, 2)
        assert not engine.module.training
        return rows

    def whole(group: zf.Group) -> Any:
        return trained(made(group, 0), group, 0, 2)

    expected = zf.simulate(1, whole)
    for stage in (0, 3):
        assert zf.simulate(1, partial(main, stage=stage)) == expected


def test_groups_keep_rates_of_their_own() -> None:
    """Rates of groups stand before the rate of the configuration, and schedules go over both."""
    rates = [1e-3, 1e-1]

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.parameters())
        return [{"params": params[:3], "lr": rates[0]}, {"params": params[3:]}]

    def main(group: zf.Group, stage: int, scheduler: Any) -> Any:
        model = net()
        section = {"type": "sgd", "params": {"lr": rates[1]}}
        more = {} if scheduler is None else {"scheduler": scheduler}
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=groups(model),
            config=config(stage, optimizer=section, gradient_clipping=0.0, **more),
            mpu=ranks(group),
        )
        seen = []
        for step in range(3):
            trained(engine, group, step, 1)
            seen.append(engine.get_lr())
        return weights(engine), seen

    cosine = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 4}}
    for stage in (0, 3):
        values, seen = zf.simulate(1, partial(main, stage=stage, scheduler=None))[0]
        assert seen == [rates] * 3
        model = net()
        optimizer = torch.optim.SGD(groups(model), lr=rates[1])
        for step in range(3):
            for micro in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
                x, y = batch(micro, 0, 1)
                (error(model(x), y) / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in model.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), **CLOSE)
        _, seen = zf.simulate(1, partial(main, stage=stage, scheduler=cosine))[0]
        for first, second in seen:
            assert first * 100 == pytest.approx(second)
        assert seen[-1][1] > 0


def test_the_numbers_of_an_engine_are_those_it_was_given() -> None:
    engine = zf.simulate(1, partial(made, stage=3))[0]
    assert engine.config["zero_optimization"] == {"stage": 3}
    assert (engine.gradient_average, engine.communication_data_type) == (True, torch.float32)
    assert engine.get_sequence_parallel_world_size() == 1
    assert (engine.get_sequence_parallel_rank(), engine.get_sequence_parallel_group()) == (0, None)
    assert engine.load_universal_checkpoint() is False
    assert engine.empty_partition_cache() is None
    assert engine.train_micro_batch_size_per_gpu() == BATCH
