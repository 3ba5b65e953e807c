"""The numbers of a step in files and in other programs."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
from zfun.errors import OptionError
from zfun.interop import loggers
from zfun.interop.loggers import step_logger, step_numbers, to_csv, to_tensorboard, to_wandb
from zfun.recipes import StepInfo


def info(loss: float, *, skipped: bool = False) -> StepInfo[None]:
    return StepInfo(
        torch.tensor(loss), torch.tensor(2.0), skipped, None, None, learning_rate=0.5, num_applied=3
    )


def kept() -> tuple[list[tuple[int, dict[str, float]]], Callable[[int, Mapping[str, float]], None]]:
    lines: list[tuple[int, dict[str, float]]] = []
    return lines, lambda step, numbers: lines.append((step, dict(numbers)))


def test_a_run_is_logged_on_rank_0_with_the_numbers_of_the_steps() -> None:
    def main(group: zf.Group) -> Any:
        lines, sink = kept()
        loss = lambda params, batch: (params["w"] * batch).sum()
        zero = zf.zero(2, loss, zf.optim.sgd(0.5), group)
        state, found = zero.init({"w": torch.ones(3)}), []
        log = step_logger(group, sink, every=2)
        for _ in range(5):
            state, info = zero.step(state, torch.ones(3) * (1 + group.rank))
            log(state.step, info, {"epoch": torch.tensor(1)})
            found.append((info.loss.item(), info.grad_norm.item()))
        return lines, found

    (first, found), (second, _) = zf.simulate(2, main)
    assert second == []
    assert [step for step, _ in first] == [2, 4]
    assert [(line["loss"], line["grad_norm"]) for _, line in first] == [found[1], found[3]]
    assert all(line["epoch"] == 1.0 and line["learning_rate"] == 0.5 for _, line in first)


def test_a_skipped_step_is_logged_out_of_turn() -> None:
    lines, sink = kept()
    log = step_logger(zf.process_group(), sink, every=10)
    log(3, info(1.0))
    log(4, info(math.inf, skipped=True))
    assert [(step, line["skipped"]) for step, line in lines] == [(4, 1.0)]


def test_every_sink_gets_the_numbers() -> None:
    (one, first), (two, second) = kept(), kept()
    step_logger(zf.process_group(), first, second)(1, info(0.5))
    assert one == two == [(1, step_numbers(info(0.5)))]


def test_a_metric_with_the_name_of_a_number_is_refused() -> None:
    log = step_logger(zf.process_group())
    with pytest.raises(OptionError, match="got 'loss', which the step has; rename the metric"):
        log(1, info(0.5), {"loss": 1.0})


def test_an_optimizer_without_a_rate_has_no_column() -> None:
    assert "learning_rate" not in step_numbers(info(0.5)._replace(learning_rate=None))


def test_a_file_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for step in (1, 2):
        to_csv(path)(step, {"loss": 1 / step, "rate": 0.5})
    to_csv(str(path))(3, {"rate": 0.25})
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert rows == [
        {"step": "1", "loss": "1.0", "rate": "0.5"},
        {"step": "2", "loss": "0.5", "rate": "0.5"},
        {"step": "3", "loss": "", "rate": "0.25"},
    ]


def test_an_empty_file_gets_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.touch()
    sink = to_csv(file)
    for step in (1, 2):
        sink(step, {"loss": 0.5})
    assert file.read_text() == "step,loss\n1,0.5\n2,0.5\n"


def test_a_number_without_a_column_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    sink = to_csv(path)
    sink(1, {"loss": 1.0})
    with pytest.raises(OptionError, match=r"columns step, loss; got \['accuracy'\] at step 2"):
        sink(2, {"loss": 1.0, "accuracy": 0.5})
    assert path.read_text() == "step,loss\n1,1.0\n"


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    sink = to_tensorboard(writer, prefix="train/")
    sink(1, {"loss": 0.5})
    sink(2, {"loss": 0.25})
    writer.close()
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]


def test_a_folder_of_tensorboard_is_made_by_the_first_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = to_tensorboard(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    sink(1, {"loss": 0.5})
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_without_tensorboard_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OptionError, match="run pip install tensorboard"):
        to_tensorboard("runs")(1, {"loss": 0.5})


class Run:
    """The methods of a run of wandb that loggers use."""

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, float], int]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((numbers, step))


@pytest.mark.parametrize("later", [False, True])
def test_a_run_of_wandb_gets_the_numbers(later: bool) -> None:
    run, begun = Run(), []

    def begin() -> Run:
        begun.append(1)
        return run

    sink = to_wandb(begin if later else run)
    assert begun == []
    sink(1, {"loss": 0.5})
    sink(2, {"loss": 0.25})
    assert run.lines == [({"loss": 0.5}, 1), ({"loss": 0.25}, 2)]
    assert begun == [1] * later


untyped: Any = loggers


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: untyped.to_csv(3), r"path of to_csv\(\) must be a path"),
        (lambda: untyped.to_wandb(3), "must be a run of wandb or a function that begins one"),
        (lambda: untyped.to_tensorboard(3), "must be a path or a SummaryWriter"),
        (lambda: untyped.step_numbers(3), "must be the StepInfo of a step"),
        (lambda: untyped.step_logger(zf.process_group(), 3), "must be a function"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()
