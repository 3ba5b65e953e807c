"""LightningModules and trainers for tests of ``zfun.interop.lightning``, and plain torch beside."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zfun as zf
import zfun.interop.lightning
from zfun.collectives import Group

LENGTH, BATCH, ACCUMULATE, STEPS, WARM_UP, CLIP = 12, 2, 2, 20, 6, 0.6
VOCAB = 41


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0, use_cache=False)
    )


def lines(num_ranks: int, num_steps: int = STEPS) -> Tensor:
    """The tokens of all steps, in the order in which ranks take them."""
    generator = torch.Generator().manual_seed(1)
    shape = (num_ranks * BATCH * ACCUMULATE * num_steps, LENGTH)
    return torch.randint(VOCAB, shape, generator=generator)


class Gpt2(L.LightningModule):
    """A GPT-2 with AdamW in two param groups and a warm-up."""

    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.net = gpt2()
        self.losses: list[float] = []
        self.count = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        self.count += 1
        return {"loss": loss, "index": batch_idx}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.net(input_ids=batch[0], labels=batch[0]).loss, sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(input_ids=batch[0]).logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer, warm_up = optimizer_of(self.net, self.learning_rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warm_up, "interval": "step"},
        }


def optimizer_of(net: nn.Module, learning_rate: float) -> Any:
    matrices = [param for param in net.parameters() if param.ndim > 1]
    vectors = [param for param in net.parameters() if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, learning_rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARM_UP)
    return optimizer, warm_up


class Steps(Callback):
    """Notes learning rates and norms of gradients."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if len(self.rates) > len(self.norms):
            self.norms.append(float(trainer.strategy.last_step.grad_norm))


def trainer_of(strategy: Any, size: int, folder: str | Path, **options: Any) -> L.Trainer:
    quiet = dict.fromkeys(["enable_progress_bar", "enable_model_summary"], False)
    defaults = {"max_epochs": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    return L.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        default_root_dir=folder,
        **{"logger": False, **defaults, **quiet, **options},
    )


def as_rank(group: Group) -> None:
    """Let Lightning take this process for a rank that was started already."""
    os.environ["LOCAL_RANK"] = str(group.rank)
    os.environ["NODE_RANK"] = "0"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def fit(
    group: Group,
    strategy: Any,
    folder: str,
    num_steps: int = STEPS,
    resume: str | None = None,
    stop: int = 0,
    precision: str = "32-true",
) -> dict[str, Any]:
    """Fit a GPT-2 in two epochs of half of the steps; return what a run can be compared by."""
    as_rank(group)
    data = loader(TensorDataset(lines(group.size, num_steps // 2)), group, BATCH)
    steps, model = Steps(), Gpt2()
    checkpoints = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = trainer_of(
        strategy,
        group.size,
        folder,
        max_epochs=stop or 2,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=[steps, checkpoints],
        precision=precision,
    )
    trainer.fit(model, data, ckpt_path=resume)
    return {
        "losses": model.losses,
        "rates": steps.rates,
        "norms": steps.norms,
        "count": model.count,
        "params": {name: x.detach().clone() for name, x in model.state_dict().items()},
    }


def averaged(group: Group, strategy: str, folder: str) -> dict[str, Tensor]:
    """Save in a fit with an average, and return the parameters that the checkpoint keeps beside."""
    as_rank(group)

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(f"{folder}/average.ckpt")

    data = loader(TensorDataset(lines(group.size, 2)), group, BATCH)
    callbacks = [EMAWeightAveraging(decay=0.5), Saves()]
    options = {"callbacks": callbacks, "enable_checkpointing": False}
    trainer_of(strategy, group.size, folder, **options).fit(Gpt2(), data)
    saved = torch.load(f"{folder}/average.ckpt", weights_only=False)
    return dict(saved["current_model_state"])


def in_torch(size: int, num_steps: int = STEPS) -> dict[str, Any]:
    """The same in plain torch, on the joined batches."""
    net = gpt2()
    optimizer, warm_up = optimizer_of(net, 3e-3)
    found: dict[str, Any] = {"losses": [], "rates": [], "norms": []}
    data = lines(size, num_steps // 2)
    for _ in range(2):
        for micro in data.chunk(num_steps // 2):
            optimizer.zero_grad()
            for tokens in micro.chunk(ACCUMULATE):
                loss = net(input_ids=tokens, labels=tokens).loss
                (loss / ACCUMULATE).backward()
                found["losses"].append(float(loss.detach()))
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            found["rates"].append(optimizer.param_groups[0]["lr"])
            found["norms"].append(float(norm))
            optimizer.step()
            warm_up.step()
    return {**found, "params": {f"net.{name}": x for name, x in net.state_dict().items()}}


class Gan(L.LightningModule):
    """Two optimizers in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, noise = batch
        g_optimizer, d_optimizer = self.optimizers()
        self.toggle_optimizer(d_optimizer)
        fake = self.generator(noise).detach()
        loss = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake))
        d_optimizer.zero_grad()
        self.manual_backward(loss.mean())
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)
        g_loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(g_optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        g_optimizer.step()
        self.losses += [float(x.detach()) for x in (loss.mean(), g_loss)]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), 1e-2, betas=(0.5, 0.999)),
            torch.optim.SGD(self.discriminator.parameters(), 1e-1, momentum=0.9),
        ], []


def loader(data: TensorDataset, group: Group, batch_size: int) -> DataLoader[Any]:
    """The data of a rank, in order."""
    sampler = DistributedSampler(data, group.size, group.rank, shuffle=False)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def gan_data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    shape = (size * 4 * 6,)
    return TensorDataset(
        torch.randn(*shape, 2, generator=generator), torch.randn(*shape, 4, generator=generator)
    )


def fit_gan(group: Group, strategy: Any, folder: str) -> dict[str, Any]:
    as_rank(group)
    model = Gan()
    trainer = trainer_of(strategy, group.size, folder, enable_checkpointing=False)
    trainer.fit(model, loader(gan_data(group.size), group, 4))
    return {"losses": model.losses, "params": dict(model.state_dict())}


def gan_in_torch(size: int) -> dict[str, Any]:
    model, losses = Gan(), []
    (g_optimizer, d_optimizer), _ = model.configure_optimizers()
    for real, noise in DataLoader(gan_data(size), batch_size=4 * size):
        fake = model.generator(noise).detach()
        loss = F.softplus(-model.discriminator(real)) + F.softplus(model.discriminator(fake))
        d_optimizer.zero_grad()
        loss.mean().backward()
        d_optimizer.step()
        g_loss = F.softplus(-model.discriminator(model.generator(noise))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.generator.parameters(), 0.1)
        g_optimizer.step()
        losses += [float(x.detach()) for x in (loss.mean(), g_loss)]
    return {"losses": losses, "params": dict(model.state_dict())}


def evaluated(group: Group, strategy: Any, folder: str, path: str) -> dict[str, Any]:
    """Validate, test and predict with the parameters of a checkpoint."""
    as_rank(group)
    data = loader(TensorDataset(lines(group.size, 2)), group, BATCH)
    trainer = trainer_of(strategy, group.size, folder)
    [validated] = trainer.validate(Gpt2(), data, ckpt_path=path, verbose=False)
    [tested] = trainer.test(Gpt2(), data, ckpt_path=path, verbose=False)
    predicted = trainer.predict(Gpt2(), data, ckpt_path=path)
    return {**validated, **tested, "predicted": predicted}


class Whole(L.LightningModule):
    """A loss that is the mean over the ranks of the losses of their rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)]
        self.net = nn.Sequential(*layers).double()
        self.head: Any = self.net[2]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, 0.1)


class Unfreezes(Whole):
    """Unfreezes a parameter of the optimizer, and adds a group."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.Adam(self.head.parameters(), 0.1)
        self.head.bias.requires_grad_(False)
        return self.optimizer

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 1:
            self.head.bias.requires_grad_(True)
        if self.global_step == 2:
            self.net[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": self.net[0].parameters(), "lr": 0.05})


class Manual(Whole):
    """Gradients that hooks read and clip, in manual optimization with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            params = optimizer.param_groups[0]["params"]
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), 0.5, momentum=0.9)
        return first, torch.optim.Adam(self.head.parameters(), 0.1)


class Hooked(Whole):
    """A module whose hook changes a checkpoint on one rank."""

    change = ""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.change == f"values of rank {self.global_rank}":
            checkpoint["state_dict"] = {k: x / 2 for k, x in checkpoint["state_dict"].items()}
        if self.change == f"moments of rank {self.global_rank}":
            checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
        if self.change == f"states of rank {self.global_rank}":
            checkpoint["optimizer_states"].clear()


def resumed(group: Group, strategy: str, folder: str, change: str) -> Any:
    """Go on with a fit from a checkpoint; return the values, or the words of an error."""
    as_rank(group)
    rows = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3) + group.rank
    data = DataLoader(TensorDataset(rows), batch_size=4)
    model = Hooked()
    trainer = trainer_of(strategy, group.size, folder, enable_checkpointing=False)
    trainer.fit(model, data)
    trainer.save_checkpoint(f"{folder}/{strategy}.ckpt")
    model = Hooked()
    model.change = change
    trainer = trainer_of(strategy, group.size, folder, enable_checkpointing=False, max_epochs=2)
    try:
        trainer.fit(model, data, ckpt_path=f"{folder}/{strategy}.ckpt")
    except zf.ZfunError as error:
        return str(error)
    return {key: x.detach().clone() for key, x in model.state_dict().items()}


class Buffers(Whole):
    """Buffers that are written and assigned, of which those of rank 0 are everybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("assigned", torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.count += 1 + self.global_rank
        self.assigned = self.assigned + 2 + self.global_rank
        return super().training_step(batch, batch_idx) + 0.0 * self.assigned.sum()


def fit_loop(group: Group | None, strategy: str, folder: str, name: str) -> dict[str, Tensor]:
    """Fit one of these modules on rows of which each rank takes a part."""
    size, rank = (1, 0) if group is None else (group.size, group.rank)
    if group is not None:
        as_rank(group)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 4, 3, generator=generator, dtype=torch.float64)
    own = rows.chunk(size, 1)[rank].flatten(0, 1)
    model = {"Unfreezes": Unfreezes, "Manual": Manual, "Buffers": Buffers}[name]()
    trainer = trainer_of(strategy, size, folder, enable_checkpointing=False)
    trainer.fit(model, DataLoader(TensorDataset(own), batch_size=4 // size))
    return {key: x.detach().clone() for key, x in model.state_dict().items()}
