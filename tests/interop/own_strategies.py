"""Runs of Lightning's own strategies for DeepSpeed, and of DDP beside, on any number of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import deepspeed as of_fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as of_pytorch
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, ROWS, BATCH, ACCUMULATE, CLIP = 6, 32, 2, 2, 0.3
STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
OFFLOADED = ("deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
FABRIC_OFFLOADED = ("deepspeed_stage_1_offload", *OFFLOADED)


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """Let the strategies take CPUs, which have no index: two checks of each are patched."""
    with contextlib.ExitStack() as stack:
        for module, cpu in (
            (of_pytorch, L.pytorch.accelerators.CPUAccelerator),
            (of_fabric, L.fabric.accelerators.CPUAccelerator),
        ):
            stack.enter_context(mock.patch.object(module, "CUDAAccelerator", cpu))
            stack.enter_context(
                mock.patch.object(module, "_validate_device_index_selection", return_value=None)
            )
        yield


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def optimizer_of(net: nn.Module) -> tuple[Any, Any]:
    matrices = [param for param in net.parameters() if param.ndim > 1]
    vectors = [param for param in net.parameters() if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-2)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)


class Model(L.LightningModule):
    """A small model with AdamW in two groups, and a warm-up by step."""

    def __init__(self, is_late: bool = False, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None if is_late else layers()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = layers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[0][:, :1]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer, warm_up = optimizer_of(self.net)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warm_up, "interval": "step"},
        }


class Notes(Callback):
    """Notes learning rates and losses of validations."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.validated: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self.validated.append(float(trainer.callback_metrics["val_loss"]))


def data(rank: int, size: int, count: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(count, WIDTH, generator=generator))
    return DataLoader(rows, BATCH, sampler=DistributedSampler(rows, size, rank, shuffle=False))


@dataclass(frozen=True)
class Runs:
    """The runs of a rank.

    Attributes:
        rank: the rank.
        size: the ranks.
        folder: of checkpoints, which all ranks see.
    """

    rank: int
    size: int
    folder: Path

    def trainer(self, strategy: Any, **options: Any) -> L.Trainer:
        quiet = dict.fromkeys(["enable_progress_bar", "enable_model_summary", "logger"], False)
        defaults = {"num_sanity_val_steps": 0, "use_distributed_sampler": False}
        return L.Trainer(
            accelerator="cpu",
            devices=self.size,
            strategy=strategy,
            default_root_dir=self.folder,
            **{**quiet, **defaults, **options},
        )

    def data(self, count: int = ROWS) -> DataLoader[Any]:
        return data(self.rank, self.size, count)

    def fit(
        self,
        strategy: Any,
        model: Model | None = None,
        *,
        to: str | None = None,
        resume: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Fit a model in three epochs with validation, and return the numbers of the run."""
        model, notes = model or Model(), Notes()
        model.losses = []
        callbacks: list[Callback] = [notes]
        if to is not None:
            path = self.folder / to
            callbacks.append(ModelCheckpoint(dirpath=path, filename="{epoch}", save_top_k=-1))
        else:
            options["enable_checkpointing"] = False
        defaults = {
            "max_epochs": 3,
            "accumulate_grad_batches": ACCUMULATE,
            "gradient_clip_val": CLIP,
        }
        trainer = self.trainer(strategy, callbacks=callbacks, **{**defaults, **options})
        path = None if resume is None else self.folder / resume
        trainer.fit(model, self.data(), self.data(8), ckpt_path=path)
        return {
            "losses": model.losses,
            "rates": notes.rates,
            "validated": notes.validated,
            "steps": trainer.global_step,
        }

    def evaluate(self, strategy: Any, model: Model, path: str | None) -> dict[str, Any]:
        """Validate, test and predict."""
        options: Any = {"ckpt_path": None if path is None else self.folder / path}
        trainer = self.trainer(strategy)
        [validated] = trainer.validate(model, self.data(8), verbose=False, **options)
        [tested] = trainer.test(model, self.data(8), verbose=False, **options)
        predicted: Any = trainer.predict(model, self.data(8), **options)
        return {**validated, **tested, "predicted": torch.cat(predicted)}

    def again(self, strategy: Any) -> dict[str, Any]:
        """Fit, evaluate, fit again and save one module."""
        model = Model()
        first = self.fit(strategy, model)
        found = self.evaluate(strategy, model, None)
        second = self.fit(strategy, model, max_epochs=1)
        values = {name: x.detach().clone() for name, x in model.state_dict().items()}
        return {"first": first, "evaluated": found, "second": second, "values": values}

    def converted(self, strategy: str) -> dict[str, Any]:
        """Save after a fit, twice under one path, and make one file of the directory."""
        path, file = self.folder / f"{strategy}.ckpt", self.folder / f"{strategy}.pt"
        for epochs in (2, 1):
            model = Model(note=Path("any object"))
            trainer = self.trainer(strategy, max_epochs=epochs, enable_checkpointing=False)
            trainer.fit(model, self.data())
            trainer.save_checkpoint(path)
        if self.rank == 0:
            convert_zero_checkpoint_to_fp32_state_dict(path, file)
        trainer.strategy.barrier()
        loaded = Model.load_from_checkpoint(file, weights_only=False)
        return {
            "hyperparameters": dict(loaded.hparams),
            "values": dict(loaded.state_dict()),
            "expected": {name: x.detach().clone() for name, x in model.state_dict().items()},
        }

    def configured(self, stage: int) -> dict[str, Any]:
        """Fit with the optimizer and the scheduler of a configuration."""
        strategy = DeepSpeedStrategy(
            config={
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            }
        )
        return {**self.fit(strategy), "config": strategy.config}

    def summary(self) -> tuple[int, list[int]]:
        """Return the sizes of the summary of a model whose parameters are in pieces."""
        model = Model()
        self.fit("deepspeed_stage_3", model, max_epochs=1)
        found = DeepSpeedSummary(model, max_depth=2)
        return found.total_parameters, found.parameters_per_layer

    def loop(self, strategy: str) -> dict[str, Any]:
        """Train with Fabric, save in the middle, and go on from there in a second engine.

        DeepSpeed clips to a norm of 1 unless its configuration has another one.
        """
        fabric = Fabric(accelerator="cpu", devices=self.size, strategy=strategy)
        fabric.launch()
        batches = [batch for (batch,) in self.data()]
        path = self.folder / f"fabric of {strategy}"

        def begun() -> tuple[Any, Any]:
            with fabric.init_module():
                net = layers()
            return fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))

        def trained(model: Any, optimizer: Any, some: list[Tensor]) -> list[float]:
            losses = []
            for x in some:
                loss = (model(x) - x[:, :1]).square().mean()
                fabric.backward(loss, model=model)
                if strategy == "ddp":
                    fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses

        model, optimizer = begun()
        losses = trained(model, optimizer, batches[:4])
        fabric.save(path, {"model": model, "optimizer": optimizer, "seen": 4})
        losses += trained(model, optimizer, batches[4:])
        model, optimizer = begun()
        state = {"model": model, "optimizer": optimizer, "seen": 0}
        fabric.load(path, state)
        again = trained(model, optimizer, batches[4:])
        return {"losses": losses, "again": again, "seen": state["seen"]}

    def everything(self) -> dict[str, Any]:
        """Return the numbers of all runs."""
        plain = {"ddp": self.fit("ddp", to="ddp")}
        fits = plain | {name: self.fit(name, to=name) for name in STAGES}
        fits |= {name: self.fit(name) for name in OFFLOADED}
        fits["late"] = self.fit("deepspeed_stage_3", Model(is_late=True))
        whole = DeepSpeedStrategy(stage=3, load_full_weights=True)
        return {
            "fits": fits,
            "resumed": {name: self.fit(name, resume=f"{name}/epoch=0.ckpt") for name in STAGES},
            "evaluated": {
                name: self.evaluate(name, Model(), f"{name}/epoch=1.ckpt")
                for name in ("ddp", *STAGES)
            },
            "whole": self.evaluate(whole, Model(), "ddp/epoch=1.ckpt"),
            "again": {name: self.again(name) for name in ("ddp", *STAGES)},
            "converted": {name: self.converted(name) for name in STAGES},
            "configured": {stage: self.configured(stage) for stage in (1, 2, 3)},
            "summary": self.summary(),
            "loops": {name: self.loop(name) for name in ("ddp", *STAGES, *FABRIC_OFFLOADED)},
        }


def save(folder: Path) -> None:
    """Run everything on the rank of this process, and save the numbers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with on_cpus():
        torch.save(Runs(rank, size, folder).everything(), folder / f"{rank}.pt")
