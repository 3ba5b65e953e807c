"""Loops of Hugging Face's users: whatever they do with the model has the numbers of the host.

``transformers.Trainer`` in one process is the oracle of one rank. The programs of
``tests/interop/trainers.py`` and the tests of processes show that ranks change nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.interop import trainers
from zfun.errors import ConfigError
from zfun.interop.accelerate import Accelerator
from zfun.interop.transformers import Seq2SeqTrainer, Trainer, TrainingArguments

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
OPTIONS = {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "warmup_steps": 1,
    "lr_scheduler_type": "linear",
}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=trainers.VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            **more,
        )
    )


def trained(
    cls: Any, stage: int | None, *, options: Any = None, model: Any = None, **given: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the history and the values of the model, or of what ``given`` names."""
    more = {} if stage is None else {"zero": stage}
    with tempfile.TemporaryDirectory() as folder:
        net = llama() if model is None else model
        trainer = trainers.make(
            cls, folder, options={**OPTIONS, **(options or {})}, model=net, **given, **more
        )
        trainer.train()
        values = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return trainers.history(trainer), values


def assert_same_loops(make: Callable[[Any], dict[str, Any]], stage: int, base: Any = None) -> None:
    """Train with plain transformers and with zfun; ``make(cls)`` returns class and arguments."""
    results = []
    for parent, its_stage in ((transformers.Trainer, None), (base or Trainer, stage)):
        given = make(parent)
        cls = given.pop("cls", parent)
        results.append(trained(cls, its_stage, **given))
    (first, values), (second, others) = results
    torch.testing.assert_close(
        torch.tensor(second, dtype=torch.float64),
        torch.tensor(first, dtype=torch.float64),
        rtol=2e-5,
        atol=1e-6,
    )
    start = llama().state_dict() if values.keys() == llama().state_dict().keys() else None
    for name, value in values.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=2e-5)
        if start is not None and value.is_floating_point() and value.ndim == 2:
            assert not value.equal(start[name])


def of_self_model(parent: Any) -> dict[str, Any]:
    class Own(parent):
        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            return self.model(**inputs).loss

    return {"cls": Own}


def of_a_reference_held_elsewhere(parent: Any) -> dict[str, Any]:
    model = llama()

    class Own(parent):
        def compute_loss(self, _: Any, inputs: Any, **given: Any) -> Any:
            return model(**inputs).loss

    return {"cls": Own, "model": model}


def of_both(parent: Any) -> dict[str, Any]:
    class Own(parent):
        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            return model(**inputs).loss + 0.5 * self.model(**inputs).loss

    return {"cls": Own}


def of_parts(parent: Any) -> dict[str, Any]:
    """The backbone, and the weight of the head, as in chunked and fused losses."""

    class Own(parent):
        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            hidden = self.model.model(inputs["input_ids"]).last_hidden_state
            logits = F.linear(hidden, self.model.lm_head.weight)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())

    return {"cls": Own}


def of_the_parameters(parent: Any) -> dict[str, Any]:
    class Own(parent):
        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            penalty = sum(p.square().sum() for p in self.model.parameters())
            return model(**inputs).loss + 1e-2 * penalty

    return {"cls": Own}


def of_a_captured_tensor(parent: Any) -> dict[str, Any]:
    """A distillation loss on activations that a hook catches."""
    model, caught = llama(), []
    model.model.layers[0].register_forward_hook(lambda m, args, out: caught.append(out))

    class Own(parent):
        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            loss = model(**inputs).loss
            out = caught.pop()
            return loss + (out[0] if isinstance(out, tuple) else out).square().mean()

    return {"cls": Own, "model": model}


def of_a_step_with_two_backwards(parent: Any) -> dict[str, Any]:
    """A training_step() of the user's own."""

    class Own(parent):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            losses = [model(**inputs).loss, 0.5 * self.model(**inputs).logits.square().mean()]
            for loss in losses:
                self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
            return sum(losses).detach() / self.current_gradient_accumulation_steps  # pyrefly: ignore[missing-attribute]

    return {"cls": Own}


def with_a_parameter_of_the_loss(parent: Any) -> dict[str, Any]:
    model, sigma = llama(), nn.Parameter(torch.zeros(()))

    def loss(out: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        found = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        return found * torch.exp(-sigma) + sigma

    optimizer = torch.optim.AdamW([*model.parameters(), sigma], lr=1e-2, eps=1e-4)
    model.sigma_of_test = [sigma]
    return {"model": model, "optimizers": (optimizer, None), "compute_loss_func": loss}


def with_unfreezing(parent: Any) -> dict[str, Any]:
    """In a callback, by a group of its own."""
    model = llama()
    model.model.requires_grad_(False)

    class Unfreeze(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 2:
                model.model.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.model.parameters()), "lr": 5e-3})

    optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2, eps=1e-4)
    constant = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    return {"model": model, "optimizers": (optimizer, constant), "callbacks": [Unfreeze()]}


def with_noise_after_the_clip(parent: Any) -> dict[str, Any]:
    """Gradients that a callback makes larger than the bound to which the Trainer has clipped."""
    model = llama()

    class Noise(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            generator = torch.Generator().manual_seed(state.global_step)
            for param in model.parameters():
                assert param.grad is not None
                param.grad.add_(torch.randn(param.shape, generator=generator), alpha=0.1)

    return {"model": model, "callbacks": [Noise()], "options": {"max_grad_norm": 0.1}}


LOOPS = [
    of_self_model,
    of_a_reference_held_elsewhere,
    of_both,
    of_parts,
    of_the_parameters,
    of_a_captured_tensor,
    of_a_step_with_two_backwards,
    with_a_parameter_of_the_loss,
    with_unfreezing,
    with_noise_after_the_clip,
]


@pytest.mark.parametrize("loop", LOOPS)
@EACH_STAGE
def test_losses_of_any_form(stage: int, loop: Callable[[Any], dict[str, Any]]) -> None:
    assert_same_loops(loop, stage)


class Codebook(nn.Module):
    """Buffers that forward writes in place, by assignment, and through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(trainers.LENGTH, 8)
        self.register_buffer("written", torch.zeros(8))
        self.register_buffer("assigned", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, input_ids: Tensor, labels: Any = None) -> Any:
        hidden = self.linear(input_ids / trainers.VOCAB)
        if self.training:
            with torch.no_grad():
                self.written.data.lerp_(hidden.mean(0), 0.1)
                self.assigned = 0.9 * self.assigned + 0.1 * hidden.mean(0)
                self.count += 1
        error = hidden - self.written - self.assigned
        return {"loss": error.square().mean() + hidden.mean()}


@EACH_STAGE
@pytest.mark.shows("buffers that `forward` writes", "right", "rank 0's, as in DDP")
def test_buffers_of_any_module_are_written(stage: int) -> None:
    assert_same_loops(lambda parent: {"model": Codebook()}, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_of_the_accelerator_computes_in_bfloat16(stage: int) -> None:
    """Also in a subclass that enters it by itself, and outputs of the model are float32."""
    seen: list[Any] = []

    def make(parent: Any) -> dict[str, Any]:
        class Own(parent):
            def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
                with self.accelerator.autocast():
                    probe = torch.ones(2, 2) @ torch.ones(2, 2)
                out = model(**inputs)
                seen.append((probe.dtype, out.logits.dtype))
                return out.loss

        return {"cls": Own, "options": {"bf16": True}}

    results = [
        trained(make(parent)["cls"], its, options={"bf16": True})[0]
        for parent, its in ((transformers.Trainer, None), (Trainer, stage))
    ]
    assert set(seen) == {(torch.bfloat16, torch.float32)}
    torch.testing.assert_close(
        torch.tensor(results[1]), torch.tensor(results[0]), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_two_lines_of_a_script_change(stage: int) -> None:
    """The arguments carry the sharding, from a command line too."""
    parser = transformers.HfArgumentParser(TrainingArguments)
    words = ["--use_cpu", "--report_to", "none", "--zero", str(stage), "--max_steps", "2"]
    with tempfile.TemporaryDirectory() as folder:
        (arguments,) = parser.parse_args_into_dataclasses([*words, "--output_dir", folder])
        arguments.disable_tqdm = True
        trainer = Trainer(llama(), arguments, train_dataset=trainers.rows(16))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        assert trainer.engine is not None
        assert trainer.engine.recipe is not None
        sharded = trainer.engine.state.params.placement
    assert repr(sharded) == ("S" if stage == 3 else "R")


def test_seq2seq_has_the_classes_of_both() -> None:
    assert issubclass(Seq2SeqTrainer, transformers.Seq2SeqTrainer)
    assert Seq2SeqTrainer.evaluation_loop is Trainer.evaluation_loop


def accelerated(cls: Any, stage: int | None, **options: Any) -> tuple[list[float], Any]:
    """Run a loop of accelerate's documentation."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    more = {} if stage is None else {"zero": stage}
    accelerator = cls(cpu=True, gradient_accumulation_steps=2, **options, **more)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = torch.utils.data.DataLoader(trainers.rows(24), batch_size=4)  # pyrefly: ignore[bad-argument-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found, accelerator.get_state_dict(model)


@EACH_STAGE
def test_a_loop_of_accelerate_has_the_numbers_of_accelerate(stage: int) -> None:
    losses, values = accelerated(accelerate.Accelerator, None)
    found, others = accelerated(Accelerator, stage)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(others, values, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("unfrozen", [None, 1])
def test_a_state_of_accelerate_goes_on(unfrozen: int | None, tmp_path: Any) -> None:
    """Also where the first half has unfrozen a leaf, and the model of the second half has not."""

    def half(resume: bool, save: bool) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, zero=3)
        model = llama()
        late = model.model.layers[0].requires_grad_(unfrozen is None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resume:
            accelerator.load_state(str(tmp_path))
        losses = []
        rows = trainers.rows(24)
        for turn in range(3 if resume else 0, 6 if resume or not save else 3):
            late.requires_grad_(unfrozen is None or turn >= unfrozen)
            batch = torch.utils.data.default_collate(rows[turn * 4 : turn * 4 + 4])
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if save:
            accelerator.save_state(str(tmp_path))
        return losses

    straight = half(resume=False, save=False)
    first = half(resume=False, save=True)
    assert [*first, *half(resume=True, save=False)] == straight


def test_one_optimizer_may_have_two_models() -> None:
    def run(cls: Any, **more: Any) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        accelerator = cls(cpu=True, **more)
        first, second = nn.Linear(3, 3), nn.Linear(3, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
        first, second, optimizer = accelerator.prepare(first, second, optimizer)
        losses = []
        for _ in range(3):
            loss = second(first(torch.ones(2, 3)).tanh()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = run(accelerate.Accelerator)
    for stage in (0, 3):
        assert run(Accelerator, zero=stage) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_torch_compile_compiles_blocks(stage: int) -> None:
    torch.compiler.reset()
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    plain, compiled = (trained(Trainer, stage, options=more)[0] for more in ({}, options))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["sft lora", "sft parameters"])
def test_a_trainer_of_trl_has_the_numbers_of_trl(kind: str, stage: int, tmp_path: Any) -> None:
    """Also in ``tests/distributed``, with all trainers on two ranks."""
    trls = pytest.importorskip("tests.interop.trls")
    model = trls.saved_model(tmp_path / "model")
    plain, found = (trls.run(kind, its, model) for its in (None, stage))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-5, atol=1e-6)


def plain_of_a_configuration(rule: Any, rate_of: Callable[[int], float]) -> list[float]:
    """Train without any Trainer, with an optimizer of torch or a plain loop, and rates by step."""
    model = llama()
    optimizer = rule(model.parameters())
    losses = []
    rows = trainers.rows()
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        batch = torch.utils.data.default_collate(rows[4 * step : 4 * step + 4])
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class PlainLion(torch.optim.Optimizer):
    """The formulae of the paper."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                change = (b1 * m + (1 - b1) * p.grad).sign() + group["weight_decay"] * p
                p.sub_(group["lr"] * change)
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def falling(step: int) -> float:
    """WarmupDecayLR of DeepSpeed with two steps of warm-up and a total of four."""
    taken = max(step - 1, -1)
    if taken < 0:
        return 0.0
    return 1e-2 * (taken / 2 if taken < 2 else max(0.0, (4 - taken) / 2))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("kind", "options", "rule"),
    [
        ("Lion", {"weight_decay": 0.1}, lambda p: PlainLion(p, weight_decay=0.1)),
        ("lion", {}, PlainLion),
        ("SGD", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)),
        ("adam", {"adam_w_mode": False}, lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1)),
        ("ADAMW", {}, lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
        ("Adagrad", {}, lambda p: torch.optim.Adagrad(p, 1e-2, weight_decay=0.1)),
    ],
)
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.shows(
    "a Trainer with a configuration", "right", 'its optimizer, schedule and `"auto"`'
)
def test_optimizer_and_schedule_of_a_configuration_train(
    stage: int, kind: str, options: dict[str, Any], rule: Any, scheduled: bool
) -> None:
    decay = (
        0.1 if kind.lower() in ("adam", "adamw", "adagrad") else options.get("weight_decay", 0.0)
    )
    if kind.lower() in ("lion", "sgd") and not scheduled and stage == 0:
        options = {**options, "lr": 1e-2}
    params = {"lr": "auto", **options}
    if kind != "lion" and "weight_decay" not in params:
        params["weight_decay"] = "auto"
    config: dict[str, Any] = {
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    if scheduled:
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        }
    arguments = {
        **OPTIONS,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 0.0,
        "weight_decay": decay,
        "warmup_steps": 2,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainers.make(Trainer, folder, options=arguments, model=llama(), zero=config)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    plain = plain_of_a_configuration(rule, falling if scheduled else lambda step: 1e-2)
    assert losses == pytest.approx(plain, rel=2e-5)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"optimizer": {"type": "Lion", "params": {"lr": 0.5}}}, r"optimizer\.params\.lr: equals"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled: equals the value of the run, False"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 77}}},
            r"warmup_num_steps: equals the value of the run",
        ),
        ({"optimizer": {"type": "Lionel", "params": {}}}, r"optimizer\.type.*Lionel"),
    ],
)
@pytest.mark.shows(
    "a configuration that contradicts `TrainingArguments`",
    "refused",
    "all contradictions in one message",
)
def test_a_configuration_that_contradicts_the_arguments_is_refused(
    section: dict[str, Any], message: str
) -> None:
    config = {"zero_optimization": {"stage": 2}, **section}
    if "scheduler" in section:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    with tempfile.TemporaryDirectory() as folder, pytest.raises(ConfigError, match=message):
        trainers.make(Trainer, folder, options=OPTIONS, model=llama(), zero=config).train()
