"""A fit takes the values and moments that hooks of ``on_load_checkpoint`` have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import CheckpointError, ZfunError

L = pytest.importorskip("lightning")

from tests.interop import lightnings  # noqa: E402, needs Lightning
from zfun.interop.lightning import EmaAveraging, ZfunStrategy  # noqa: E402, needs Lightning

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore"),
]
Hook = Callable[[Any], object]
# So that a step magnifies no noise of small gradients.
EPS = 1e-3


class Model(L.LightningModule):
    """A tied weight, a frozen layer and buffers; ``hook`` is called by ``on_load_checkpoint``."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hook, self.losses = hook, list[float]()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.norm, self.frozen = nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x).tanh()))).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.forward(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.forward(batch))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, 0.05, eps=EPS)

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        if self.hook is not None:
            self.hook(checkpoint)


class Pair(Model):
    """Manual optimization with two optimizers."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__(hook)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        second = torch.optim.SGD([*self.norm.parameters(), self.last.bias], 0.05, momentum=0.9)
        return torch.optim.Adam(self.first.parameters(), 0.05, eps=EPS), second


class Renamed(Model):
    """A module with another name for a layer, whose hook renames the keys."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__(hook)
        names = {"first": "front", "norm": "norm", "frozen": "frozen", "last": "last"}
        parts = {new: self._modules.pop(old) for old, new in names.items()}
        self._modules.update(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.front(x).tanh()))).square().mean()

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        kept = checkpoint["state_dict"]
        for key in [key for key in kept if key.startswith("first.")]:
            kept[key.replace("first.", "front.")] = kept.pop(key)


class Larger(Model):
    """A module with one more layer than the checkpoint."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__(hook)
        self.strict_loading, self.head = False, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.head(x))


class Zeroes(Model):
    """A module that changes values as torch loads them."""

    def __init__(self, hook: Hook | None = None) -> None:
        super().__init__(hook)
        self.register_load_state_dict_pre_hook(lambda module, kept, *_: zero_first(kept))


class Skips(Model):
    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        kept = {key: x for key, x in state_dict.items() if not key.startswith("first.")}
        return super().load_state_dict(kept, strict=False)


def zero_first(kept: Any) -> None:
    kept["first.bias"] = 0 * kept["first.bias"]


def read(checkpoint: Any) -> None:
    assert sum(x.abs().sum() for x in checkpoint["state_dict"].values()) > 0
    assert checkpoint["optimizer_states"][0]["state"]
    for entry in checkpoint["optimizer_states"][0]["state"].values():
        assert {*entry} == {"step", "exp_avg", "exp_avg_sq"}


def halve(checkpoint: Any) -> None:
    kept = checkpoint["state_dict"].items()
    checkpoint["state_dict"] = {k: x / 2 if x.is_floating_point() else x for k, x in kept}


def halve_in_place(checkpoint: Any) -> None:
    for x in checkpoint["state_dict"].values():
        if x.is_floating_point():
            x.mul_(0.5)


def write_some(checkpoint: Any) -> None:
    checkpoint["state_dict"]["frozen.weight"] *= 2
    checkpoint["state_dict"]["norm.running_mean"] += 1


def write_a_copy(checkpoint: Any) -> None:
    kept = copy.deepcopy(checkpoint["state_dict"])
    kept["first.bias"].zero_()
    checkpoint["state_dict"] = kept.copy() | {"last.bias": kept["last.bias"] + 1}


def drop_optimizers(checkpoint: Any) -> None:
    checkpoint["optimizer_states"] = []


def drop_one_optimizer(checkpoint: Any) -> None:
    checkpoint["optimizer_states"].pop()


def drop_moments(checkpoint: Any) -> None:
    checkpoint["optimizer_states"][0]["state"] = {}


def drop_an_entry(checkpoint: Any) -> None:
    checkpoint["optimizer_states"][0]["state"].pop(0)


def zero_moments(checkpoint: Any) -> None:
    for entry in checkpoint["optimizer_states"][0]["state"].values():
        entry["exp_avg"].zero_()


def change_all(checkpoint: Any) -> None:
    halve(checkpoint)
    zero_moments(checkpoint)
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.2


class Writes(L.Callback):
    """Changes the module, or moments, between the two loads of Lightning."""

    def __init__(self, when: str) -> None:
        self.when = when

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        pl_module.seen = sum(x.sum().item() for x in checkpoint["state_dict"].values())
        if self.when == "load":
            self._write(pl_module)
        if self.when == "moments":
            zero_moments(checkpoint)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "fit":
            self._write(pl_module)

    @torch.no_grad()
    def _write(self, module: Any) -> None:
        module.last.bias.fill_(0.25)
        module.norm.running_mean += 1


def trainer_of(stage: int | None, folder: Path, **options: Any) -> Any:
    strategy = "auto" if stage is None else ZfunStrategy(stage=stage)
    return lightnings.trainer_of(strategy, 1, folder, enable_checkpointing=False, **options)


def data() -> Any:
    rows: Any = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(rows, batch_size=4)


def saved(stage: int | None, folder: Path, make: Any = Model, **options: Any) -> Path:
    trainer = trainer_of(stage, folder, **options)
    trainer.fit(make(), data())
    path = folder / f"{stage}.ckpt"
    trainer.save_checkpoint(path)
    assert path.is_dir() is (stage is not None)
    return path


def resumed(
    stage: int | None, path: Path, make: Any, hook: Hook | None = None, when: str = ""
) -> dict[str, Any]:
    """Go on with a fit from a checkpoint, and validate it."""
    model, validated = make(hook), make(hook)
    callbacks: Any = [Writes(when)] if when else []
    trainer = trainer_of(stage, path.parent, max_epochs=2, callbacks=callbacks)
    trainer.fit(model, data(), ckpt_path=path)
    [found] = trainer_of(stage, path.parent).validate(
        validated, data(), ckpt_path=path, verbose=False
    )
    values = {key: x.detach().clone() for key, x in model.state_dict().items()}
    return {"losses": model.losses, **found, "values": values, "seen": getattr(model, "seen", 0.0)}


def check(
    stage: int,
    folder: Path,
    hook: Hook | None = None,
    *,
    first: Any = Model,
    make: Any = Model,
    when: str = "",
) -> None:
    ours, theirs = (
        resumed(each, saved(each, folder, first), make, hook, when) for each in (stage, None)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@EACH_STAGE
@pytest.mark.parametrize("hook", [read, halve, halve_in_place, write_some, write_a_copy])
def test_a_fit_and_a_validation_take_the_values_that_a_hook_has_left(
    stage: int, hook: Hook, tmp_path: Path
) -> None:
    check(stage, tmp_path, hook)


@EACH_STAGE
@pytest.mark.parametrize(
    "hook", [drop_optimizers, drop_moments, drop_an_entry, zero_moments, change_all]
)
def test_a_fit_takes_the_states_of_optimizers_that_a_hook_has_left(
    stage: int, hook: Hook, tmp_path: Path
) -> None:
    check(stage, tmp_path, hook)


@EACH_STAGE
@pytest.mark.parametrize("hook", [halve, zero_moments, drop_one_optimizer])
def test_hooks_of_a_module_with_two_optimizers(stage: int, hook: Hook, tmp_path: Path) -> None:
    check(stage, tmp_path, hook, first=Pair, make=Pair)


@EACH_STAGE
def test_moments_follow_keys_that_a_hook_renames(stage: int, tmp_path: Path) -> None:
    check(stage, tmp_path, make=Renamed)


@EACH_STAGE
@pytest.mark.parametrize("make", [Zeroes, Skips])
def test_what_the_module_does_as_torch_loads_it_counts(
    stage: int, make: Any, tmp_path: Path
) -> None:
    check(stage, tmp_path, make=make)


@EACH_STAGE
@pytest.mark.parametrize("when", ["load", "fit", "moments"])
def test_what_a_callback_writes_before_the_optimizers_are_loaded_counts(
    stage: int, when: str, tmp_path: Path
) -> None:
    check(stage, tmp_path, when=when)


@EACH_STAGE
def test_a_larger_module_takes_what_is_there(stage: int, tmp_path: Path) -> None:
    check(stage, tmp_path, drop_optimizers, make=Larger)
    for each in (stage, None):
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            resumed(each, tmp_path / f"{each}.ckpt", Larger)


@EACH_STAGE
@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_other_keys_and_shapes_are_refused_as_in_plain_lightning(
    stage: int, change: str, tmp_path: Path
) -> None:
    def hook(checkpoint: Any) -> None:
        kept = checkpoint["state_dict"]
        if change == "missing":
            del kept["first.bias"]
        else:
            kept["other" if change == "unknown" else "first.bias"] = torch.ones(1)

    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key|size mismatch"):
        resumed(None, saved(None, tmp_path), Model, hook)
    words = r"missing are \['first.bias'\]|unknown are \['other'\].*strict_loading|got \(1,\)"
    with pytest.raises(CheckpointError, match=words):
        resumed(stage, saved(stage, tmp_path), Model, hook)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_a_hook_that_only_reads_leaves_each_bit(precision: str, tmp_path: Path) -> None:
    options = {"precision": precision, "callbacks": [EmaAveraging(0.9)]}
    path, straight, model = saved(3, tmp_path, **options), Model(), Model(read)
    trainer_of(3, tmp_path, max_epochs=2, **options).fit(straight, data())
    trainer_of(3, tmp_path, max_epochs=2, **options).fit(model, data(), ckpt_path=path)
    assert model.losses == straight.losses[3:]
    torch.testing.assert_close(model.state_dict(), straight.state_dict(), rtol=0, atol=0)


def test_other_moments_beside_an_average_are_refused(tmp_path: Path) -> None:
    options = {"callbacks": [EmaAveraging(0.9)]}
    path = saved(2, tmp_path, **options)
    trainer = trainer_of(2, tmp_path, max_epochs=2, **options)
    with pytest.raises(ZfunError, match=r"got the state of an optimizer.*leave the average out"):
        trainer.fit(Model(zero_moments), data(), ckpt_path=path)
