"""Mixed precisions of Lightning: autocast, beside a batch that stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import zfun as zf
from zfun.interop.engine import Engine

L = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402, needs Lightning

from tests.interop import lightnings  # noqa: E402
from zfun.interop.lightning import ZfunPrecision, ZfunStrategy  # noqa: E402

WIDTH, OUT = 16, 4
ZEROS = torch.zeros(4, dtype=torch.long)
NARROW = zf.Precision(torch.bfloat16, None, torch.float32, torch.float32)


class Waves(nn.Module):
    """Sines of the batch, which lose all digits in 16 bits, as in NeRF and in diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 2.0 ** torch.arange(8) * 3.14159)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT))

    def forward(self, x: Tensor) -> Tensor:
        angles = x[:, :1] * self.rates
        return self.net(torch.cat([angles.sin(), angles.cos()], -1))


class Attends(nn.Module):
    """A transformer with float32 positions, so that norms have float32 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, WIDTH), nn.Linear(WIDTH, OUT)
        self.register_buffer("places", torch.randn(WIDTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x[..., None]) + self.places).mean(1))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(4, WIDTH, batch_first=True), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x.view(-1, 4, 4))[0][:, -1])


class Draws(nn.Module):
    """Float32 noise that no batch has, as in GANs and diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.ones(len(x), WIDTH)) + self.net(torch.ones(1, WIDTH))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.mix = nn.Bilinear(WIDTH, 2, OUT), nn.Parameter(torch.full((OUT,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(self.net(x, x[:, :2]), torch.ones(len(x), OUT), self.mix)


def after(first: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.Flatten(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT))


NETS: dict[str, Callable[[], nn.Module]] = {
    "waves": Waves,
    "attention": Attends,
    "memory": Remembers,
    "noise": Draws,
    "layers": lambda: after(nn.Linear(WIDTH, WIDTH)),
    # Their buffers and functions have no kernel for 16-bit parameters, or one that gives NaN.
    "spectral norm": lambda: after(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "hooked spectral norm": lambda: after(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "orthogonal": lambda: after(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))),
    "bilinear": Pairs,
    "batch norm of the batch": lambda: after(nn.BatchNorm1d(WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), after(nn.BatchNorm1d(WIDTH))),
    "layer norm of the batch": lambda: after(nn.LayerNorm(WIDTH)),
    "other norms": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)),
        nn.GroupNorm(2, 4),
        nn.Conv1d(4, 4, 3, padding=1),
        after(nn.InstanceNorm1d(4, affine=True)),
    ),
}


class Fits(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses, self.dtypes = NETS[kind](), list[float](), set[torch.dtype]()

    def _loss(self, batch: Any) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.dtypes |= {batch[0].dtype, loss.dtype, (batch[0] @ batch[0].T).dtype}
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def fitted(kind: str, strategy: Any, folder: Path, **options: Any) -> Fits:
    model, generator = Fits(kind), torch.Generator().manual_seed(3)
    x = torch.randn(128, WIDTH, generator=generator)
    # Numbers such as 100.3 lose their digits in 16 bits.
    moved = x + 100.0 if kind.endswith("of the batch") else x
    data = DataLoader(TensorDataset(moved, x[:, :OUT].argmax(1)), 16)
    options |= {"max_epochs": 2, "enable_checkpointing": False}
    lightnings.trainer_of(strategy, 1, folder, **options).fit(model, data, data)
    return model


def errors(model: Fits, exact: Fits) -> tuple[float, float]:
    """Return the largest error of losses, and that of all values."""
    pairs = zip(model.losses, exact.losses, strict=True)
    values, others = model.net.state_dict(), exact.net.state_dict()
    gap = sum(float((values[k].float() - others[k].float()).square().sum()) for k in others)
    return max(abs(a - b) for a, b in pairs), gap**0.5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_mixed_is_as_near_to_float32_as_plain_lightning(stage: int, tmp_path: Path) -> None:
    """The batch was cast to 16 bits, and forward was under no autocast."""
    for kind in NETS:
        exact = fitted(kind, "auto", tmp_path)
        plain = fitted(kind, "auto", tmp_path, precision="bf16-mixed")
        ours = fitted(kind, f"zfun_stage_{stage}", tmp_path, precision="bf16-mixed")
        assert ours.dtypes == plain.dtypes == {torch.float32, torch.bfloat16}
        for found, allowed in zip(errors(ours, exact), errors(plain, exact), strict=True):
            assert found < 3 * allowed + 2e-3, kind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
def test_float16_mixed_computes_in_the_dtypes_of_plain_lightning(tmp_path: Path) -> None:
    plain = fitted("noise", "auto", tmp_path, plugins=[MixedPrecision("16-mixed", "cpu")])
    ours = fitted("noise", ZfunStrategy(stage=2), tmp_path, plugins=[ZfunPrecision("16-mixed")])
    assert ours.dtypes == plain.dtypes == {torch.float32, torch.float16}
    assert ours.losses == pytest.approx(plain.losses, abs=2e-3)


class ByHand(L.LightningModule):
    """Manual optimization of one weight."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.automatic_optimization, self.weight = False, nn.Parameter(torch.full((4,), first))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


class Sums(ByHand):
    """Sums 64 small gradients beside a large one."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward((self.weight * batch).sum())
        if batch_idx == 64:
            optimizer.step()
            optimizer.zero_grad()


class Reptile(ByHand):
    """Assigns gradients of the dtype of the parameters."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.weight.grad = 0.5 * self.weight.data
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("kind", "first"), [(Sums, 0.0), (Reptile, 1.0)])
def test_manual_optimization_is_that_of_plain_lightning(
    kind: type[ByHand], first: float, stage: int, precision: str, tmp_path: Path
) -> None:
    """In float32 under autocast; in 16-bit parameters small gradients are lost."""
    rows = torch.full((65, 4), 2.0**-9)
    rows[0] = 1.0
    found = []
    for strategy in ("auto", f"zfun_stage_{stage}"):
        model = kind(first)
        options = {"precision": precision, "enable_checkpointing": False, "max_epochs": 1}
        steps = len(rows) if kind is Sums else 4
        trainer = lightnings.trainer_of(strategy, 1, tmp_path, **options, limit_train_batches=steps)
        trainer.fit(model, DataLoader(rows))  # type: ignore[arg-type]
        found.append(model.weight.detach().float())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6 if kind is Sums else 1e-2, atol=0)


class Teaches(L.LightningModule):
    """A student beside averages that change by less than bf16 holds, and a frozen base."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.student = nn.Linear(WIDTH, OUT)
        self.inner = copy.deepcopy(self.student).requires_grad_(False)
        self.outer: Any = ()

    def on_fit_start(self) -> None:
        self.outer = (copy.deepcopy(self.student).requires_grad_(False),)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.base(batch[0])
        with torch.no_grad():
            target = self.inner(features)
        return F.cross_entropy(self.student(features), batch[1]) + (target * 0.0).sum()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for average in (self.inner, *self.outer):
                pairs = zip(average.parameters(), self.student.parameters(), strict=True)
                for mean, x in pairs:
                    mean.mul_(0.999).add_(x, alpha=0.001)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [2, 3])
def test_averages_and_frozen_parameters_keep_their_digits(stage: int, tmp_path: Path) -> None:
    """They stood still, or moved by what bf16 rounds, beside 16-bit parameters."""
    found = []
    for strategy in ("auto", f"zfun_stage_{stage}"):
        model = Teaches()
        before = {name: x.clone() for name, x in model.state_dict().items()}
        x = torch.randn(320, WIDTH, generator=torch.Generator().manual_seed(3))
        data = DataLoader(TensorDataset(x, x[:, :OUT].argmax(1)), 16)
        options = {"precision": "bf16-mixed", "enable_checkpointing": False, "max_epochs": 2}
        lightnings.trainer_of(strategy, 1, tmp_path, **options).fit(model, data)
        after = model.state_dict()
        for name, x in model.outer[0].state_dict().items():
            after[f"outer.{name}"], before[f"outer.{name}"] = x, before[f"student.{name}"]
        found.append({name: after[name] - x for name, x in before.items()})
    plain, ours = found
    for name, change in plain.items():
        assert ours[name].dtype is torch.float32
        assert (ours[name] - change).norm() <= 0.02 * change.norm(), name
        assert bool(change.any()) is not name.startswith("base")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
def test_the_account_of_a_mixed_precision_says_autocast(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    for more, dtype in (({}, None), ({"communication_data_type": "bf16"}, torch.bfloat16)):
        options = {"precision": "bf16-mixed", "max_epochs": 1, "enable_checkpointing": False}
        strategy = ZfunStrategy(config=config | more)
        trainer = lightnings.trainer_of(strategy, 1, tmp_path, **options)
        trainer.fit(Fits("layers"), DataLoader(TensorDataset(torch.ones(4, WIDTH), ZEROS), 2))
        recipe: Any = strategy.recipe
        assert recipe.precision == zf.Precision(reduce=dtype)
        [entry] = [x for x in recipe.entries if x.path == "bf16.enabled"]
        assert entry.becomes == "torch.autocast around the steps"


def test_a_copy_of_a_narrow_norm_has_values_of_its_own() -> None:
    """Made by its attributes, as some libraries do."""
    norm = nn.BatchNorm1d(3)
    zero = {"stage": 2, "precision": NARROW}
    engine = Engine(nn.Sequential(norm), zf.optim.sgd(0.1), zero=zero, group=zf.process_group())
    other = copy.copy(norm)
    other.__dict__["_parameters"] = {"weight": torch.zeros(3), "bias": torch.full((3,), 5.0)}
    with torch.no_grad():
        assert other.float()(torch.ones(4, 3)).tolist() == [[5.0] * 3] * 4
    engine.close()
