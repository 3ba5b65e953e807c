"""The run on a GPU reports a part that fails or hangs, keeps the other parts, and says so where
there is no GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zfun as zf
from benchmarks.axes import bubble
from benchmarks.gpu import report
from zfun.parallel import schedules

ROOT = Path(__file__).parents[3]


def part(program: str) -> report.Part:
    return report.Part(
        "A part",
        ["-c", program, "{json}"],
        [],
        5,
        lambda figures, output: f"{figures} and {output.strip()}",
    )


def test_a_part_gives_figures_and_output(tmp_path: Path) -> None:
    program = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('[3]'); print('done')"
    outcome = report.run(part(program), tmp_path, dry_run=True)
    assert outcome.failure is None
    assert outcome.section == "[3] and done"


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("raise SystemExit('boom')", "exit status 1"),
        pytest.param("import time; time.sleep(60)", "not done after 5 s", marks=pytest.mark.slow),
    ],
)
def test_a_part_that_fails_or_hangs_is_on_the_page(
    program: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PARTS", {"bad": part(program), "good": part("print('fine')")})
    outcomes = {name: report.run(one, tmp_path, dry_run=True) for name, one in report.PARTS.items()}
    written = report.page("cpu", outcomes)
    assert f"**Failed: A part**, {failure}" in written
    assert "None and fine" in written


def test_all_parts_together_end_within_8_minutes() -> None:
    assert sum(part.seconds for part in report.PARTS.values()) < 8 * 60


def test_waits_are_measured_against_the_waits_of_the_schedules() -> None:
    axis, m = zf.collectives.abstract_group(4), 8
    for name, (per_rank, formula) in bubble.SCHEDULES.items():
        stages = [lambda params, x: x] * (4 * per_rank)
        made = zf.pipeline(stages, axis, name.partition(",")[0], num_micro_batches=m).schedule
        assert schedules.bubble(made) == pytest.approx(formula(4, m, per_rank))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_benchmark_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/report.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_every_part_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/gpu/report.py",
        "--device",
        "cpu",
        "--dry-run",
        "--write",
        str(tmp_path / "gpu.md"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    written = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "No part failed." in written
    assert all(f"## {part.title}" in written for part in report.PARTS.values())
    assert "| zfun-3 |" in written
