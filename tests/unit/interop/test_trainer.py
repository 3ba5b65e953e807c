"""The Trainer of transformers over zfun, on one rank; tests/distributed has two."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun import interop
from zfun.errors import CheckpointError, ConfigError, OptionError
from zfun.testing import assert_same_bits

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.interop import trainers  # noqa: E402, after the check that the packages are there
from zfun.interop.transformers import Trainer  # noqa: E402

# transformers 5.23 has another name for the switch.
CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(transformers.TrainingArguments, "activation_checkpointing")
    else "gradient_checkpointing"
)
# PEFT reads a deprecated attribute of transformers 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
SHORT = {"max_steps": 3, "gradient_accumulation_steps": 2}


def both(tmp_path: Path, options: dict[str, Any], zero: Any = 3, **given: Any) -> Any:
    """Train with zfun and with plain transformers; return both trainers."""
    made = []
    for cls, more in ((Trainer, {"zero": zero}), (transformers.Trainer, {})):
        values = {name: value() if callable(value) else value for name, value in given.items()}
        folder = str(tmp_path / cls.__module__)
        trainer = trainers.make(cls, folder, options={**SHORT, **options}, **values, **more)
        trainer.train()
        made.append(trainer)
    return made


def assert_close_histories(ours: Any, theirs: Any, rtol: float = 1e-5) -> None:
    assert len(trainers.history(ours)) == len(trainers.history(theirs)) > 1
    torch.testing.assert_close(
        torch.tensor(trainers.history(ours)),
        torch.tensor(trainers.history(theirs)),
        rtol=rtol,
        atol=rtol,
    )


class Tiny(nn.Module):
    """A model that is no model of transformers, with BatchNorm and without loss kwargs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.net(x)[:, 0]
        return {"loss": (y - labels).square().mean(), "logits": y}


def numbers() -> list[dict[str, Tensor]]:
    x = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum()} for row in x]


def tiny(**options: Any) -> dict[str, Any]:
    return {"model": Tiny, "train_dataset": numbers, "eval_dataset": numbers, **options}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"optim": "sgd", "optim_args": "momentum=0.9"}, id="sgd"),
        pytest.param({"optim": "rmsprop"}, id="rmsprop", marks=pytest.mark.slow),
        pytest.param({CHECKPOINTING: True}, id="checkpointing", marks=pytest.mark.slow),
        pytest.param({"label_smoothing_factor": 0.1}, id="smoothing", marks=pytest.mark.slow),
        pytest.param({"max_grad_norm": 0.0}, id="no clipping", marks=pytest.mark.slow),
    ],
)
def test_arguments_mean_what_they_mean_in_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    assert_close_histories(*both(tmp_path, options))


@pytest.mark.slow
def test_epochs_end_with_fewer_micro_batches_and_buffers_are_trained(tmp_path: Path) -> None:
    # 22 rows in batches of 4: the last step of an epoch has 2 micro-batches of 4.
    # Adam would step the bias in front of BatchNorm, whose gradient is 0, by rounding errors.
    options = {
        "gradient_accumulation_steps": 4,
        "max_steps": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
    }
    ours, theirs = both(tmp_path, options, **tiny())
    assert_close_histories(ours, theirs)
    for name, value in theirs.model.named_buffers():
        torch.testing.assert_close(dict(ours.model.named_buffers())[name], value)
    assert ours.model.net[1].num_batches_tracked == 12
    assert abs(ours.evaluate()["eval_loss"] - theirs.evaluate()["eval_loss"]) < 1e-5


@pytest.mark.slow
def test_bf16_computes_under_autocast(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, {"bf16": True})
    assert_close_histories(ours, theirs, rtol=5e-3)
    exact = both(tmp_path, {})[1]
    assert trainers.history(ours)[0][0] != pytest.approx(trainers.history(exact)[0][0], abs=1e-7)
    # With a precision of zfun, parameters are kept in bfloat16, and masters in float32.
    kept, _ = both(tmp_path, {"bf16": True}, zero={"stage": 3, "precision": torch.bfloat16})
    assert_close_histories(kept, theirs, rtol=3e-2)
    assert {p.dtype for p in kept.model.parameters()} == {torch.bfloat16}
    masters = [*kept.gather_model().parameters()]
    assert {p.dtype for p in masters} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in masters)


@pytest.mark.slow
def test_fp16_scales_the_loss(tmp_path: Path) -> None:
    ours = trainers.make(Trainer, str(tmp_path), options={**SHORT, "fp16": True}, zero=3)
    ours.train()
    exact = both(tmp_path, {})[1]
    assert_close_histories(ours, exact, rtol=1e-2)
    assert trainers.history(ours) != trainers.history(exact)


@pytest.mark.slow
@pytest.mark.shows(
    "a step whose gradients are not finite",
    "different",
    "skipped on all ranks, also in float32",
)
def test_a_step_that_is_not_finite_is_skipped_and_the_schedule_waits(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        calls.append(1)
        return outputs.logits.square().mean() * (float("inf") if len(calls) == 3 else 1.0)

    options = {"max_steps": 4, "gradient_accumulation_steps": 1, "logging_nan_inf_filter": False}
    trainer = trainers.make(
        Trainer, str(tmp_path), options=options, compute_loss_func=loss_of, zero=1
    )
    trainer.train()
    rates = [rate for _, rate, _ in trainers.history(trainer)]
    assert rates == pytest.approx([0.0, 0.002, 0.004, 0.004])
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.slow
def test_a_learning_rate_that_a_callback_sets_is_the_next_step(tmp_path: Path) -> None:
    class Halve(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            for group in given["optimizer"].param_groups:
                group["lr"] = 0.01 / 2**state.global_step
                group["betas"] = (0.5, 0.9)

    ours, theirs = both(tmp_path, {}, callbacks=lambda: [Halve()])
    assert_close_histories(ours, theirs)
    usual = both(tmp_path, {})[0]
    assert trainers.history(ours)[2][0] != pytest.approx(trainers.history(usual)[2][0], abs=1e-5)


@pytest.mark.slow
def test_optimizers_and_losses_of_the_caller(tmp_path: Path) -> None:
    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return (
            nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            / num_items_in_batch
        )

    made = []
    for cls, more in ((Trainer, {"zero": 2}), (transformers.Trainer, {})):
        net = trainers.model()
        groups = [
            {"params": [net.transformer.wte.weight], "lr": 1e-3},
            {"params": [p for n, p in net.named_parameters() if "h.0" in n], "weight_decay": 0.5},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trainer = trainers.make(
            cls,
            str(tmp_path),
            model=net,
            options=SHORT,
            optimizers=(optimizer, scheduler),
            compute_loss_func=loss_of,
            **more,
        )
        trainer.train()
        made.append(trainer)
    assert_close_histories(*made)
    torch.testing.assert_close(
        trainers.whole(made[0].model), trainers.whole(made[1].model), rtol=1e-4, atol=1e-5
    )
    start = trainers.whole(trainers.model())
    assert_same_bits(made[0].model.transformer.wpe.weight.detach(), start["transformer.wpe.weight"])


@pytest.mark.slow
def test_evaluation_and_prediction_see_the_trained_values(tmp_path: Path) -> None:
    metrics: Callable[[Any], dict[str, float]] = lambda found: {
        "hits": float((found.predictions.argmax(-1) == found.label_ids).mean())
    }
    ours, theirs = both(
        tmp_path, {"eval_strategy": "steps", "eval_steps": 1}, compute_metrics=lambda: metrics
    )
    rows = [
        [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        for trainer in (ours, theirs)
    ]
    assert len(rows[0]) == 3
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)
    mine, other = (trainer.predict(trainers.rows(5)) for trainer in (ours, theirs))
    torch.testing.assert_close(
        torch.tensor(mine.predictions), torch.tensor(other.predictions), rtol=1e-3, atol=1e-4
    )
    assert mine.metrics.keys() == other.metrics.keys()


def test_parameters_of_stage_3_are_read_by_any_code(tmp_path: Path) -> None:
    trainer = trainers.make(Trainer, str(tmp_path), options=SHORT, zero=3)
    trainer.train()
    assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
    read = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    norms = [param.norm().item() for param in trainer.model.parameters()]
    held = trainer.gather_model()
    assert {type(p) for p in held.parameters()} == {torch.nn.Parameter}
    assert_same_bits(dict(held.state_dict()), read)
    assert norms == [param.norm().item() for param in held.parameters()]
    trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert_same_bits(trainers.whole(saved), trainers.whole(held))


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 1,
        "eval_steps": 1,
        "learning_rate": 1.0,  # the first step is the best one
        "warmup_steps": 0,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    for more in ({}, {"save_only_model": True}):
        folder = tmp_path / str(len(more))
        trainer = trainers.make(Trainer, str(folder), options={**SHORT, **options, **more}, zero=3)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        assert best.name != "checkpoint-3"
        saved = transformers.GPT2LMHeadModel.from_pretrained(best)
        assert_same_bits(trainers.whole(trainer.gather_model()), trainers.whole(saved))
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


@pytest.mark.slow
def test_lora_trains_saves_and_generates(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(trainers.model(), config)

    ours, theirs = both(tmp_path, {}, model=adapted)
    assert_close_histories(ours, theirs)
    ours.save_model(str(tmp_path / "adapter"))
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    loaded = peft.PeftModel.from_pretrained(trainers.model(), tmp_path / "adapter").eval()
    tokens = ours.generate(
        input_ids=torch.arange(4)[None], max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    expected = loaded.generate(
        input_ids=torch.arange(4)[None], max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert torch.equal(tokens, expected)
    trained = trainers.whole(ours.gather_model())
    for name, value in loaded.named_parameters():
        assert_same_bits(value.detach(), trained[name])


DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_prefetch_bucket_size": "auto",
    },
}


@pytest.mark.slow
def test_a_configuration_of_deepspeed_is_read(tmp_path: Path) -> None:
    # As under DeepSpeed, the optimizer of a configuration has one group, so biases decay too.
    one_group, _ = both(tmp_path, {}, zero=DS_CONFIG)
    assert [g["weight_decay"] for g in one_group.optimizer.param_groups] == [0.1]
    ours, theirs = both(tmp_path, {"weight_decay": 0.0}, zero=DS_CONFIG)
    assert_close_histories(ours, theirs)
    auto = interop.AutoValues(
        micro_batch_size=4,
        num_micro_batches=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        hidden_size=32,
    )
    rest = {name: value for name, value in DS_CONFIG.items() if name != "optimizer"}
    recipe = interop.from_ds_config(rest, auto=auto)
    no_decay = {**SHORT, "weight_decay": 0.0}
    again = trainers.make(Trainer, str(tmp_path), options=no_decay, zero=recipe)
    again.train()
    assert trainers.history(again) == trainers.history(ours)
    with pytest.raises(OptionError, match=r"numbers; got gradient_accumulation_steps: 2 and 3"):
        trainers.make(Trainer, str(tmp_path), zero=recipe)
    with pytest.raises(ConfigError, match=r"gradient_clipping.*got 2"):
        trainers.make(Trainer, str(tmp_path), zero={**DS_CONFIG, "gradient_clipping": 2.0})


def test_a_trainer_makes_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a schedule of the configuration waits for the number of steps."""
    groups: list[Any] = []

    def counted(**options: Any) -> Any:
        groups.append(zf.process_group(**options))
        return groups[-1]

    for name, module in list(sys.modules.items()):
        if name.startswith("zfun.interop") and hasattr(module, "process_group"):
            monkeypatch.setattr(module, "process_group", counted)
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    zero = {**DS_CONFIG, "scheduler": schedule}
    options = {**SHORT, "lr_scheduler_type": "linear"}
    trainers.make(Trainer, str(tmp_path), options=options, zero=zero).train()
    assert len(groups) == 1


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (4, r"zero= is a stage from 0 to 3.*got 4; pass zero=3"),
        (True, r"zero= is a stage from 0 to 3.*got True"),
        ({"offload": None}, r"zero= names a stage; got \['offload'\]; add 'stage': 3"),
        ({"stage": 3, "optimizer": None}, r"a Trainer makes optimizer.*optim= of Training"),
        ({"stage": 3, "prefetch": 2}, r"got 'prefetch'; the options are stage, group"),
    ],
)
def test_wrong_options_are_refused(zero: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        trainers.make(Trainer, str(tmp_path), zero=zero)


def test_arguments_that_cannot_hold_are_refused_together(tmp_path: Path) -> None:
    arguments = trainers.arguments(str(tmp_path))
    arguments.fsdp, arguments.deepspeed = True, {"zero_optimization": {"stage": 3}}
    with pytest.raises(
        OptionError, match=r"got deepspeed=.*, fsdp=True; for deepspeed, pass the .*for fsdp, pass"
    ):
        Trainer(trainers.model(), arguments, train_dataset=trainers.rows(), zero=3)
    arguments = trainers.arguments(str(tmp_path), auto_find_batch_size=True)
    with pytest.raises(OptionError, match=r"got auto_find_batch_size=True; for auto_find"):
        Trainer(trainers.model(), args=arguments, train_dataset=trainers.rows(), zero=3)


@pytest.mark.slow
def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    options = {**SHORT, "save_strategy": "steps", "save_steps": 2}
    trainers.make(transformers.Trainer, str(tmp_path), options=options).train()
    ours = trainers.make(Trainer, str(tmp_path), options=options, zero=1)
    with pytest.raises(CheckpointError, match=r"checkpoint-2'.*another Trainer.*from_pretrained"):
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.slow
def test_a_second_call_of_train_goes_on_with_the_state(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, {})
    for trainer in (ours, theirs):
        trainer.train()
    assert_close_histories(ours, theirs)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_gathered_model_trains_on(zero: int, tmp_path: Path) -> None:
    """In the next call of train() with a new state, and by hand as a plain model."""
    ours, theirs = both(tmp_path, {"optim": "sgd"}, zero=zero, **tiny())
    ours.accelerator.free_memory()
    trained = trainers.whole(ours.gather_model())
    for trainer in (ours, theirs):
        trainer.train()
    assert_close_histories(ours, theirs)
    torch.testing.assert_close(trainers.whole(ours.gather_model()), trainers.whole(theirs.model))
    again = trainers.whole(ours.model)
    ours.model.net[0].weight.square().sum().backward()
    ours.optimizer.step()
    ours.optimizer.zero_grad()
    by_hand = trainers.whole(ours.model)
    for before, after in ((trained, again), (again, by_hand)):
        assert not torch.equal(before["net.0.weight"], after["net.0.weight"])


class Resets(transformers.TrainerCallback):
    """Forgets the moments after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["optimizer"].state.clear()


def test_a_callback_that_resets_moments_is_refused(tmp_path: Path) -> None:
    trainer = trainers.make(Trainer, str(tmp_path), options=SHORT, callbacks=[Resets()], zero=2)
    with pytest.raises(OptionError, match=r"got a write of optimizer\.state; call state_dict"):
        trainer.train()


class Interrupt(transformers.TrainerCallback):
    """Raises once, between two micro-batches of the first step."""

    is_over = False

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt


def test_a_call_of_train_after_an_interrupted_one_begins_a_new_step(tmp_path: Path) -> None:
    made = []
    for cls, more in ((Trainer, {"zero": 2}), (transformers.Trainer, {})):
        folder = str(tmp_path / cls.__module__)
        trainer = trainers.make(cls, folder, options=SHORT, callbacks=[Interrupt()], **more)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        made.append(trainer)
    assert_close_histories(*made)


def test_a_frozen_model_is_refused(tmp_path: Path) -> None:
    net = trainers.model().requires_grad_(False)
    trainer = trainers.make(Trainer, str(tmp_path), options=SHORT, model=net, zero=2)
    with pytest.raises(OptionError, match=r"trains at least one parameter.*set requires_grad"):
        trainer.train()


@pytest.mark.slow
def test_nothing_is_imported_by_import_zfun() -> None:
    import subprocess
    import sys

    program = (
        "import sys, zfun; bad = {'transformers', 'accelerate', 'peft'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
