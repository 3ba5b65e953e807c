"""Fit a GPT-2 of Hugging Face with Lightning, then collate the checkpoint into one file.

    python examples/lightning_fit.py                                  # one process
    python examples/lightning_fit.py --devices 2                      # Lightning starts a second
    python examples/lightning_fit.py --strategy zfun_stage_3_offload  # parameters on the host

The data are bytes of the Python standard library. A script for Lightning changes by one import and
the name of the strategy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from text import stdlib_bytes
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from zfun.interop.lightning import collate  # also registers the strategies

LENGTH, BATCH_SIZE = 32, 4  # tokens of a line, lines of a micro-batch of a rank
SIZES: Any = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
OPTIONS: Any = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
DROPOUT: Any = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)


class Model(L.LightningModule):
    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.net = GPT2LMHeadModel(GPT2Config(**SIZES, **OPTIONS, **DROPOUT))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=0.01)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warm_up, "interval": "step"},
        }


def make_data(num_lines: int, start: int = 0) -> DataLoader[Any]:
    stop = (start + num_lines) * LENGTH
    lines = stdlib_bytes(limit=stop)[start * LENGTH : stop].long().view(num_lines, LENGTH)
    return DataLoader(TensorDataset(lines), batch_size=BATCH_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a GPT-2 with Lightning.")
    parser.add_argument("--strategy", default="zfun_stage_3")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--lines", type=int, default=64)
    parser.add_argument("--out", default=None, help="folder of the checkpoint")
    args = parser.parse_args()
    L.seed_everything(0)
    out = Path(args.out or tempfile.mkdtemp())
    checkpoint = ModelCheckpoint(dirpath=out, filename="last", monitor=None)
    trainer = L.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), make_data(args.lines), make_data(16, args.lines))
    if trainer.is_global_zero:
        print(f"val_loss {float(trainer.callback_metrics['val_loss']):.4f}")
        file = collate(checkpoint.best_model_path, out / "model.ckpt")
        model = Model.load_from_checkpoint(file)  # plain Lightning
        print(f"{sum(p.numel() for p in model.parameters())} parameters in {file.name}")


if __name__ == "__main__":
    main()
