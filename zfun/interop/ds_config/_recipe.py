"""A configuration as a record of options of ``zf.zero``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zfun import optim
from zfun.collectives import Group, mesh_of, split
from zfun.compression import Compression
from zfun.errors import OptionError
from zfun.interop.ds_config._auto import AutoValues
from zfun.interop.ds_config._batch import Batch
from zfun.interop.ds_config._build import (
    Note,
    Notes,
    StoreChoice,
    batch_sizes,
    bucket_bytes_of,
    compression_of,
    precision_of,
    rows_of,
    schedule_options_of,
    store_of,
)
from zfun.interop.ds_config._explain import Entry, entries_of, html_of, text_of
from zfun.interop.ds_config._mistakes import Mistake, collecting, error_of
from zfun.interop.ds_config._optimizers import momentum_of, optimizer_of, schedule_of
from zfun.interop.ds_config._read import read
from zfun.interop.ds_config._rules import contradictions
from zfun.interop.ds_config._values import Unusable, Values, values_of
from zfun.interop.ds_config._walk import Walked, walk
from zfun.interop.ds_config.table._optim import OPTIMIZERS, SCHEDULERS, TORCH_OPTIMIZERS
from zfun.optim import Optimizer, Schedule
from zfun.options import FUNCTION, PATH, instance, takes
from zfun.recipes import Precision, Zero, zero
from zfun.stores import Offload
from zfun.transforms import ScheduleOptions

__all__ = ["Recipe", "from_ds_config"]

_Z = "zero_optimization"


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
        entries: what became of each key, and why.

    Example:
        >>> recipe = from_ds_config({"zero_optimization": {"stage": 3}})
        >>> recipe.stage, recipe.schedule.max_live, recipe.bucket_bytes
        (3, 1000000000, 27262976)
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
    entries: tuple[Entry, ...] = field(repr=False)

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each key that is ignored, and for each default that matters."""
        return tuple(
            f"{one.path}: {one.why or one.becomes}"
            for one in self.entries
            if one.verdict in ("ignored", "default")
        )

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
            group: the ranks, without axes if the configuration makes a mesh.
            optimizer: for a configuration without one; clipping is put in front.
            options: more options of :func:`zfun.zero`, such as ``trainable`` and ``order``; an
                option of the recipe may be replaced.

        Returns:
            The functions ``init``, ``step`` and ``params``.

        Raises:
            OptionError: there is no optimizer, or the group has another number of ranks.

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
        rule = self.optimizer if optimizer is None else _clipped(optimizer, self.max_grad_norm)
        if rule is None:
            raise OptionError(
                "a recipe needs an optimizer; got a configuration without one; pass optimizer=, "
                "such as zf.optim.adamw(3e-4)"
            )
        size = mesh_of(group).size
        if self.batch is not None and self.batch.world_size != size:
            raise OptionError(
                f"the batch sizes of the configuration are for {self.batch.world_size} ranks; got "
                f"a group of {size}; pass world_size={size} to from_ds_config()"
            )
        if self.rows is not None:
            mesh = split(group, self.rows)
            group = mesh if self.secondary else mesh.inner
        own: dict[str, Any] = {
            "precision": self.precision,
            "num_micro_batches": self.num_micro_batches,
            "compression": self.compression,
            "schedule": self.schedule,
            "bucket_bytes": self.bucket_bytes,
        }
        if "offload" not in options:
            own["offload"] = self.offload()
        return zero(self.stage, loss_fn, rule, group, **{**own, **options})

    def __str__(self) -> str:
        return text_of(self.entries)

    def _repr_html_(self) -> str:
        return html_of(self.entries)


@takes(
    config=instance(Mapping, "a dict", '{"zero_optimization": {"stage": 3}}') | PATH,
    auto=instance(AutoValues, "a zf.interop.AutoValues", "zf.interop.AutoValues(hidden_size=768)")
    | None,
    optimizer=FUNCTION | None,
)
def from_ds_config(
    config: Mapping[str, Any] | str | Path,
    *,
    auto: AutoValues | None = None,
    optimizer: Callable[[Any], Any] | None = None,
) -> Recipe:
    """Read a configuration of DeepSpeed.

    Every key is mapped to an option, ignored with a reason, or refused with a remedy; the page
    "DeepSpeed configurations" has the table.

    Args:
        config: the keys, or the path of a JSON file, which may have comments.
        auto: the values of the run, which fill ``"auto"`` and keys that are left out.
        optimizer: a function from the learning rate, a number or a schedule, to an optimizer, such
            as ``zf.optim.adamw``. The function wins over the optimizer of the configuration.

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
    walked = walk(keys)
    values, more = values_of(walked, auto)
    found = [*walked.mistakes, *more, *contradictions(values, walked.given)]
    values.spoil(one.path for one in found)
    recipe = _recipe(values, walked, auto, optimizer, found)
    if recipe is None or found:
        raise error_of(
            [one._replace(path=walked.written.get(one.path, one.path)) for one in found], name
        )
    return recipe


def _recipe(
    v: Values,
    walked: Walked,
    auto: AutoValues,
    make: Callable[[Any], Any] | None,
    found: list[Mistake],
) -> Recipe | None:
    """Build each part; a part that cannot be built adds its mistake to ``found``."""
    notes: Notes = {}

    def part(path: str, build: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        try:
            with collecting(path, found):
                return build(*args)
        except Unusable:
            assert found, f"{path} is unusable without a mistake"
        return default

    batch, num_micro_batches = part(
        "train_batch_size", batch_sizes, v, auto, notes, default=(None, 1)
    )
    bucket_bytes = part(_Z, bucket_bytes_of, v, notes, default=1)
    rate, momentum = part("scheduler.params", _rate, v, walked.given, auto, default=(None, None))
    clip = part("gradient_clipping", _clip, v, walked.given, notes, default=0.0)
    rule = part("optimizer.params", _rule, v, walked, make, rate, momentum, clip, notes)
    precision = part("fp16", precision_of, v, num_micro_batches, notes)
    schedule = part(_Z, schedule_options_of, v, bucket_bytes, notes)
    compression = part(_Z, compression_of, v, walked.given)
    stores = [
        part(f"{_Z}.{section}", store_of, v, section, notes)
        for section in ("offload_param", "offload_optimizer")
    ]
    stage = part(f"{_Z}.stage", v.__getitem__, f"{_Z}.stage")
    rows = part(_Z, rows_of, v)
    remat = part("activation_checkpointing", _remat, v, default={})
    if found:
        return None
    return Recipe(
        stage=stage,
        optimizer=rule,
        learning_rate=rate,
        max_grad_norm=clip,
        precision=precision,
        num_micro_batches=num_micro_batches,
        batch=batch,
        schedule=schedule,
        compression=compression,
        params_store=stores[0],
        optimizer_store=stores[1],
        bucket_bytes=bucket_bytes,
        rows=rows,
        secondary=schedule is not None and schedule.secondary,
        remat=remat,
        entries=entries_of(walked, v, notes),
    )


def _kind(given: Mapping[str, Any], section: str, known: tuple[str, ...]) -> str | None:
    """Return the type in a section, in the table's spelling."""
    name = str(given.get(f"{section}.type", "")).lower()
    return next((one for one in known if one.lower() == name), None)


def _rate(
    v: Values, given: Mapping[str, Any], auto: AutoValues
) -> tuple[float | Schedule | None, Schedule | None]:
    """Return the learning rate, and the momentum of a cycle."""
    has_optimizer = _kind(given, "optimizer", (*OPTIMIZERS, *TORCH_OPTIMIZERS)) is not None
    base = v["optimizer.params.lr"] if has_optimizer else auto.learning_rate
    kind = _kind(given, "scheduler", SCHEDULERS)
    if kind is None:
        return base, None
    return schedule_of(kind, v, base), momentum_of(kind, v)


def _clip(v: Values, given: Mapping[str, Any], notes: Notes) -> float:
    bound = v["gradient_clipping"]
    if "gradient_clipping" not in given and _kind(given, "optimizer", OPTIMIZERS) == "OneBitAdam":
        notes["gradient_clipping"] = Note("no clipping", "1-bit Adam gets terms of the gradient")
        return 0.0
    notes["gradient_clipping"] = Note(
        f"zf.optim.clip_by_global_norm({bound})" if bound else "no clipping",
        v.sources.get("gradient_clipping", ""),
    )
    return bound


def _rule(
    v: Values,
    walked: Walked,
    make: Callable[[Any], Any] | None,
    rate: float | Schedule | None,
    momentum: Schedule | None,
    clip: float,
    notes: Notes,
) -> Optimizer | None:
    kind = _kind(walked.given, "optimizer", (*OPTIMIZERS, *TORCH_OPTIMIZERS))
    if make is not None:
        if kind is not None:
            notes["optimizer.type"] = Note("the caller's optimizer", "wins, as in DeepSpeed")
        if rate is None:
            raise OptionError(
                "the caller's optimizer needs a learning rate; got none; write a scheduler or "
                "optimizer.params.lr, or pass learning_rate="
            )
        return _clipped(make(rate), clip)
    if kind is None or rate is None:
        return None
    decays = {} if momentum is None else {"b1": momentum, "b2": 0.99}
    made = optimizer_of(kind, v, walked.given, walked.extra, rate, decays)
    notes["optimizer.type"] = Note(f"zf.optim.{_name_of(made)}")
    return _clipped(made, clip)


def _name_of(rule: Optimizer) -> str:
    return rule.name or "muon"


def _clipped(rule: Any, clip: float) -> Optimizer:
    return optim.chain(optim.clip_by_global_norm(clip), rule) if clip else optim.as_optimizer(rule)


def _remat(v: Values) -> Mapping[str, StoreChoice]:
    is_host = v["activation_checkpointing.cpu_checkpointing"]
    return {"store": StoreChoice("host", {})} if is_host else {}
