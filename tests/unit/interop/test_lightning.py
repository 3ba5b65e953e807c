"""The strategy for Lightning: options, optimizers, and the refusal of what cannot hold.

``tests/distributed/test_lightning.py`` fits on two processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun.errors import CheckpointError, NotElementwiseError, OptionError, ZfunError
from zfun.testing import assert_same_bits

L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from lightning.pytorch.utilities import grad_norm  # noqa: E402

from tests.interop import lightnings  # noqa: E402, needs Lightning
from zfun.interop.deepspeed import ops  # noqa: E402
from zfun.interop.lightning import ZfunStrategy, collate  # noqa: E402

# Lightning warns of few workers, of folders that exist, and of torch's own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.processes,
    pytest.mark.usefixtures("one_rank"),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["", "_offload"])
def test_every_name_makes_its_strategy(stage: int, offload: str, tmp_path: Path) -> None:
    trainer = lightnings.trainer_of(f"zfun_stage_{stage}{offload}", 1, tmp_path)
    strategy: Any = trainer.strategy
    assert isinstance(strategy, ZfunStrategy)
    trainer.predict(Tiny(), data())
    recipe: Any = strategy.recipe
    assert recipe.stage == stage
    assert (recipe.optimizer_store is not None) is bool(offload)
    assert (recipe.params_store is not None) is (offload != "" and stage == 3)


class Tiny(L.LightningModule):
    """A module whose gradients are easy to know."""

    def __init__(self, make: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net: Any = nn.Linear(2, 1)
        self.make = make or (lambda params: torch.optim.SGD(params, 0.1))
        self.seen: list[int] = []
        self.last = -1

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.last = batch_idx
        self.seen.append(batch_idx)
        return self.forward(batch).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("bias", self.net.bias.sum())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.forward(batch)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def data() -> Any:
    rows = torch.linspace(-1, 1, 16).view(8, 2)
    return torch.utils.data.DataLoader(rows, batch_size=2)  # pyrefly: ignore[bad-argument-type]


def fitted(model: Any, tmp_path: Path, strategy: Any = "zfun_stage_3", **options: Any) -> Any:
    trainer = lightnings.trainer_of(strategy, 1, tmp_path, enable_checkpointing=False, **options)
    trainer.fit(model, data())
    return trainer


def test_a_hook_sets_attributes_of_the_module_itself(tmp_path: Path) -> None:
    model = Tiny()
    fitted(model, tmp_path)
    assert (model.last, model.seen) == (3, [0, 1, 2, 3])


@pytest.mark.parametrize("gathers", [True, False])
def test_hooks_read_parameters_and_the_module_is_whole_after_fit(
    gathers: bool, tmp_path: Path
) -> None:
    found: list[Tensor] = []

    class Reads(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            found.append(pl_module.net.bias.detach().clone())
            with trainer.strategy.bound() as module:
                found.append(module.net.bias.detach().clone())

    model = Tiny()
    strategy = ZfunStrategy(stage=3, gather_at_end=gathers)
    trainer = fitted(model, tmp_path, strategy, callbacks=[Reads()])
    assert (type(model.net.bias) is nn.Parameter) == gathers
    assert torch.equal(found[-2], found[-1])
    assert torch.equal(found[-1], model.net.bias)
    predicted = trainer.predict(model, data())
    # Batch by batch, because a product of more rows may round differently.
    for found_here, batch in zip(predicted, data(), strict=True):
        assert torch.equal(found_here, model(batch))


class Deep(Tiny):
    """Running statistics, a metric, and a recomputed block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        # Not the statistics, which plain torch would update once more in backward.
        inner = self.net[:2](batch)
        out = checkpoint(self.net[2], inner, use_reentrant=False)
        loss = out.square().mean()
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_metrics_and_recomputation_are_those_of_plain_lightning(
    stage: int, tmp_path: Path
) -> None:
    plain, sharded = Deep(), Deep()
    first = fitted(plain, tmp_path, "auto", max_epochs=2)
    second = fitted(sharded, tmp_path, f"zfun_stage_{stage}", max_epochs=2)
    torch.testing.assert_close(dict(sharded.state_dict()), dict(plain.state_dict()))
    assert sharded.net[1].num_batches_tracked == 8
    torch.testing.assert_close(second.callback_metrics["mean"], first.callback_metrics["mean"])


def test_configure_model_makes_values_one_module_at_a_time(tmp_path: Path) -> None:
    devices: list[str] = []

    class Late(Tiny):
        def configure_model(self) -> None:
            self.net = nn.Linear(2, 1)
            devices.append(self.net.weight.device.type)

    model = Late()
    fitted(model, tmp_path, ZfunStrategy(stage=3, remote_device="meta"))
    assert devices == ["meta"]
    assert model.net.weight.isfinite().all()
    assert float(model.net.weight.detach().abs().max()) <= 1.0
    assert isinstance(model.net.weight, nn.Parameter)


def test_a_module_on_meta_needs_its_own_initialisation(tmp_path: Path) -> None:
    class Bare(Tiny):
        def configure_model(self) -> None:
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(OptionError, match="leaf 'scale' belongs to Bare, which has no such"):
        fitted(Bare(), tmp_path, ZfunStrategy(stage=3, remote_device="meta"))


@pytest.mark.parametrize("saves", ["auto", "zfun_stage_3"])
def test_a_module_on_meta_takes_the_values_of_a_checkpoint(saves: str, tmp_path: Path) -> None:
    class Late(Tiny):
        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("out", self.forward(batch).sum())

    trainer = fitted(Late(), tmp_path, saves)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    [expected] = trainer.test(ckpt_path=tmp_path / "a.ckpt", dataloaders=data(), verbose=False)
    strategy = ZfunStrategy(stage=3, remote_device="meta")
    fresh = lightnings.trainer_of(strategy, 1, tmp_path)
    [found] = fresh.test(Late(), data(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert found["out"] == pytest.approx(expected["out"], rel=1e-5)


def test_a_file_of_plain_lightning_is_loaded(tmp_path: Path) -> None:
    plain = Tiny()
    trainer = lightnings.trainer_of("auto", 1, tmp_path, max_epochs=1)
    trainer.fit(plain, data())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    loaded = lightnings.trainer_of("zfun_stage_3", 1, tmp_path)
    [metrics] = loaded.test(Tiny(), data(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert metrics["bias"] == pytest.approx(float(plain.net.bias))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_checkpoint_becomes_one_file(precision: str, tmp_path: Path) -> None:
    model = Tiny(lambda params: torch.optim.Adam(params, 0.1))
    trainer = fitted(model, tmp_path, precision=precision)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").is_dir()
    file = collate(tmp_path / "a.ckpt", tmp_path / "b.ckpt", optimizer=True)
    again = Tiny.load_from_checkpoint(file)
    same = Tiny.load_from_checkpoint(tmp_path / "a.ckpt")
    assert_same_bits(dict(same.state_dict()), dict(again.state_dict()))
    if precision == "32-true":
        assert_same_bits(dict(again.state_dict()), dict(model.state_dict()))
    plain = Tiny(lambda params: torch.optim.Adam(params, 0.1))
    both = {"max_epochs": 2, "enable_checkpointing": False}
    lightnings.trainer_of("auto", 1, tmp_path, **both).fit(plain, data(), ckpt_path=file)
    other = Tiny(lambda params: torch.optim.Adam(params, 0.1))
    whole = lightnings.trainer_of("zfun_stage_2", 1, tmp_path, **both)
    whole.fit(other, data(), ckpt_path=tmp_path / "a.ckpt")
    assert not torch.equal(plain.net.weight, model.net.weight)
    torch.testing.assert_close(dict(plain.state_dict()), dict(other.state_dict()))


def test_frozen_parameters_keep_their_values_and_may_be_left_out(tmp_path: Path) -> None:
    model = Tiny()
    model.net.bias.requires_grad_(False)
    before = model.net.bias.detach().clone()
    strategy = ZfunStrategy(stage=3, exclude_frozen_parameters=True)
    trainer = fitted(model, tmp_path, strategy)
    assert torch.equal(model.net.bias, before)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    file = collate(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert list(torch.load(file, weights_only=False)["state_dict"]) == ["net.weight"]


def test_manual_optimization_with_two_optimizers_saves_both(tmp_path: Path) -> None:
    model = lightnings.Gan()
    trainer = lightnings.trainer_of("zfun_stage_3", 1, tmp_path, enable_checkpointing=False)
    loader = torch.utils.data.DataLoader(lightnings.gan_data(1), batch_size=4)
    trainer.fit(model, loader)
    expected = lightnings.gan_in_torch(1)
    torch.testing.assert_close(model.losses, expected["losses"])
    torch.testing.assert_close(dict(model.state_dict()), expected["params"])
    trainer.save_checkpoint(tmp_path / "gan.ckpt")
    file = collate(tmp_path / "gan.ckpt", tmp_path / "one.ckpt", optimizer=True)
    again = lightnings.Gan.load_from_checkpoint(file)
    assert_same_bits(dict(again.state_dict()), dict(model.state_dict()))
    states = torch.load(file, weights_only=False)["optimizer_states"]
    assert [len(state["state"]) for state in states] == [4, 4]
    assert set(states[0]["state"][0]) == {"exp_avg", "exp_avg_sq", "step"}
    other = lightnings.trainer_of("zfun_stage_1", 1, tmp_path, enable_checkpointing=False)
    fresh = lightnings.Gan()
    other.fit(fresh, loader, ckpt_path=tmp_path / "gan.ckpt")
    assert_same_bits(dict(fresh.state_dict()), dict(model.state_dict()))


def test_a_directory_of_another_program_is_refused(tmp_path: Path) -> None:
    zf.save(tmp_path, {"w": torch.ones(1)}, step=1)
    with pytest.raises(CheckpointError, match="one that ZfunStrategy has saved; got"):
        collate(tmp_path, tmp_path / "out.ckpt")


def fused(params: Any) -> torch.optim.Optimizer:
    return ops.adam.FusedAdam(params, lr=0.1, betas=(0.8, 0.9), adam_w_mode=False)


def on_the_host(params: Any) -> torch.optim.Optimizer:
    return ops.adam.DeepSpeedCPUAdam(params, lr=0.1, weight_decay=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, 0.1, betas=(0.8, 0.9), weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, 0.1),
    "amsgrad": lambda params: torch.optim.AdamW(params, 0.1, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "dampening": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1, lr_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.1),
    "nadam": lambda params: torch.optim.NAdam(params, 0.1),
    "fused": fused,
    "on the host": on_the_host,
}
# The classes of torch with the arithmetic of DeepSpeed's.
IN_TORCH = {
    "fused": lambda params: torch.optim.Adam(params, 0.1, betas=(0.8, 0.9)),
    "on the host": OPTIMIZERS["adamw"],
}


def test_a_resumed_fit_has_the_mode_of_adam_of_its_own_run(tmp_path: Path) -> None:
    options = {"lr": 0.1, "weight_decay": 0.1}
    make = lambda is_on: lambda params: ops.adam.FusedAdam(params, adam_w_mode=is_on, **options)
    path = tmp_path / "a.ckpt"
    fitted(Tiny(make(True)), tmp_path).save_checkpoint(path)
    model = Tiny(make(False))
    trainer = lightnings.trainer_of(
        "zfun_stage_3", 1, tmp_path, enable_checkpointing=False, max_epochs=2
    )
    trainer.fit(model, data(), ckpt_path=path)
    assert model.seen == [0, 1, 2, 3]
    assert trainer.optimizers[0].param_groups[0]["adam_w_mode"] is False


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_in_torch(name: str, tmp_path: Path) -> None:
    class Scheduled(Tiny):
        def configure_optimizers(self) -> Any:
            made = OPTIMIZERS if is_sharded else {**OPTIMIZERS, **IN_TORCH}
            optimizer = made[name](self.parameters())
            decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": decay, "interval": "step"}]

    models = []
    for strategy in ("auto", "zfun_stage_3"):
        is_sharded = strategy != "auto"
        torch.manual_seed(0)
        models.append(Scheduled())
        fitted(models[-1], tmp_path, strategy, gradient_clip_val=0.3)
    torch.testing.assert_close(*(dict(model.state_dict()) for model in models))


@pytest.mark.parametrize("strategy", ["zfun_stage_2", "zfun_stage_3"])
def test_elements_of_gradients_are_clipped_as_in_torch(strategy: str, tmp_path: Path) -> None:
    models = []
    for one in ("auto", strategy):
        torch.manual_seed(0)
        models.append(Tiny(lambda params: torch.optim.SGD(params, 0.1)))
        options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        fitted(models[-1], tmp_path, one, accumulate_grad_batches=2, **options)
    torch.testing.assert_close(*(dict(model.state_dict()) for model in models))


class Noisy(Tiny):
    """Clips, reads the gradients, and adds noise that is larger than the bound."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
        self.norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
        for param in self.parameters():
            param.grad.add_(torch.linspace(-0.1, 0.1, param.numel()).view_as(param))


@pytest.mark.parametrize("strategy", ["zfun_stage_1", "zfun_stage_2", "zfun_stage_3"])
def test_code_may_add_to_clipped_gradients(strategy: str, tmp_path: Path) -> None:
    """The step clipped, so the noise was clipped with the gradients."""
    models = []
    for one in ("auto", strategy):
        torch.manual_seed(0)
        models.append(Noisy(lambda params: torch.optim.SGD(params, 0.1)))
        fitted(models[-1], tmp_path, one)
    torch.testing.assert_close(models[1].norm, models[0].norm)
    torch.testing.assert_close(*(dict(model.state_dict()) for model in models))


class ClipsFirst(Tiny):
    """Manual optimization that clips and steps before there are gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for clip in (0.05, 1e-4):
            self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))


@pytest.mark.parametrize("strategy", ["zfun_stage_2", "zfun_stage_3"])
def test_a_bound_is_for_the_gradients_that_are_there(strategy: str, tmp_path: Path) -> None:
    """It was for those of the next step; and a step without gradients was refused."""
    models = []
    for one in ("auto", strategy):
        torch.manual_seed(0)
        models.append(ClipsFirst(lambda params: torch.optim.SGD(params, 0.1)))
        models[-1].automatic_optimization = False
        fitted(models[-1], tmp_path, one)
    torch.testing.assert_close(*(dict(model.state_dict()) for model in models))


class WithoutLoss(Tiny):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def twice(params: Any) -> Any:
    params = list(params)
    return [torch.optim.SGD(params, 0.1), torch.optim.SGD(params, 0.1)]


def manual(make: Callable[[Any], Any]) -> Tiny:
    model = Tiny(make)
    model.automatic_optimization = False
    return model


class TwoManual(Tiny):
    """Two optimizers, one of which gets another parameter later."""

    def __init__(self, later: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.later = nn.Linear(2, 1), later
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(()))
        self.net.bias.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        self.manual_backward(self.forward(batch).square().mean() * self.scale)
        if batch_idx == 1:
            self.net.bias.requires_grad_(True)
            optimizers[self.later].optimizer.add_param_group({"params": [self.net.bias]})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([x], 0.1) for x in (self.net.weight, self.scale)]


class Resets(Tiny):
    """Forgets the moments of Adam after each step."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        optimizer: Any = self.optimizers()
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()


class Keeps(Tiny):
    """Adds the gradients of two steps."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def configured(**sections: Any) -> dict[str, Any]:
    return {"strategy": ZfunStrategy(config={"zero_optimization": {"stage": 2}, **sections})}


class Clipping(Tiny):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")


def test_a_module_may_clip_before_a_configuration_does(tmp_path: Path) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    models = []
    for options in ({}, configured(optimizer=sgd, gradient_clipping=0.1)):
        torch.manual_seed(0)
        models.append(Clipping())
        fitted(models[-1], tmp_path, **options)
    torch.testing.assert_close(*(dict(model.state_dict()) for model in models))


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "an average of weights": (
        Tiny,
        {"callbacks": [L.pytorch.callbacks.StochasticWeightAveraging(0.1)]},
        r"as StochasticWeightAveraging does.*pass WeightAveraging\(\)",
    ),
    "no loss": (WithoutLoss, {}, "returns a loss.*got None"),
    "lbfgs": (
        lambda: Tiny(torch.optim.LBFGS),
        {},
        "element by element; torch.optim.LBFGS",
    ),
    "a foreign tensor": (
        lambda: Tiny(lambda params: torch.optim.SGD([torch.zeros(3, requires_grad=True)], 0.1)),
        {},
        r"shape \(3,\) that is none of them; assign it to the module",
    ),
    "a parameter twice": (
        lambda: manual(twice),
        {},
        "one optimizer.*leaf 'net.bias' is in the optimizers 0 and 1",
    ),
    "a parameter of later": (
        lambda: TwoManual(later=1),
        {},
        "got a group with leaf 'net.bias' of another one; with several optimizers, give each",
    ),
    "manual float16": (lambda: manual(OPTIMIZERS["sgd"]), {"precision": "16-true"}, "pass prec"),
    "a schedule alone": (
        Tiny,
        configured(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}),
        r"got a scheduler without an optimizer; write the optimizer too",
    ),
    "moments in a hook": (
        lambda: Resets(OPTIMIZERS["adamw"]),
        {},
        r"got a read of optimizer\.state; call state_dict\(\)",
    ),
    "gradients that stay": (
        Keeps,
        {},
        r"got another step after it without zero_grad",
    ),
    "float64": (Tiny, {"precision": "64-true"}, "got '64-true'; pass one of these"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.shows(
    "options of Lightning that sharding cannot hold", "refused", "when the strategy is set up"
)
def test_an_option_that_cannot_hold_is_refused(case: str, tmp_path: Path) -> None:
    make, options, words = REFUSED[case]
    with pytest.raises(ZfunError, match=words) as caught:
        fitted(make(), tmp_path, **options)
    assert isinstance(caught.value, NotElementwiseError if case == "lbfgs" else OptionError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stge": 3}, "got 'stge'; did you mean 'stage'"),
        ({"remote_device": "tape"}, "got 'tape'; pass 'meta'"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused(options: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ZfunStrategy(**options)


def test_a_configuration_gives_stage_optimizer_and_schedule(
    tmp_path: Path, monkeypatch: Any
) -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("PL_DEEPSPEED_CONFIG_PATH", str(tmp_path / "config.json"))
    torch.manual_seed(0)
    model = Tiny()
    before = model.net.bias.item()
    trainer = fitted(model, tmp_path, "zfun", limit_train_batches=1)
    assert trainer.strategy.recipe.stage == 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.2
    norm = float(trainer.strategy.last_step.grad_norm)
    assert abs(model.net.bias.item() - before) <= 0.2 * norm
    assert model.net.bias.item() != before


def test_accumulation_in_a_configuration_is_refused(tmp_path: Path) -> None:
    strategy = ZfunStrategy(config={"gradient_accumulation_steps": 4})
    with pytest.raises(OptionError, match="write Trainer\\(accumulate_grad_batches"):
        fitted(Tiny(), tmp_path, strategy)


# The loops of users: each fits under plain Lightning and under the strategy.


class Backbone(Tiny):
    """A module for BackboneFinetuning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        self.net = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Unfreezes(L.Callback):
    """Unfreezes a part of the module, and adds a group, in the middle of an epoch."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            pl_module.backbone.requires_grad_(True)
            [optimizer] = trainer.optimizers
            known = {id(p) for group in optimizer.param_groups for p in group["params"]}
            new = [p for p in pl_module.backbone.parameters() if id(p) not in known]
            if new:
                optimizer.add_param_group({"params": new, "lr": 0.02})


class Thaws(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 3:
            pl_module.backbone.requires_grad_(True)


class Frozen(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)


class Averages(Tiny):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        bare = nn.Linear(2, 3, bias=False)  # statistics follow
        self.net = nn.Sequential(bare, nn.BatchNorm1d(3), nn.Linear(3, 1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.forward(batch).sum())


class OwnBackward(Averages):
    def backward(self, loss: Tensor) -> None:
        (loss * 2).backward()


class Penalised(Averages):
    """A loss that reads parameters directly, and a hook that writes them."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(p.square().sum() for p in self.parameters())

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for p in self.net[2].parameters():
                p.clamp_(-0.2, 0.2)


class Plateau(Averages):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class Clips(Averages):
    """Reads, clips and replaces gradients in hooks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.log_dict(grad_norm(self, norm_type=2))

    def on_after_backward(self) -> None:
        bias = self.net[2].bias
        bias.grad = bias.grad.sign() * 0.1


class Accumulates(Averages):
    """Gradients of several batches, each kept until zero_grad(), in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.forward(batch).square().mean())
        optimizer.step()
        if batch_idx % 2:
            optimizer.zero_grad()


class RunsClosure(Averages):
    """Runs the closure before the step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        optimizer.step()


class StepsInner(Averages):
    """Calls step() of torch's own optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.optimizer.step(optimizer_closure)


class StepsByHand(Averages):
    """The same in manual optimization, with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.forward(batch).square().mean())
        optimizer.step()
        self.lr_schedulers().step()


class ClipsLater(Averages):
    """Clips in the second half alone, by the bound of the Trainer."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.current_epoch:
            self.clip_gradients(optimizer, gradient_clip_val, "norm")


class Zeroes(Tiny):
    """Parameters that go unused, whose gradients are set to zero, and not to None."""

    def __init__(self, *, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        torch.manual_seed(0)
        self.net, self.branch = nn.Linear(2, 1), nn.Linear(2, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05, weight_decay=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.forward(batch) + (self.branch(batch) if batch_idx % 3 == 0 else 0.0)
        loss = out.square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            # Lightning's wrapper has torch's own method.
            optimizer.optimizer.zero_grad(set_to_none=False)
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


CALLBACKS = L.pytorch.callbacks
LOOPS: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]] = {
    "finetuning": (
        Backbone,
        lambda: [CALLBACKS.BackboneFinetuning(1, backbone_initial_lr=0.05)],
    ),
    "a group of later": (Frozen, lambda: [Unfreezes()]),
    "an average": (Averages, lambda: [CALLBACKS.EMAWeightAveraging(decay=0.5)]),
    "a backward": (OwnBackward, list),
    "reads and writes": (Penalised, list),
    "gradients in hooks": (Clips, list),
    "plateau": (Plateau, list),
    "a closure of its own": (RunsClosure, list),
    "a step of torch's optimizer": (StepsInner, list),
    "a step of torch's optimizer, manual": (StepsByHand, list),
    "clips later": (ClipsLater, list),
    "a parameter of later, manual": (TwoManual, list),
    "gradients that stay": (Accumulates, list),
    "gradients of zeros": (lambda: Zeroes(is_manual=False), list),
    "gradients of zeros, manual": (lambda: Zeroes(is_manual=True), list),
    "accumulation": (Averages, lambda: [CALLBACKS.GradientAccumulationScheduler({0: 2, 1: 1})]),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.shows(
    "Lightning's callbacks and manual optimization", "right", "the numbers of plain Lightning"
)
def test_a_loop_of_users_is_that_of_plain_lightning(name: str, stage: int, tmp_path: Path) -> None:
    make, callbacks = LOOPS[name]
    found = []
    for strategy in ("auto", f"zfun_stage_{stage}"):
        model = make()
        before = {key: x.clone() for key, x in model.state_dict().items()}
        options = {"gradient_clip_val": 0.05} if make is ClipsLater else {}
        options |= {"enable_checkpointing": False, "max_epochs": 3, "callbacks": callbacks()}
        trainer = lightnings.trainer_of(strategy, 1, tmp_path, **options)
        trainer.fit(model, data(), data())
        found.append({key: x - before[key] for key, x in model.state_dict().items()})
        assert all(x.any() for x in found[-1].values())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_search_for_the_learning_rate_restores_the_run(stage: int, tmp_path: Path) -> None:
    class Rated(Averages):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    found = []
    for strategy in ("auto", f"zfun_stage_{stage}"):
        model = Rated()
        trainer = lightnings.trainer_of(strategy, 1, tmp_path, enable_checkpointing=False)
        tuner = L.pytorch.tuner.Tuner(trainer)
        before = {key: x.clone() for key, x in model.state_dict().items()}
        search: Any = tuner.lr_find(model, data(), num_training=4, early_stop_threshold=None)
        assert_same_bits(dict(model.state_dict()), before)
        trainer.fit(model, data())
        found.append((search.results, model.lr, dict(model.state_dict())))
    torch.testing.assert_close(found[1], found[0])


class Falls(Averages):
    """Logs a number that falls from epoch to epoch."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("rate", -float(self.current_epoch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.forward(batch).sum())


class Partial(Averages):
    strict_loading = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Adapters(Partial):
    """Saves a part of its parameters, as users of adapters do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["state_dict"]
        for key in [key for key in kept if not key.startswith("net.2.")]:
            del kept[key]
        kept["net.2.bias"] = kept["net.2.bias"] + 1
        kept["renamed"] = kept.pop("net.2.weight")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["state_dict"]
        if "renamed" in kept:
            kept["net.2.weight"] = kept.pop("renamed")


class Renames(L.Callback):
    """A callback that leaves a part of a checkpoint."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {"only": checkpoint["state_dict"]["net.0.weight"]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {"net.0.weight": checkpoint["state_dict"].pop("only")}


HOOKS: dict[str, tuple[Callable[[], list[Any]], list[str]]] = {
    "the module's": (list, ["net.2.bias", "renamed"]),
    "a callback's": (lambda: [Renames()], ["only"]),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_leaves_is_written_and_resumed_from(
    hook: str, stage: int, tmp_path: Path
) -> None:
    callbacks, keys = HOOKS[hook]
    found = []
    for strategy in ("auto", f"zfun_stage_{stage}"):
        make = Adapters if hook == "the module's" else Partial
        trainer = fitted(make(), tmp_path, strategy, callbacks=callbacks())
        path = tmp_path / f"{strategy}.ckpt"
        trainer.save_checkpoint(path)
        assert path.is_file()
        whole = torch.load(path, weights_only=False)
        assert sorted(whole["state_dict"]) == keys
        states = [state["state"] for state in whole["optimizer_states"]]
        resumed = make()
        again = lightnings.trainer_of(
            strategy, 1, tmp_path, enable_checkpointing=False, max_epochs=2, callbacks=callbacks()
        )
        again.fit(resumed, data(), ckpt_path=path)
        found.append((whole["state_dict"], states, dict(resumed.state_dict())))
    torch.testing.assert_close(found[1], found[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["auto.ckpt", path.name]


def test_a_missing_key_is_refused_as_in_plain_lightning(tmp_path: Path) -> None:
    class Strict(Adapters):
        strict_loading = True

    trainer = fitted(Strict(), tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict.*net.0.weight"):
        trainer.validate(Strict(), data(), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("stage", [1, 3])
def test_best_and_last_name_the_checkpoints_of_plain_lightning(stage: int, tmp_path: Path) -> None:
    found = []
    for strategy in ("auto", f"zfun_stage_{stage}"):
        folder = tmp_path / strategy

        def trainer_of(epochs: int, strategy: str = strategy, folder: Path = folder) -> Any:
            # A later epoch is worse.
            keeps = CALLBACKS.ModelCheckpoint(
                folder, monitor="rate", mode="max", save_last=True, save_top_k=-1
            )
            return lightnings.trainer_of(
                strategy, 1, folder, callbacks=[keeps], max_epochs=epochs, num_sanity_val_steps=1
            )

        model = Falls()
        trainer = trainer_of(3)
        trainer.fit(model, data(), data())
        best = trainer.checkpoint_callback.best_model_path
        assert "epoch=0" in best
        [one] = trainer.validate(ckpt_path="best", dataloaders=data(), verbose=False)
        [two] = trainer.test(Falls(), data(), ckpt_path=best, verbose=False)
        [three] = trainer.validate(Falls(), data(), ckpt_path="last", verbose=False)
        predicted = trainer.predict(model, data(), ckpt_path="best")
        whole = dict(Falls.load_from_checkpoint(best).state_dict())
        resumed = Falls()
        trainer_of(4).fit(resumed, data(), data(), ckpt_path="last")
        found.append((one, two, three, predicted, whole, dict(resumed.state_dict())))
        assert one["val"] != three["val"]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("saves", ["auto", "zfun_stage_2"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_fit_resumes_with_groups_of_later(stage: int, saves: str, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        # Lightning freezes the backbone of a run that it resumes.
        return [*LOOPS["finetuning"][1](), Thaws()]

    found = []
    for first, second in (("auto", "auto"), (saves, f"zfun_stage_{stage}")):
        path = tmp_path / f"{first}_{second}.ckpt"
        fitted(Backbone(), tmp_path, first, max_epochs=2, callbacks=callbacks()).save_checkpoint(
            path
        )
        resumed = Backbone()
        again = lightnings.trainer_of(
            second,
            1,
            tmp_path,
            enable_checkpointing=False,
            max_epochs=5,
            callbacks=callbacks(),
        )
        again.fit(resumed, data(), ckpt_path=path)
        found.append(dict(resumed.state_dict()))
    torch.testing.assert_close(found[1], found[0])


def test_a_group_of_later_keeps_its_own_count_in_one_file(tmp_path: Path) -> None:
    states = []
    for strategy in ("auto", "zfun_stage_3"):
        trainer = fitted(
            Backbone(), tmp_path, strategy, max_epochs=2, callbacks=LOOPS["finetuning"][1]()
        )
        path = tmp_path / f"{strategy}.ckpt"
        trainer.save_checkpoint(path)
        if path.is_dir():
            path = collate(path, tmp_path / "one.ckpt", optimizer=True)
        states.append(torch.load(path, weights_only=False)["optimizer_states"][0]["state"])
    torch.testing.assert_close(states[1], states[0])
    assert [float(x["step"]) for x in states[1].values()] == [8.0, 8.0, 4.0, 4.0]
