"""The methods of DeepSpeed's engine between steps: compilation, loaders, places and sizes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop.deepspeed._answers import batch_of
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.ds_config import Batch
from zfun.interop.ds_config._optimizers import rates_of
from zfun.interop.engine import Engine


class Phases(nn.Module):
    """An engine whose blocks, state and sizes change between steps."""

    optimizer: torch.optim.Optimizer | None
    collate_fn: Any
    is_compiled: bool
    _settings: Settings
    _core: Engine
    # With batches of their own, and all of them.
    _group: Group
    _ranks: Group

    def _check_trained(self, method: str) -> None:
        if not self._core.has_module:
            raise OptionError(
                f"{method}() trains the model of the engine; got an engine whose model a later "
                "initialize() has taken; use the engine that the later call returned"
            )
        if self.optimizer is None:
            raise OptionError(
                f"{method}() trains a model; got an engine of initialize() without an optimizer; "
                "pass optimizer=, or write a section optimizer into the configuration"
            )

    def compile(  # pyrefly: ignore[bad-override]
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the blocks of the model with ``torch.compile``.

        Raises:
            OptionError: ``schedule`` or ``compiled_autograd_enabled``: DeepCompile is not there.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise OptionError(
                "engine.compile() compiles blocks with torch.compile; got schedule or "
                "compiled_autograd_enabled; leave them out: collectives overlap without"
            )
        if not self.is_compiled:
            self._core.compile(**{**(compile_kwargs or {}), "backend": backend})
            self.is_compiled = True

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return the loader of this rank's share of a dataset.

        Batches of ``route="train"`` have a random order. Sizes and ``collate_fn`` are by default
        those of ``initialize``, a ``data_sampler`` gives the samples of this rank, and no processes
        read.
        """
        batch_size = batch_of(self).micro if batch_size is None else batch_size
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            ranks = {"num_replicas": self._group.size, "rank": self._group.rank}
            data_sampler = DistributedSampler(dataset, shuffle=route == "train", **ranks)
        return DataLoader(
            dataset,
            batch_size,
            sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            drop_last=self._settings.values["dataloader_drop_last"],
            pin_memory=pin_memory and torch.accelerator.is_available(),
            num_workers=num_local_io_workers or 0,
        )

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move parts of the state to host memory, until :meth:`reload_states`.

        A call needs the parameters, and a step needs the optimizer's state too. Of ``include``,
        ``hp_params`` and ``optim_states`` move together; gradients stay where they are.

        Raises:
            OptionError: another device than ``"cpu"`` or ``"none"``, or no optimizer.
        """
        self._check_trained("offload_states")
        if device == "none":
            return
        if device != "cpu":
            raise OptionError(
                f"offload_states() moves to host memory; got device={device!r}; pass 'cpu', or "
                "write offload_optimizer with device 'nvme' into the configuration"
            )
        chosen = lambda *names: include is None or any(name in include for name in names)
        optimizer = chosen("hp_params", "optim_states")
        self._core.offload(params=chosen("lp_params"), optimizer=optimizer, pin=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state back that :meth:`offload_states` has moved."""
        self._core.reload()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in () if self.optimizer is None else self.optimizer.param_groups:
            group |= dict.fromkeys(rates_of(group), lr)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take another number of micro-batches for each step, for a size over all ranks.

        Raises:
            OptionError: no whole number of micro-batches.
        """
        batch = batch_of(self)
        accumulation, rest = divmod(train_batch_size, batch.micro * batch.world_size)
        if rest or accumulation < 1:
            raise OptionError(
                "a step has a whole number of micro-batches on every rank; got train_batch_size "
                f"{train_batch_size} for {batch.world_size} ranks with {batch.micro} samples each; "
                f"pass a multiple of {batch.micro * batch.world_size}"
            )
        self._resize(batch._replace(train=train_batch_size, accumulation=accumulation))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Take another number of samples for each micro-batch of a rank from now on."""
        batch = batch_of(self)
        train = micro_batch_size * batch.accumulation * batch.world_size
        self._resize(batch._replace(train=train, micro=micro_batch_size))

    def _resize(self, batch: Batch) -> None:
        recipe = replace(self._settings.recipe, batch=batch, num_micro_batches=batch.accumulation)
        self._settings = replace(self._settings, recipe=recipe)
        self._core.accumulate = batch.accumulation
        self._core.plain_scale = 1.0 / batch.accumulation
