"""The options of a run as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from zfun.collectives import Group
from zfun.compression import Compression
from zfun.errors import OptionError
from zfun.optim import LossScale, Optimizer, deciding_on_host, with_master
from zfun.placement import PlacementRule, Sharded
from zfun.recipes._precision import Precision
from zfun.reductions import BufferRule
from zfun.stores import Offload
from zfun.transforms import ScheduleOptions, offload_optimizer, probe, shard_optimizer


@dataclass(frozen=True)
class ZeroOptions:
    """The options of :func:`zfun.zero`, which go together; the attributes have their names.

    Raises:
        OptionError: options that do not go together.
        NotElementwiseError: an optimizer that mixes elements.
    """

    stage: int
    loss_fn: Callable[[Any, Any], Any]
    optimizer: Optimizer
    group: Group
    precision: Precision
    num_micro_batches: int
    trainable: Callable[[str, Any], bool] | None
    buffers: BufferRule | None
    offload: Offload
    compression: Compression
    schedule: ScheduleOptions
    bucket_bytes: int
    order: Sequence[str] | None
    donate: bool
    max_skipped: int | None
    unused: str
    placement: Sharded | PlacementRule | None

    def __post_init__(self) -> None:
        if self.stage < 3:
            _check_lower_stage(self)
        if self.placement is not None and self.stage == 0:
            raise OptionError(
                "placement says how ranks cut the state, and stage 0 cuts none; got "
                f"placement={self.placement!r} at stage 0; use a stage from 1 on, or leave it out"
            )
        if self.decides_on_device:
            _check_decides_on_device(self)
        probe(self.master_rule)
        if self.stage == 3 and self.master_rule.partial is not None:
            raise OptionError(
                "an optimizer that sums the terms of gradients by itself, as onebit_adam() does, "
                "keeps whole values on every rank, which stage 3 is there to avoid; got stage 3; "
                "use stage 0, 1 or 2"
            )
        # Made now, so that an optimizer that cannot be sharded is refused where it is given.
        _ = self.rule

    def __str__(self) -> str:
        """Say the composition in one line: the stage, the optimizer, and the transforms beside."""
        policy = self.precision
        kept = policy.param or policy.compute or policy.reduce or policy.master
        options = {
            "precision": None if kept is None else str(kept).removeprefix("torch."),
            "num_micro_batches": self.num_micro_batches if self.num_micro_batches > 1 else None,
            "trainable": _named(self.trainable),
            "buffers": _named(self.buffers),
            "offload": _changed(self.offload),
            "compression": _changed(self.compression),
            "schedule": _changed(self.schedule),
            "placement": _named(self.placement),
        }
        words = [f"{name}={text}" for name, text in options.items() if text]
        name = self.optimizer.name or "a pair of functions"
        ranks = "1 rank" if self.group.size == 1 else f"{self.group.size} ranks"
        return ", ".join([str(self.stage), name, *words, ranks])

    @functools.cached_property
    def master_rule(self) -> Optimizer:
        """The optimizer with master weights, where the precision asks for them."""
        dtype = self.precision.master
        return self.optimizer if dtype is None else with_master(self.optimizer, dtype)

    @functools.cached_property
    def placed_rule(self) -> Optimizer:
        """The optimizer in the placement of the stage, before it is offloaded."""
        if self.stage == 0:
            return self.master_rule
        return shard_optimizer(self.master_rule, self.group, bucket_bytes=self.bucket_bytes)

    @functools.cached_property
    def rule(self) -> Optimizer:
        """The optimizer of the step."""
        store = self.offload.optimizer
        if store is None:
            return self.placed_rule
        return offload_optimizer(self.placed_rule, store, fraction=self.offload.fraction)

    @property
    def scaler(self) -> LossScale | None:
        """The rule of the loss scale."""
        scale = self.precision.loss_scale
        return scale if isinstance(scale, LossScale) else None

    @property
    def decides_on_device(self) -> bool:
        """Whether the device decides which steps are taken, and the host does not wait."""
        return self.max_skipped is None

    @property
    def leaves_out(self) -> bool:
        """Whether leaves that no rank used take no step."""
        return self.unused == "skip"

    def in_words(self) -> dict[str, object]:
        """Describe what all ranks must share, by name."""
        words: dict[str, object] = {
            name: getattr(self, name)
            for name in ("stage", "num_micro_batches", "bucket_bytes", "max_skipped", "unused")
        }
        for name in ("param", "compute", "reduce", "master"):
            words[f"precision.{name}"] = getattr(self.precision, name)
        if self.scaler is not None:
            state = self.scaler.init()
            words |= {f"loss_scale.{name}": x.tolist() for name, x in state._asdict().items()}
        for option in ("compression", "schedule"):
            value = getattr(self, option)
            words |= {f"{option}.{x.name}": getattr(value, x.name) for x in fields(value)}
        return words | self.optimizer.description()


def _check_lower_stage(recipe: ZeroOptions) -> None:
    """Refuse the options of sharded parameters."""
    stage, schedule = recipe.stage, recipe.schedule
    if recipe.offload.params is not None:
        raise OptionError(
            f"Offload.params keeps shards, which only stage 3 has; got stage {stage}; use "
            "stage=3, or leave params out of Offload()"
        )
    if recipe.compression.params is not None:
        raise OptionError(
            f"Compression.params is for stage 3, whose shards stay exact; got stage {stage}; use "
            "stage=3, or leave params out of Compression()"
        )
    if schedule != ScheduleOptions(schedule.prefetch):
        raise OptionError(
            "the options of ScheduleOptions except prefetch are for gathered parameters, which "
            f"only stage 3 has; got {schedule} at stage {stage}; use stage=3, or leave schedule out"
        )


def _check_decides_on_device(recipe: ZeroOptions) -> None:
    """Refuse optimizers and stores that need the host to leave out a step."""
    part = deciding_on_host(recipe.master_rule)
    if part is not None:
        raise OptionError(
            "with max_skipped=None the device decides whether a step is taken, and the kernels of "
            "adam(), adamw(), sgd(), lion() and adagrad() can leave one out, also inside of "
            "by_label() and inject_hyperparams(), and behind clip_by_global_norm() in a chain(); "
            f"got {part.name or 'an optimizer of your own'}; give max_skipped a number"
        )
    if kept := _changed(recipe.offload):
        raise OptionError(
            "with max_skipped=None the device decides whether a step is taken, and the host reads "
            f"and writes stores before; got a store of {kept}; give max_skipped a number, or leave "
            "offload out"
        )


def _changed(options: Any) -> str:
    """Name the fields of a record of options that are not their defaults."""
    return "+".join(x.name for x in fields(options) if getattr(options, x.name) != x.default)


def _named(option: Any) -> str | None:
    return None if option is None else getattr(option, "__name__", repr(option))
