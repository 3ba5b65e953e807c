"""Lightning's own strategies for DeepSpeed, against its strategy for DDP; ranks are on the CPU."""

import json
import logging
import os
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
for logger in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(logger).setLevel(logging.ERROR)
folder = Path(sys.argv[1])


class Host(CUDAAccelerator):
    """The CPU, where the strategy asks for an accelerator of CUDA."""

    def setup_device(self, device):
        """Do nothing."""

    def setup(self, trainer):
        """Do nothing."""

    def teardown(self):
        """Do nothing."""

    @staticmethod
    def parse_devices(devices):
        """Return the number of devices."""
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        """Return one device for each rank of this host."""
        return [torch.device("cpu", i) for i in range(devices)]

    @staticmethod
    def is_available():
        """Return that the CPU is there."""
        return True


class Model(LightningModule):
    """Two layers, the first of which is recomputed in backward."""

    def __init__(self, optimizer, late=False):
        super().__init__()
        self.make, self.late, self.losses = optimizer, late, []
        if not late:
            self.configure_model()

    def configure_model(self):
        """Make the layers, in pieces at stage 3 where the strategy calls."""
        if not hasattr(self, "first"):
            torch.manual_seed(0)
            self.first = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
            self.second = nn.Linear(32, 2)

    def forward(self, x):
        """Return two numbers for each sample."""
        return self.second(deepspeed.checkpointing.checkpoint(self.first, x))

    def loss(self, batch):
        """Return the loss of a batch, with its mean over the ranks."""
        loss = nn.functional.cross_entropy(self.forward(batch[0]), batch[1])
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss, total.item() / dist.get_world_size()

    def training_step(self, batch, index):
        """Keep the loss."""
        loss, mean = self.loss(batch)
        self.losses.append(mean)
        return loss

    def test_step(self, batch, index):
        """Log the loss."""
        self.log("loss", self.loss(batch)[1])

    def predict_step(self, batch, index):
        """Return the outputs."""
        return self.forward(batch[0])

    def configure_optimizers(self):
        """Return the optimizer of the case."""
        return self.make(self.parameters(), lr=1e-2)


def data():
    """Return the loader of 16 batches of two samples."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)


def parts(strategy, optimizer, late=False, **options):
    """Return a trainer and a model."""
    trainer = Trainer(
        accelerator="cpu" if strategy == "ddp" else Host(),
        devices=2,
        strategy=strategy,
        max_epochs=options.pop("max_epochs", 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    return trainer, Model(optimizer, late)


def fit(strategy, optimizer=FusedAdam, **options):
    """Train; return the losses, the loss of the test, and the predictions."""
    trainer, model = parts(strategy, optimizer, **options)
    trainer.fit(model, data())
    (tested,) = trainer.test(model, data(), verbose=False)
    return model.losses, tested["loss"], trainer.predict(model, data())


def check(found, expected, first, name):
    """Compare with the plain run, and bit by bit with the first one."""
    for one, other, tolerance in ((found, expected, 1e-5), (found, first or found, 0.0)):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=name)
    return first or found


def adam(params, lr):
    """Return the optimizer of torch that ``FusedAdam`` is by default."""
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.0)


plain, first = fit("ddp", adam), None
for stage in ("1", "2", "2_offload", "3", "3_offload"):
    optimizer = DeepSpeedCPUAdam if "offload" in stage else FusedAdam
    first = check(fit(f"deepspeed_stage_{stage}", optimizer), plain, first, stage)
both = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
disk = dict.fromkeys(("remote_device", "offload_params_device"), "nvme")
disk |= {"offload_optimizer_device": "nvme", "nvme_path": str(folder)}
for late, options in (
    (False, {"offload_optimizer": True, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8}),
    (False, both),
    (False, {**both, **disk}),
    (True, {"stage": 2}),
    (True, {"stage": 3, "offload_optimizer": True, "cpu_checkpointing": True}),
):
    strategy = DeepSpeedStrategy(**options)
    check(fit(strategy, DeepSpeedCPUAdam, late=late), plain, first, f"{late} {options}")

# A configuration as a dict, as a file, and as a file that the environment names.
file = folder / f"{os.environ['RANK']}.json"
given = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 3}}
file.write_text(json.dumps(given), encoding="utf-8")
check(fit(DeepSpeedStrategy(config=str(file))), plain, first, "file")
with mock.patch.dict(os.environ, PL_DEEPSPEED_CONFIG_PATH=str(file)):
    check(fit("deepspeed"), plain, first, "environment")
params = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
rise = {"last_batch_iteration": -1, "warmup_min_lr": 0, "warmup_max_lr": 1e-2}
config = {
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "AdamW", "params": params},
    "scheduler": {"type": "WarmupLR", "params": {**rise, "warmup_num_steps": 2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
found = fit(DeepSpeedStrategy(config=config))[0]
trainer, model = parts("ddp", adam)
rates = [0.0, 0.0, 1e-2, 1e-2]
with mock.patch.object(
    Model,
    "on_train_batch_start",
    lambda self, batch, index: self.optimizers().param_groups[0].update(lr=rates[index]),
):
    trainer.fit(model, data())
torch.testing.assert_close(found, model.losses, rtol=0, atol=1e-5)

options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
clipped, first = fit("ddp", adam, **options), None
for stage in (1, 2, 3):
    first = check(fit(f"deepspeed_stage_{stage}", **options), clipped, first, f"clip {stage}")
first = None
for stage in (1, 2, 3):
    half = fit(f"deepspeed_stage_{stage}", precision="bf16-mixed")[0]
    torch.testing.assert_close(half, plain[0], rtol=0, atol=1e-2)
    first = first or half
    assert half == first, stage

# A second trainer tests, predicts and goes on from the checkpoint of the first.
for stage in (2, 3):
    name, path = f"deepspeed_stage_{stage}", folder / f"{stage}.ckpt"
    trainer, model = parts(name, FusedAdam)
    trainer.fit(model, data())
    trainer.save_checkpoint(path)
    trainer, model = parts(name, FusedAdam)
    (tested,) = trainer.test(model, data(), ckpt_path=path, verbose=False)
    assert tested["loss"] == fit(name)[1]
    trainer, model = parts(name, FusedAdam, max_epochs=2)
    trainer.fit(model, data(), ckpt_path=path)
    trainer, whole = parts(name, FusedAdam, max_epochs=2)
    trainer.fit(whole, data())
    assert model.losses == whole.losses[4:], name
    if dist.get_rank() == 0:
        with redirect_stdout(StringIO()):
            collated = convert_zero_checkpoint_to_fp32_state_dict(path, folder / f"{stage}.pt")
        assert collated["global_step"] == 4
        assert collated["state_dict"].keys() == dict(whole.named_parameters()).keys()
        loaded = Model.load_from_checkpoint(folder / f"{stage}.pt", optimizer=FusedAdam)
        assert torch.equal(loaded.first[0].weight, collated["state_dict"]["first.0.weight"])
    dist.barrier()
