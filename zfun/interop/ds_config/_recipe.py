"""A configuration as a record of options of ``zf.zero``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zfun import tree
from zfun.collectives import Group, split, sum_group
from zfun.compression import Compression
from zfun.errors import OptionError
from zfun.interop.ds_config._batch import Batch
from zfun.interop.ds_config._explain import Entry, html_of, text_of
from zfun.interop.ds_config._mistakes import error_of
from zfun.interop.ds_config._optimizers import Rule, of_group, schedule_for
from zfun.interop.ds_config._parts import StoreChoice, clipped, parts_of
from zfun.interop.ds_config._read import AutoValues, read
from zfun.interop.ds_config._rules import contradictions
from zfun.interop.ds_config._values import Checked
from zfun.optim import Optimizer, Schedule
from zfun.options import FUNCTION, PATH, each, instance, one_of, takes
from zfun.parallel import model_axes
from zfun.recipes import Precision, Zero, zero
from zfun.stores import Offload
from zfun.transforms import ScheduleOptions


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options of ``zf.zero`` that a configuration of DeepSpeed makes.

    Attributes:
        stage: 0, 1, 2 or 3.
        optimizer: the optimizer after clipping; ``None`` if the configuration has none.
        learning_rate: a number or a schedule; ``None`` if not known.
        max_grad_norm: the bound of the gradient's norm; 0 for none.
        precision: the dtypes.
        num_micro_batches: micro-batches of a step of a rank.
        batch: the sizes of a batch; ``None`` if the number of ranks or a size is not known.
        schedule: when stage 3 gathers; ``None`` at other stages.
        compression: codecs.
        params_store: where parameters are kept; ``None`` for the device.
        optimizer_store: where the optimizer's state and gradients are kept; ``None`` for the
            device.
        bucket_bytes: the size of a bucket.
        rows: how many ranks make a row of the mesh; ``None`` without a mesh.
        secondary: whether state is sharded over the whole mesh (hpZ), and not over a row (MiCS).
        remat: options of :func:`zfun.remat` for the blocks of the loss, as choices of stores.
        autocast: the dtype of ``torch.autocast`` around the loss; ``None`` without.
        rule: the optimizer as data, for adapters with parameter groups; ``None`` if there is none.
        scheduler: the schedule as data; ``None`` if there is none.
        momentum: the momentum of a cycle, by steps taken; ``None`` if none changes.
        tensor: how many ranks share matrices.
        sequence: how many ranks share the sequences of a batch.
        late: the fields of :class:`AutoValues` that some ``"auto"`` waits for.
        entries: what became of each key, and why.

    Example:
        >>> recipe = from_ds_config({"zero_optimization": {"stage": 3}})
        >>> recipe.stage, recipe.schedule.max_live, recipe.bucket_bytes
        (3, 1000000000, 1073741824)
    """

    stage: int
    optimizer: Optimizer | None
    learning_rate: float | Schedule | None
    max_grad_norm: float
    precision: Precision
    num_micro_batches: int
    batch: Batch | None
    schedule: ScheduleOptions | None
    compression: Compression
    params_store: StoreChoice | None
    optimizer_store: StoreChoice | None
    bucket_bytes: int
    rows: int | None
    secondary: bool
    remat: Mapping[str, StoreChoice]
    autocast: torch.dtype | None
    rule: Rule | None
    scheduler: Rule | None
    momentum: Schedule | None
    tensor: int
    sequence: int
    late: tuple[str, ...]
    entries: tuple[Entry, ...] = field(repr=False)

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each key that is ignored, and for each default that matters."""
        return tuple(
            f"{one.path}: {one.why or one.becomes}"
            for one in self.entries
            if one.verdict in ("ignored", "default")
        )

    def rate_of(self, lr: float) -> float | Schedule:
        """Return the learning rate of a parameter group: a number, or a schedule.

        Args:
            lr: the learning rate that the group has without a schedule.

        Example:
            >>> params = {"warmup_num_steps": 2, "warmup_type": "linear"}
            >>> recipe = from_ds_config(
            ...     {"scheduler": {"type": "WarmupLR", "params": params}},
            ...     auto=AutoValues(learning_rate=1.0),
            ... )
            >>> [recipe.rate_of(0.5)(step) for step in range(4)]
            [0.0, 0.0, 0.25, 0.5]
        """
        return lr if self.scheduler is None else schedule_for(self.scheduler, lr=lr)

    def offload(self) -> Offload:
        """Make the stores, on the machine that trains."""
        kept = None if self.optimizer_store is None else self.optimizer_store.make()
        params = None if self.params_store is None else self.params_store.make()
        return Offload(params=params, grads=kept, optimizer=kept)

    def zero(
        self, loss_fn: Callable[..., Any], group: Group, *, optimizer: Any = None, **options: Any
    ) -> Zero[Any, Any]:
        """Compose the stage of the configuration.

        Args:
            loss_fn: as in :func:`zfun.zero`.
            group: the ranks, without axes if the configuration makes a mesh; with
                ``sequence_parallel_size`` those of the data and the sequence axis.
            optimizer: for a configuration without one; clipping is put in front.
            options: more options of :func:`zfun.zero`, such as ``trainable`` and ``order``; an
                option of the recipe may be replaced.

        Returns:
            The functions ``init``, ``step`` and ``params``.

        Raises:
            OptionError: there is no optimizer, the group has another number of ranks, or the loss
                no tensor axis of ``autotp_size``.

        Example:
            >>> import torch
            >>> import zfun as zf
            >>> config = {
            ...     "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
            ...     "gradient_clipping": 0,
            ...     "zero_optimization": {"stage": 2},
            ... }
            >>> recipe = from_ds_config(config)
            >>> def main(group):
            ...     z = recipe.zero(lambda params, x: ((params["w"] - x) ** 2).sum(), group)
            ...     state, _ = z.step(z.init({"w": torch.zeros(2)}), torch.tensor([1.0, 2.0]))
            ...     return z.params(state)["w"]
            >>> zf.simulate(2, main)[0]
            tensor([0.5000, 1.0000])
        """
        if optimizer is None and self.scheduler is not None:
            of_group(self.scheduler, 0, 1)  # refuses lists, because a recipe has one group
        rule = self.optimizer if optimizer is None else clipped(optimizer, self.max_grad_norm)
        if rule is None and self.late:
            raise OptionError(
                "the optimizer of a recipe needs every value of the run; got a configuration that "
                f"waits for {' and '.join(self.late)}; read the configuration again with these"
            )
        if rule is None:
            raise OptionError(
                "a recipe needs an optimizer; got a configuration without one; pass optimizer=, "
                "such as zf.optim.adamw(3e-4)"
            )
        axes = model_axes(loss_fn)
        # Ranks of an expert axis have batches of their own, and the group does not know them.
        batched = math.prod(axis.group.size for axis in axes if axis.has_batches)
        size, rest = divmod(sum_group(group).size * batched, self.sequence)
        if rest or (self.batch is not None and self.batch.world_size != size):
            ranks = "any number of" if self.batch is None else str(self.batch.world_size)
            each = f", each a group of {self.sequence} along the sequence" * (self.sequence > 1)
            experts = f", times {batched} along an expert axis" * (batched > 1)
            raise OptionError(
                f"the batch sizes of the configuration are for {ranks} ranks{each}; got a group of "
                f"{sum_group(group).size}{experts}; pass world_size={size} to from_ds_config(), "
                "and the group of all data axes, mesh['dp', 'sp'] where sequences are cut"
            )
        sizes = [axis.group.size for axis in axes]
        if self.tensor > 1 and self.tensor not in sizes:
            raise OptionError(
                f"the configuration has tensor_parallel.autotp_size {self.tensor}; got a loss over "
                f"model axes of {sizes or 'no'} ranks; pass zf.tensor_parallel(loss, mesh['tp'], "
                "zf.interop.transformers.tp_plan(model)), and mesh['dp'] as the group"
            )
        own = options_of(self, group, has_stores="offload" not in options)
        own["num_micro_batches"] = self.num_micro_batches
        if self.autocast is not None:
            loss_fn = _autocasting(loss_fn, self.autocast)
        stage, group = own.pop("stage"), own.pop("group")
        return zero(stage, loss_fn, rule, group, **{**own, **options})

    def __str__(self) -> str:
        return text_of(self.entries)

    def _repr_html_(self) -> str:
        return html_of(self.entries)


def options_of(recipe: Recipe, group: Group, *, has_stores: bool = True) -> dict[str, Any]:
    """Return the options of ``zf.zero`` beside loss and optimizer, over the mesh of the recipe."""
    if recipe.rows is not None:
        mesh = split(group, recipe.rows)
        group = mesh if recipe.secondary else mesh.inner
    names = ("stage", "precision", "compression", "schedule", "bucket_bytes")
    own: dict[str, Any] = {"group": group, **{name: getattr(recipe, name) for name in names}}
    return {**own, "offload": recipe.offload()} if has_stores else own


CONFIG = instance(Mapping, "a dict", '{"zero_optimization": {"stage": 3}}') | PATH
_EXAMPLE = "zf.interop.AutoValues(hidden_size=768)"
AUTO = instance(AutoValues, "a zf.interop.AutoValues", _EXAMPLE) | None


@takes(
    config=CONFIG,
    auto=AUTO,
    optimizer=FUNCTION | None,
    late=each(one_of("num_steps", "num_warmup"), "names of values of a run", "('num_steps',)"),
)
def from_ds_config(
    config: Mapping[str, Any] | str | Path,
    *,
    auto: AutoValues | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    late: Sequence[str] = (),
) -> Recipe:
    """Read a configuration of DeepSpeed.

    Every key is mapped to an option, ignored with a reason, or refused with a remedy; the page
    "DeepSpeed configurations" has the table.

    Args:
        config: the keys, the path of a JSON file, which may have comments, or its text in base64.
        auto: the values of the run, which fill ``"auto"`` and keys that are left out.
        optimizer: a function from the learning rate, a number or a schedule, to an optimizer, such
            as ``zf.optim.adamw``. The function wins over the optimizer of the configuration, whose
            numbers may differ from those of the run.
        late: the fields of ``auto`` that are known later, ``"num_steps"`` or ``"num_warmup"``. A
            schedule that waits for one is left out; read the configuration again for the schedule.

    Returns:
        The options; ``recipe.zero(loss_fn, group)`` composes the stage.

    Raises:
        ConfigError: the configuration has mistakes; the message lists all of them.
        OptionError: the file cannot be read.

    Example:
        >>> config = {
        ...     "train_micro_batch_size_per_gpu": 4,
        ...     "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        ... }
        >>> from_ds_config(config, auto=AutoValues(hidden_size=64)).bucket_bytes
        16384
        >>> from_ds_config({"zero_optimization": {"stge": 2, "reduce_bucket_size": "many"}})
        Traceback (most recent call last):
        ...
        zfun.errors.ConfigError: the configuration has 2 mistakes:
        - zero_optimization.stge: is no key; got 2; did you mean 'stage'?
        - zero_optimization.reduce_bucket_size: must be an integer of at least 0; got 'many'; ...
    """
    keys, name = read(config)
    auto = AutoValues() if auto is None else auto
    found = Checked(keys, auto, late=late, has_optimizer=optimizer is not None)
    mistakes = [*found.mistakes, *contradictions(found)]
    found.values.bad.update(one.path for one in mistakes)
    fields = parts_of(found, auto, optimizer, mistakes)
    if mistakes:
        spelled = [one._replace(path=found.written.get(one.path, one.path)) for one in mistakes]
        raise error_of(spelled, name)
    return Recipe(**fields)


def _autocasting(loss_fn: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    @functools.wraps(loss_fn)
    def loss(params: Any, *args: Any) -> Any:
        device = tree.flatten(params)[0][0].device
        with torch.autocast(device.type, dtype):
            return loss_fn(params, *args)

    return loss
