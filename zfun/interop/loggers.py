"""Write the numbers of each step to CSV files, TensorBoard, and Weights & Biases.

A *sink* is any function ``sink(step, numbers)``. :func:`step_logger` calls sinks on rank 0.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.options import FUNCTION, PATH, Kind, instance, integer, takes
from zfun.recipes import StepInfo

Sink: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""``(step, numbers)`` to None."""

_INFO = instance(StepInfo, "the StepInfo of a step", "zero.step(state, batch)[1]")


class _Logged(Protocol):
    def __call__(
        self,
        step: int,
        info: StepInfo[Any],
        metrics: Mapping[str, float | Tensor] | None = None,
    ) -> None: ...


@takes(info=_INFO)
def step_numbers(info: StepInfo[Any]) -> dict[str, float]:
    """Return the numbers of a step by name; equal on all ranks.

    Args:
        info: the second result of ``zero.step``; without ``aux``, which differs from rank to rank.

    Returns:
        ``loss``, ``grad_norm``, ``loss_scale``, ``num_applied``, ``skipped`` as 0 or 1, and
        ``learning_rate`` where the optimizer has one. Waits for the device.

    Example:
        >>> import torch
        >>> step_numbers(StepInfo(torch.tensor(0.5), torch.tensor(2.0), False, None, None))
        {'loss': 0.5, 'grad_norm': 2.0, 'loss_scale': 1.0, 'num_applied': 0.0, 'skipped': 0.0}
    """
    rate = {} if info.learning_rate is None else {"learning_rate": float(info.learning_rate)}
    return {
        "loss": float(info.loss),
        "grad_norm": float(info.grad_norm),
        **rate,
        "loss_scale": float(info.loss_scale),
        "num_applied": float(info.num_applied),
        "skipped": float(info.skipped),
    }


@takes(sinks=FUNCTION, every=integer(1))
def step_logger(group: Group, *sinks: Sink, every: int = 1) -> _Logged:
    """Return ``log(step, info, metrics=None)``, which sends the numbers of a step to sinks.

    Rank 0 alone calls the sinks. A step that is not logged is not converted to numbers, so the
    program does not wait for the device.

    Args:
        group: the ranks of the run.
        sinks: functions ``sink(step, numbers)``, such as :func:`to_csv` returns.
        every: log the steps that this number divides, and each skipped step.

    Returns:
        The function; ``step`` is ``state.step``, and ``metrics`` are more numbers by name, such as
        those of :func:`zfun.reductions.mean_metrics`.

    Raises:
        OptionError: from the function: a metric has the name of a number of the step.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> def main(group):
        ...     loss = lambda params, batch: (params["w"] * batch).sum()
        ...     zero = zf.zero(2, loss, zf.optim.sgd(0.5), group)
        ...     state, lines = zero.init({"w": torch.ones(2)}), []
        ...     log = step_logger(group, lambda step, numbers: lines.append((step, numbers)))
        ...     state, info = zero.step(state, torch.ones(2))
        ...     log(state.step, info, {"epoch": 1})
        ...     return [(step, numbers["loss"], numbers["epoch"]) for step, numbers in lines]
        >>> zf.simulate(2, main)
        [[(1, 2.0, 1.0)], []]
    """

    def log(
        step: int, info: StepInfo[Any], metrics: Mapping[str, float | Tensor] | None = None
    ) -> None:
        if group.rank != 0 or (step % every and not info.skipped):
            return
        numbers = step_numbers(info)
        for name, value in (metrics or {}).items():
            if name in numbers:
                raise OptionError(
                    f"metrics have names of their own; got {name!r}, which the step has; rename "
                    "the metric"
                )
            numbers[name] = float(value)
        for sink in sinks:
            sink(step, numbers)

    return log


@takes(path=PATH)
def to_csv(path: str | Path) -> Sink:
    """Return a sink that appends one row for each step to a CSV file.

    The first row of numbers sets the columns. A run that is resumed goes on with the same file. The
    file is complete after each row.

    Args:
        path: the file, made where there is none.

    Returns:
        The sink.

    Raises:
        OptionError: from the sink: a number without a column.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = to_csv(f"{folder}/log.csv")
        ...     for step in (1, 2):
        ...         sink(step, {"loss": 1 / step})
        ...     print(Path(folder, "log.csv").read_text())
        step,loss
        1,1.0
        2,0.5
        <BLANKLINE>
    """
    file = Path(path)

    def sink(step: int, numbers: Mapping[str, float]) -> None:
        known = _columns_of(file)
        columns = known or ["step", *numbers]
        if unknown := [name for name in numbers if name not in columns]:
            raise OptionError(
                f"every row of {file} has the columns {', '.join(columns)}; got {unknown} at step "
                f"{step}; write these numbers to a file of their own"
            )
        with file.open("a", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, columns, lineterminator="\n")
            if not known:
                writer.writeheader()
            writer.writerow({"step": step, **numbers})

    return sink


def _columns_of(file: Path) -> list[str]:
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return next(csv.reader(lines), [])


_WRITER = Kind(
    lambda x: PATH.accepts(x) or callable(getattr(x, "add_scalar", None)),
    (*PATH.words, "a SummaryWriter"),
    "'runs/first'",
)


@takes(writer=_WRITER)
def to_tensorboard(writer: Any, *, prefix: str = "") -> Sink:
    """Return a sink that writes scalars for TensorBoard.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or a folder, for which the first call
            makes one.
        prefix: put before each name, such as ``"train/"``.

    Returns:
        The sink.

    Raises:
        OptionError: from the sink: a folder, and the package ``tensorboard`` is not installed.

    Example:
        >>> class Writer:
        ...     def add_scalar(self, name, value, step):
        ...         print(name, value, step)
        >>> to_tensorboard(Writer(), prefix="train/")(3, {"loss": 0.5})
        train/loss 0.5 3
    """
    made = functools.cache(lambda: _summary_writer(writer) if PATH.accepts(writer) else writer)

    def sink(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            made().add_scalar(f"{prefix}{name}", value, step)

    return sink


def _summary_writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise OptionError(
            f"to_tensorboard({str(folder)!r}) needs the package tensorboard, which is not "
            "installed; run pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder))


_RUN = Kind(
    lambda x: callable(x) or callable(getattr(x, "log", None)),
    ("a run of wandb", "a function that begins one"),
    "lambda: wandb.init(project='zfun')",
)


@takes(run=_RUN)
def to_wandb(run: Any) -> Sink:
    """Return a sink that logs to Weights & Biases.

    Args:
        run: a run of ``wandb``, or a function that begins one. The function is called at the first
            logged step, so on rank 0 alone.

    Returns:
        The sink.

    Example:
        >>> class Run:
        ...     def log(self, numbers, step):
        ...         print(numbers, step)
        >>> to_wandb(Run)(3, {"loss": 0.5})
        {'loss': 0.5} 3
    """
    begun = functools.cache(
        lambda: run if hasattr(run, "log") and not isinstance(run, type) else run()
    )

    def sink(step: int, numbers: Mapping[str, float]) -> None:
        begun().log(dict(numbers), step=step)

    return sink
