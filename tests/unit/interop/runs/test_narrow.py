"""Statistics and unfrozen leaves under 16 bits, and random numbers of resumed runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.interop.deepspeed_runs import config, ranks
from zfun.interop import Engine

BY_DTYPE = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ROWS = torch.linspace(-1, 2, 8 * 4 * 3).sin().view(8, 4, 3)
STATISTICS = ("1.running_mean", "1.running_var")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))
    found.get_buffer(STATISTICS[0]).fill_(0.3)
    return found


class Cast:
    """A module that was cast as a whole, beside master weights, in plain torch."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, make: Any) -> None:
        self.masters = [nn.Parameter(x.detach().clone()) for x in model.parameters()]
        self.model, self.optimizer = copy.deepcopy(model).to(dtype), make(self.masters)

    def step(self, rows: Tensor) -> Tensor:
        self.model.zero_grad()
        loss = self.model(rows).square().mean()
        loss.backward()
        for master, x in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if x.grad is None else x.grad.float()
        self.optimizer.step()
        for master, x in zip(self.masters, self.model.parameters(), strict=True):
            x.data.copy_(master)
        return loss.detach()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", BY_DTYPE, ids=str)
def test_statistics_have_the_numbers_of_a_cast_module(dtype: torch.dtype, stage: int) -> None:
    plain = Cast(net(), dtype, sgd)

    def main(group: zf.Group) -> None:
        model = net()
        section = {BY_DTYPE[dtype]: {"enabled": True, "loss_scale": 1.0}}
        options = config(stage, gradient_accumulation_steps=1, gradient_clipping=0.0, **section)
        if dtype is torch.bfloat16:
            options["bf16"] = {"enabled": True}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=sgd(model.parameters()), config=options, mpu=ranks(group)
        )
        for rows in ROWS.to(dtype):
            loss = engine(rows).square().mean()
            engine.backward(loss)
            engine.step()
            torch.testing.assert_close(loss.detach(), plain.step(rows))
        for name in STATISTICS:
            torch.testing.assert_close(
                engine.module.get_buffer(name), plain.model.get_buffer(name).float()
            )
        engine.eval()
        plain.model.eval()
        kept = {name: model.get_buffer(name).clone() for name in STATISTICS}
        with torch.no_grad():
            torch.testing.assert_close(engine(ROWS[0].to(dtype)), plain.model(ROWS[0].to(dtype)))
        for name, x in kept.items():
            assert x.dtype is torch.float32
            assert torch.equal(model.get_buffer(name), x)
        with torch.no_grad():
            found = copy.deepcopy(model)(ROWS[0].to(dtype))
        torch.testing.assert_close(found, plain.model(ROWS[0].to(dtype)))

    zf.simulate(1, main)


def test_a_call_that_fails_leaves_statistics_as_they_were() -> None:
    model = net()
    engine = Engine(model, sgd(model.parameters()), zero=1, precision=torch.bfloat16)
    kept = model.get_buffer(STATISTICS[0])
    before = kept.clone()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        engine(ROWS[0, :1].bfloat16())
    assert model.get_buffer(STATISTICS[0]) is kept
    assert kept.dtype is torch.float32
    assert torch.equal(kept, before)
    engine.close()
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", BY_DTYPE, ids=str)
def test_leaves_are_unfrozen_beside_master_weights(dtype: torch.dtype, stage: int) -> None:
    """The leaf that joins begins with its rounded values, and the others go on."""
    adamw = lambda params: torch.optim.AdamW(params, 0.1)
    bare = net()
    del bare[1]
    bare[0].requires_grad_(False)
    plain = Cast(bare, dtype, adamw)

    def main(group: zf.Group) -> None:
        model = copy.deepcopy(bare)
        precision = zf.Precision(dtype, dtype, torch.float32, torch.float32)
        engine = Engine(
            model, adamw(model.parameters()), zero=stage, group=group, precision=precision
        )
        for turn, rows in enumerate(ROWS.to(dtype)):
            if turn == 2:
                model[0].requires_grad_(True)
                if group.rank == 0:
                    first = plain.model.get_submodule("0").requires_grad_(True)
                    for master, x in zip(plain.masters, first.parameters(), strict=False):
                        master.data.copy_(x)
            engine.backward(engine(rows).square().mean())
            engine.step()
            if group.rank == 0:
                plain.step(rows)
        for (name, _), master in zip(bare.named_parameters(), plain.masters, strict=True):
            torch.testing.assert_close(engine.gathered(name, master=True), master.detach())

    zf.simulate(2, main)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_the_facade_leaves_random_generators_alone(
    stage: int, tmp_path: Path
) -> None:
    def main(group: zf.Group) -> None:
        model = net()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=sgd(model.parameters()),
            config=config(stage),
            mpu=ranks(group),
        )
        engine.save_checkpoint(tmp_path, "one")
        torch.rand(3)
        before = torch.get_rng_state()
        engine.load_checkpoint(tmp_path, "one")
        assert torch.equal(torch.get_rng_state(), before)

    zf.simulate(1, main)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_dropout_of_a_resumed_fit_is_that_of_plain_lightning(stage: int, tmp_path: Path) -> None:
    lightnings = pytest.importorskip("tests.interop.lightnings")
    import lightning as L

    class Drops(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
            self.losses: list[float] = []

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss = self.net(rows).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    def losses(strategy: str) -> list[float]:
        found: list[float] = []
        for epochs, path in ((1, None), (3, tmp_path / strategy)):
            # Lightning shuffles for a strategy of several ranks, also where there is one.
            more = {"enable_checkpointing": False, "use_distributed_sampler": False}
            trainer = lightnings.trainer_of(strategy, 1, tmp_path, max_epochs=epochs, **more)
            module = Drops()
            rows: Any = ROWS.flatten(0, 1)
            trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=path)
            if path is None:
                trainer.save_checkpoint(tmp_path / strategy)
            found += module.losses
        return found

    plain = losses("auto")
    assert losses(f"zfun_stage_{stage}") == pytest.approx(plain, rel=1e-4)
