"""Checkpoints of runs that train other leaves, beside plain torch and transformers."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zfun as zf
from zfun.errors import CheckpointError, CorruptCheckpoint, SpecMismatch
from zfun.interop import Engine
from zfun.interop._named import apart
from zfun.interop.accelerate import Accelerator
from zfun.testing import assert_same_bits

transformers = pytest.importorskip("transformers")

from tests.interop import trainers  # noqa: E402, after the check that the packages are there
from zfun.interop.transformers import Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
SHARDED_OR_NOT = pytest.mark.parametrize("stage", [1, 3])
X = torch.linspace(-1, 2, 4 * 2 * 3, dtype=torch.float64).view(4, 2, 3)


def net() -> nn.Sequential:
    found = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    for index, param in enumerate(found.parameters()):
        param.data = torch.linspace(-1, index + 1, param.numel()).double().view_as(param)
    found[0].requires_grad_(False)
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5, eps=1e-2)


def started(group: zf.Group, stage: int, rule: Any = adamw, **options: Any) -> Engine:
    model = net()
    return Engine(model, rule(model), zero=stage, group=group, **options)


def train(loop: Engine, turn: int) -> None:
    loop.backward(loop(X[turn]).square().mean())
    loop.step()


@SHARDED_OR_NOT
def test_a_checkpoint_from_before_an_unfreeze_is_loaded(stage: int, tmp_path: Path) -> None:
    """The unfrozen leaves have their old values, and train on without moments, as in torch."""
    model = net()
    optimizer, saved = adamw(model), list[Any]()
    for turn in (0, 1, 2, 3, 2, 3):
        if turn == 2:
            saved = saved or copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        model[0].requires_grad_(turn > 1)
        optimizer.zero_grad()
        model(X[turn]).square().mean().backward()
        optimizer.step()

    def main(group: zf.Group) -> None:
        engine = started(group, stage)
        train(engine, 0)
        train(engine, 1)
        engine.save(tmp_path)
        engine.module[0].requires_grad_(True)  # pyrefly: ignore[bad-index]
        train(engine, 2)
        train(engine, 3)
        engine.load(tmp_path)
        train(engine, 2)
        train(engine, 3)
        torch.testing.assert_close(engine.state_dict(), dict(model.state_dict()))

    zf.simulate(2, main)


@SHARDED_OR_NOT
def test_a_load_that_fails_changes_nothing(stage: int, tmp_path: Path) -> None:
    """The leaves of the checkpoint are others, and so is the optimizer."""

    def main(group: zf.Group) -> None:
        first = started(group, stage)
        first.module[0].requires_grad_(True)  # pyrefly: ignore[bad-index]
        train(first, 0)
        first.save(tmp_path)
        sgd = lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        engines = [started(group, stage, sgd) for _ in range(2)]
        for turn in range(3):
            for engine in engines:
                train(engine, turn)
            if turn == 1:
                with pytest.raises(SpecMismatch):
                    engines[0].load(tmp_path)
        frozen = engines[0].state.frozen
        assert frozen is not None
        assert set(frozen.layout.paths) == {"0.weight", "0.bias"}
        assert_same_bits(engines[0].state_dict(), engines[1].state_dict())

    zf.simulate(2, main)


def by_layer(cls: Any, **options: Any) -> Any:
    """Return a rule with a group for each layer."""
    return lambda model: cls(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}], 0.1, **options
    )


@SHARDED_OR_NOT
def test_a_load_that_fails_leaves_the_numbers_of_the_groups(stage: int, tmp_path: Path) -> None:
    """The checkpoint trains one group alone, and this run both, with another optimizer."""

    def main(group: zf.Group) -> None:
        first = started(group, stage, by_layer(torch.optim.AdamW))
        train(first, 0)
        first.save(tmp_path)
        engines = []
        for fails in (True, False):
            model = net()
            model[0].requires_grad_(True)
            optimizer = by_layer(torch.optim.SGD, momentum=0.9)(model)
            engine = Engine(model, optimizer, zero=stage, group=group)
            train(engine, 0)
            if fails:
                with pytest.raises(SpecMismatch):
                    engine.load(tmp_path)
            for turn, lr in ((1, 0.1), (2, 0.5), (3, 0.0)):
                optimizer.param_groups[1]["lr"] = lr
                train(engine, turn)
            engines.append(engine)
        assert_same_bits(engines[0].state_dict(), engines[1].state_dict())

    zf.simulate(2, main)


@SHARDED_OR_NOT
def test_a_damaged_file_of_other_leaves_changes_nothing(stage: int, tmp_path: Path) -> None:
    """Not the buffers either, which a load fills in place."""

    def normed(group: zf.Group, *, frozen: bool) -> Engine:
        model = net()
        model.insert(1, nn.BatchNorm1d(3).double())
        model[0].requires_grad_(not frozen)
        return Engine(model, adamw(model), zero=stage, group=group)

    def save(group: zf.Group) -> None:
        first = normed(group, frozen=False)
        train(first, 0)
        first.save(tmp_path)

    def main(group: zf.Group) -> None:
        engines = [normed(group, frozen=True) for _ in range(2)]
        for turn in range(3):
            for engine in engines:
                train(engine, turn)
            if turn == 1:
                with pytest.raises(CorruptCheckpoint):
                    engines[0].load(tmp_path)
                assert_same_bits(engines[0].state_dict(), engines[1].state_dict())
        assert_same_bits(engines[0].state_dict(), engines[1].state_dict())

    zf.simulate(2, save)
    for path in tmp_path.rglob("*.safetensors"):
        held = path.read_bytes()
        path.write_bytes(held[:-8] + bytes(x ^ 255 for x in held[-8:]))
    zf.simulate(2, main)


@pytest.mark.parametrize("frozen", [True, False])
def test_ranks_go_on_alike_where_one_cannot_load(frozen: bool, tmp_path: Path) -> None:
    """Rank 1 may lose digits, so the leaves of the checkpoint fit there."""

    def main(group: zf.Group) -> None:
        first = started(group, 2)
        train(first, 0)
        first.save(tmp_path)
        model = net().float()
        model[0].requires_grad_(not frozen)
        engine = Engine(model, adamw(model), zero=2, group=group)
        with pytest.raises(SpecMismatch if group.rank == 0 else CheckpointError):
            engine.load(tmp_path, cast=group.rank == 1)

    zf.simulate(2, main)


class Loader:
    """A loader that rank 1 cannot bring back."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def state_dict(self) -> Any:
        return {"place": 1}

    def load_state_dict(self, state: Any) -> None:
        if self.rank == 1:
            raise ValueError("no such place")


def test_an_error_of_any_kind_on_one_rank_ends_a_load_on_all(tmp_path: Path) -> None:
    """The other ranks ask whether there is a run with other leaves, and wait for each other."""

    def main(group: zf.Group) -> None:
        engine = started(group, 2)
        train(engine, 0)
        engine.save(tmp_path, loader=Loader())
        error, words = (ValueError, "no such place") if group.rank else (CheckpointError, "rank 1")
        with pytest.raises(error, match=words):
            engine.load(tmp_path, loader=Loader(group.rank))

    zf.simulate(2, main)


@SHARDED_OR_NOT
def test_a_load_between_micro_batches_drops_their_gradients(stage: int, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        first = started(group, stage)
        first.module[0].requires_grad_(True)  # pyrefly: ignore[bad-index]
        train(first, 0)
        first.save(tmp_path)
        second = started(group, stage, accumulate=2)
        second.backward(second(X[3]).square().mean())
        second.load(tmp_path)
        for engine in (first, second):
            engine.module[0].requires_grad_(True)  # pyrefly: ignore[bad-index]
            for _ in range(engine.accumulate):
                engine.backward(engine(X[1]).square().mean())
            engine.step()
        assert_same_bits(second.state_dict(), first.state_dict())

    zf.simulate(2, main)


def test_a_leaf_in_no_group_counts_for_the_norm_of_a_loaded_run(tmp_path: Path) -> None:
    """It was unfrozen in the first run, and is frozen when the second run begins."""

    def half(turns: range, *, resumes: bool = False) -> tuple[list[float], dict[str, Tensor]]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = Accelerator(cpu=True, zero=2), net()
        optimizer = torch.optim.AdamW(model[2].parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resumes:
            accelerator.load_state(str(tmp_path))
        norms = []
        for turn in turns:
            model[0].requires_grad_(turn > 0)
            accelerator.backward(model(X[turn]).square().mean())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
            if turn == 1:
                accelerator.save_state(str(tmp_path))
        return norms, accelerator.get_state_dict(model)

    norms, values = half(range(4))
    found, others = half(range(2, 4), resumes=True)
    assert found == norms[2:]
    assert_same_bits(others, values)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_saved_weights_are_those_of_accelerate(stage: int, tmp_path: Path) -> None:
    """All of them, and tied ones once, although parameters are views of one bucket."""
    files = []
    for cls, more in ((accelerate.Accelerator, {}), (Accelerator, {"zero": stage})):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = cls(cpu=True, **more), net()
        model.register_module("tied", model[2])
        start = {name: x.detach().clone() for name, x in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        folder = tmp_path / cls.__module__
        accelerator.save_state(str(folder / "state"))
        accelerator.save_model(model, str(folder / "model"))
        names = ("state", "model")
        files.append([load_file(folder / name / "model.safetensors") for name in names])
        with torch.no_grad():
            model[2].weight.zero_()
        accelerator.load_state(str(folder / "state"))
        assert_same_bits({name: x.detach() for name, x in model.named_parameters()}, start)
    assert_same_bits(files[1], files[0])


def test_a_state_dict_of_the_users_own_stays(tmp_path: Path) -> None:
    """Also where a model was prepared twice."""
    accelerator, model = Accelerator(cpu=True, zero=2), net()
    for _ in range(2):
        accelerator.prepare_model(model)
    accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_state(str(tmp_path))
    vars(model)["state_dict"] = own = functools.partial(model.state_dict)
    accelerator.load_state(str(tmp_path))
    assert vars(model)["state_dict"] is own
    del model.state_dict
    accelerator.load_state(str(tmp_path))
    assert "state_dict" not in vars(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_dict_has_the_versions_of_its_modules(stage: int) -> None:
    accelerator, model = Accelerator(cpu=True, zero=stage), net()
    model.append(nn.BatchNorm1d(1))
    expected = model.state_dict()._metadata  # pyrefly: ignore[missing-attribute]
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert accelerator.get_state_dict(model)._metadata == expected  # pyrefly: ignore[missing-attribute]


def test_values_with_memory_of_their_own_are_not_copied() -> None:
    bucket, own = torch.arange(4.0), torch.ones(2)
    found = apart({"part": bucket[:2], "tied": bucket[:2], "own": own})
    assert found["own"] is own
    assert found["part"] is found["tied"]
    assert found["part"].untyped_storage().nbytes() == 8
    assert_same_bits(found["part"], torch.tensor([0.0, 1.0]))


class Tiny(nn.Module):
    """A model with a body that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(trainers.LENGTH, 4), nn.Linear(4, 1)
        self.body.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Any = None) -> dict[str, Tensor]:
        out = self.head(self.body(input_ids / trainers.VOCAB).tanh())
        return {"loss": (out - 1.0).square().mean()}


class Unfreeze(transformers.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        given["model"].body.requires_grad_(state.global_step > 0)


OPTIONS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "warmup_steps": 0}


def trainer_of(cls: Any, folder: Path, **options: Any) -> Any:
    """Return a trainer that unfreezes the body after its first step."""
    more: dict[str, Any] = {} if cls is transformers.Trainer else {"zero": 3}
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), options.get("learning_rate", 0.1), eps=1e-2)
    constant = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    more |= {"optimizers": (optimizer, constant), "callbacks": [Unfreeze()], "model": model}
    return trainers.make(cls, str(folder / cls.__module__), options={**OPTIONS, **options}, **more)


def test_a_trainer_resumes_a_run_that_has_unfrozen_leaves(tmp_path: Path) -> None:
    plain, first = (trainer_of(cls, tmp_path) for cls in (transformers.Trainer, Trainer))
    plain.train()
    first.train()
    second = trainer_of(Trainer, tmp_path)
    second.train(resume_from_checkpoint=str(Path(second.args.output_dir) / "checkpoint-2"))
    assert second.state.global_step == 4
    for ours in (first, second):
        torch.testing.assert_close(dict(ours.model.state_dict()), dict(plain.model.state_dict()))


def test_the_best_model_may_be_from_before_an_unfreeze(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # the first step is the best one
    }
    theirs, ours = (trainer_of(cls, tmp_path, **options) for cls in (transformers.Trainer, Trainer))
    theirs.train()
    ours.train()
    assert Path(ours.state.best_model_checkpoint).name == "checkpoint-1"
    torch.testing.assert_close(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))
    assert torch.equal(ours.model.body.weight, Tiny().body.weight)


def test_a_run_goes_on_from_weights_alone(tmp_path: Path) -> None:
    """A second train() after the best model was loaded from weights, without moments."""
    values = []
    for cls in (transformers.Trainer, Trainer):
        options = {"save_only_model": True, "load_best_model_at_end": True, "optim": "sgd"}
        options |= {"eval_strategy": "steps", "eval_steps": 1, **OPTIONS}
        more: dict[str, Any] = {} if cls is transformers.Trainer else {"zero": 3}
        folder = str(tmp_path / cls.__module__)
        trainer = trainers.make(cls, folder, options=options, model=Tiny(), **more)
        trainer.train()
        once = {name: x.clone() for name, x in trainer.model.state_dict().items()}
        trainer.train()
        values.append((once, dict(trainer.model.state_dict())))
        assert not torch.equal(once["head.weight"], values[-1][1]["head.weight"])
    torch.testing.assert_close(values[1], values[0])
