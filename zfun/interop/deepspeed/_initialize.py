"""``initialize`` and ``add_config_arguments``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zfun.errors import OptionError
from zfun.interop.deepspeed import comm
from zfun.interop.deepspeed._core import freed
from zfun.interop.deepspeed._engine import DeepSpeedEngine
from zfun.interop.deepspeed._pipeline import PipelineEngine
from zfun.interop.deepspeed._ranks import data_ranks, group_of, init_from_launcher, local_device
from zfun.interop.deepspeed._settings import config_of, settings_of
from zfun.interop.deepspeed.pipe import PipelineModule
from zfun.interop.deepspeed.runtime import RepeatingLoader
from zfun.interop.deepspeed.runtime.zero._owners import taken
from zfun.interop.ds_config import AutoValues
from zfun.interop.ds_config._recipe import AUTO, CONFIG
from zfun.options import ANY, instance, takes


@takes(
    **dict.fromkeys(("model_parameters", "distributed_port", "dist_init_required"), ANY),
    model=instance(nn.Module, "an nn.Module", "torch.nn.Linear(2, 1)") | None,
    config=CONFIG | None,
    config_params=CONFIG | None,
    auto=AUTO,
)
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    auto: AutoValues | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Make an engine of a model, an optimizer and a configuration of DeepSpeed. All ranks call.

    The arguments are DeepSpeed's. A ``PipelineModule`` gives a ``PipelineEngine``. Parameters have
    the values of rank 0; those of a stage have the values of its first data rank. An engine that
    has the model already gives it up, and its moments are dropped. Without an optimizer the engine
    answers, and does not train. ``distributed_port`` is not used, and ``mesh_param`` is only
    ``None``; ``auto`` has values for ``"auto"`` in the configuration that the model and the
    optimizer do not tell.

    Returns:
        The engine, the optimizer, the loader of ``training_data``, and the scheduler; ``None`` in
        place of those that are not there.

    Raises:
        ConfigError: the configuration has mistakes; the message lists all of them.
        OptionError: an argument that is missing, or that zfun does not have.

    Example:
        >>> import torch
        >>> config = {
        ...     "train_micro_batch_size_per_gpu": 2,
        ...     "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        ...     "zero_optimization": {"stage": 2},
        ... }
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> engine, optimizer, _, _ = initialize(model=model, config=config)
        >>> loss = (engine(torch.eye(2)) - 1).square().sum()
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps, engine.module.weight.shape
        (1, torch.Size([1, 2]))
    """
    if model is None:
        raise OptionError("initialize() takes a model; got none; pass model=, an nn.Module")
    if mesh_param is not None:
        raise OptionError(
            f"initialize() has no tensor or sequence parallel ranks; got mesh_param={mesh_param!r}"
            "; leave the argument out, or train with zf.tensor_parallel or "
            "zf.interop.transformers.sequence_parallel over a zf.mesh"
        )
    chosen = config_of(args, config, config_params)
    device = local_device()
    given: dict[str, Any] = {
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "lr_scheduler": lr_scheduler,
        "auto": auto or AutoValues(),
    }
    places: dict[str, Any] = {"device": device, "collate_fn": collate_fn}
    engine: DeepSpeedEngine
    if isinstance(model, PipelineModule):
        if mpu is not None:
            raise OptionError(
                "a PipelineModule has the axes of its ranks; got mpu= beside it; pass topology= "
                "to PipelineModule()"
            )
        model.check_own()
        settings = settings_of(model, chosen, model.mpu().data_parallel_size, **given)
        engine = PipelineEngine(model.to(device), settings, **places)
        if training_data is not None:
            loader = engine.deepspeed_io(training_data, route="eval")  # a pipeline keeps the order
            engine.set_dataloader(RepeatingLoader(loader))
        return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
    ranks = None if mpu is None else data_ranks(mpu)
    if ranks is None and dist_init_required is not False:
        init_from_launcher()
    group = group_of(ranks)
    with taken(model), freed(model) as values:
        settings = settings_of(model, chosen, group.size, **given)
        engine = DeepSpeedEngine(model.to(device), settings, group, values=values, **places)
    engine.data_parallel_group = comm.get_world_group() if ranks is None else ranks
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to the command line of a script; return it.

    Example:
        >>> parser = add_config_arguments(argparse.ArgumentParser())
        >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"]).deepspeed_config
        'ds.json'
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="use the engine")
    group.add_argument("--deepspeed_config", help="path of a configuration of DeepSpeed")
    return parser
