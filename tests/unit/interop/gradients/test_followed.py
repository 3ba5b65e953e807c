"""Loops that accelerate, Fabric and transformers take, and that ended in errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError
from zfun.interop import Engine
from zfun.interop.accelerate import Accelerator
from zfun.interop.transformers import Trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
WIDTH = 3


def fresh() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def accelerator_of(stage: int | None) -> Any:
    fresh()
    torch.manual_seed(0)
    return accelerate.Accelerator(cpu=True) if stage is None else Accelerator(cpu=True, zero=stage)


def batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def zero_by_hand(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()


def zero_of_the_class(model: nn.Module, optimizer: Any) -> None:
    nn.Module.zero_grad(model)


def gan(stage: int | None, zero: Callable[[nn.Module, Any], None]) -> list[Tensor]:
    """The loop of PyTorch's DCGAN: gradients of D are dropped after a step of G has added some."""
    accelerator = accelerator_of(stage)
    d, g = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
    d, for_d = accelerator.prepare(d, torch.optim.SGD(d.parameters(), 0.1, momentum=0.9))
    g, for_g = accelerator.prepare(g, torch.optim.SGD(g.parameters(), 0.1))
    x = batch()
    for _ in range(3):
        zero(d, for_d)
        fake = g(x)
        accelerator.backward(d(x).mean() - d(fake.detach()).mean())
        for_d.step()
        zero(g, for_g)
        accelerator.backward(-d(fake).mean())
        for_g.step()
    return [x.detach() for net in (d, g) for x in net.parameters()]


@EACH_STAGE
@pytest.mark.parametrize("zero", [zero_by_hand, zero_of_the_class])
def test_gradients_that_came_after_a_step_are_dropped(stage: int, zero: Any) -> None:
    torch.testing.assert_close(gan(stage, zero), gan(None, zero))


def test_a_read_of_gradients_that_came_after_a_step_is_refused() -> None:
    def read(model: nn.Module, optimizer: Any) -> None:
        for p in model.parameters():
            assert p.grad is None or p.grad.norm() >= 0

    with pytest.raises(OptionError, match=r"a step takes the gradients, .* got backward\(\) after"):
        gan(2, read)


class Headed(nn.Module):
    """A head on an encoder that another model shares."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, *, detached: bool = False) -> Tensor:
        z = self.encoder(x)
        return self.head(z.detach() if detached else z)


def actor_and_critic(stage: int | None, order: str) -> list[Tensor]:
    accelerator = accelerator_of(stage)
    encoder = nn.Linear(WIDTH, WIDTH)
    critic, actor = Headed(encoder), Headed(encoder)
    first = torch.optim.SGD(critic.parameters(), 0.1)
    second = torch.optim.SGD(actor.head.parameters(), 0.1)
    if order == "together":
        critic, actor, first, second = accelerator.prepare(critic, actor, first, second)
    elif order == "the actor first":
        actor, critic, second, first = accelerator.prepare(actor, critic, second, first)
    else:
        critic, first = accelerator.prepare(critic, first)
        actor, second = accelerator.prepare(actor, second)
    for _ in range(3):
        first.zero_grad()
        accelerator.backward(critic(batch()).square().mean())
        first.step()
        second.zero_grad()
        accelerator.backward(-actor(batch(), detached=True).mean())
        second.step()
    return [x.detach() for x in (*critic.parameters(), *actor.head.parameters())]


@EACH_STAGE
@pytest.mark.parametrize("order", ["together", "the actor first", "apart"])
def test_models_share_an_encoder(stage: int, order: str) -> None:
    torch.testing.assert_close(actor_and_critic(stage, order), actor_and_critic(None, order))


def test_a_parameter_of_another_engine_is_refused_by_name() -> None:
    encoder = nn.Linear(WIDTH, WIDTH)
    first = Engine(Headed(encoder), zf.optim.sgd(0.1), zero=2)
    with pytest.raises(OptionError, match="a module has one engine; got a Headed"):
        Engine(Headed(encoder), zf.optim.sgd(0.1), zero=2)
    first.close()


@EACH_STAGE
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_second_accelerator_goes_on(stage: int, optimizer_first: bool) -> None:
    def trained(stage: int | None) -> list[Tensor]:
        model, raw = None, nn.Linear(WIDTH, 1)
        nn.init.ones_(raw.weight)
        nn.init.zeros_(raw.bias)
        for _ in range(2):
            accelerator = accelerator_of(stage)
            optimizer = torch.optim.Adam(raw.parameters(), 0.1)
            if optimizer_first:
                optimizer = accelerator.prepare(optimizer)
            model = accelerator.prepare(raw)
            if not optimizer_first:
                optimizer = accelerator.prepare(optimizer)
            accelerator.backward(model(batch()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [x.detach() for x in raw.parameters()]

    torch.testing.assert_close(trained(stage), trained(None))


@EACH_STAGE
def test_a_second_trainer_goes_on(stage: int, tmp_path: Any) -> None:
    """The first one may be gone, whose model has the values of its engine."""

    def losses(cls: Any, **options: Any) -> list[float]:
        fresh()
        torch.manual_seed(0)
        shape = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
        zeros = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **zeros, **ends))
        rows = [{"input_ids": x, "labels": x} for x in torch.arange(32).remainder(16).view(8, 4)]
        found: list[float] = []
        for _ in range(2):
            args = transformers.TrainingArguments(
                str(tmp_path),
                max_steps=2,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_steps=1,
                per_device_train_batch_size=4,
            )
            trainer = cls(model, args, train_dataset=rows, **options)
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
            found += [row["loss"] for row in trainer.state.log_history if "loss" in row]
            del trainer
        return found

    assert losses(Trainer, zero=stage) == pytest.approx(losses(transformers.Trainer), rel=1e-5)


@EACH_STAGE
def test_a_loss_of_other_parameters_and_a_step_without_gradients(stage: int) -> None:
    """SAC's temperature, and the step before the first one that quiets schedulers."""

    def trained(stage: int | None) -> list[Any]:
        accelerator = accelerator_of(stage)
        raw, log_alpha = nn.Linear(WIDTH, 1), torch.zeros(1, requires_grad=True)
        model, optimizer = accelerator.prepare(raw, torch.optim.Adam(raw.parameters(), 0.1))
        own = torch.optim.Adam([log_alpha], 0.1)
        optimizer.zero_grad()
        optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            accelerator.backward(model(batch()).square().mean())
            optimizer.step()
            own.zero_grad()
            accelerator.backward((-log_alpha.exp() * 2).sum())
            own.step()
        return [log_alpha.detach(), *(x.detach() for x in raw.parameters())]

    torch.testing.assert_close(trained(stage), trained(None))


@EACH_STAGE
def test_a_layout_of_memory_changes_no_values(stage: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 1))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    engine = Engine(model, zf.optim.sgd(0.1), zero=stage)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(engine.state_dict(), before, rtol=0, atol=0)
    engine.backward(engine(torch.ones(2, 1, 3, 3)).sum())
    engine.step()


@pytest.mark.filterwarnings("ignore:Using backward")
@EACH_STAGE
def test_a_read_of_a_gradient_that_should_have_a_graph_is_refused(stage: int) -> None:
    model = nn.Linear(WIDTH, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), zero=stage)
    engine(batch()).square().mean().backward(create_graph=True)
    with pytest.raises(OptionError, match=r"leaf 'weight' after backward\(create_graph=True\); ta"):
        sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)

    def penalised(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, [model.weight, model.bias], create_graph=True)
        return loss + sum(grad.square().sum() for grad in grads)

    engine.zero_grad()
    plain = nn.Linear(WIDTH, 1)
    plain.load_state_dict(model.state_dict())
    engine.backward(engine.run(penalised, batch()))
    engine.step()
    loss = plain(batch()).square().mean()
    grads = torch.autograd.grad(loss, [*plain.parameters()], create_graph=True)
    (loss + sum(grad.square().sum() for grad in grads)).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    torch.testing.assert_close(engine.state_dict(), plain.state_dict())


def test_a_head_with_a_bias_is_made_under_zero_init() -> None:
    """Models of transformers pad its bias, by nothing as a rule."""
    with deepspeed.zero.Init(data_parallel_group=zf.collectives.single_group()):
        layer = nn.Linear(WIDTH, 4)
    layer.bias.data = nn.functional.pad(layer.bias.data, (0, 0), "constant", 0)
    with deepspeed.zero.GatheredParameters(list(layer.parameters())):
        assert layer.bias.shape == (4,)
        assert layer.bias.isfinite().all()


@EACH_STAGE
def test_a_gradient_that_no_optimizer_takes_is_not_read(stage: int) -> None:
    """It was None where torch has one, so a norm of all parameters lacked it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    engine = Engine(model, torch.optim.SGD(model[1].parameters(), 0.1), zero=stage)
    assert all(x.grad is None for x in model.parameters())
    engine.backward(engine(batch()).square().mean())
    assert model[1].weight.grad is not None
    with pytest.raises(OptionError, match=r"\.grad of leaf '0.weight', which is in no group; free"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model[0].requires_grad_(False)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    engine.step()
