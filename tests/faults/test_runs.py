"""A run of examples/train.py that is killed or told to end goes on from the last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults.programs.endurance import children_of, kills, torchrun
from tests.faults.programs.runs import (
    PARTS,
    Event,
    Plan,
    attempt,
    log_of,
    result_of,
    steps_in,
    unbroken,
)
from zfun.testing import assert_same_bits

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

KILLED = -signal.SIGKILL
COMPOSITIONS = [(), PARTS[:1], PARTS[:2], PARTS]


def test_a_run_goes_on_after_a_kill_and_a_sigterm_with_other_numbers_of_ranks(
    tmp_path: Path,
) -> None:
    plan = Plan(steps=5, save_every=2)
    assert attempt(plan, 2, tmp_path, Event(1, step=4)) == [1, KILLED], log_of(tmp_path)
    assert "PeerLost: rank 0 lost rank 1" in (tmp_path / "0.log").read_text()
    assert steps_in(tmp_path) == [2]
    # SIGTERM to one rank ends all ranks after the same step.
    assert attempt(plan, 3, tmp_path, Event(2, 3, "told to end")) == [0] * 3, log_of(tmp_path)
    assert steps_in(tmp_path) == [2, 3]
    assert attempt(plan, 2, tmp_path) == [0, 0], log_of(tmp_path)
    assert_same_bits(result_of(tmp_path), unbroken([(2, 2), (3, 3), (2, 5)], tmp_path / "whole"))


TEN = Plan(steps=10, save_every=4)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return unbroken([(2, 10)], tmp_path_factory.mktemp("simulated"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Any]:
    """Return the result of ranks that nothing disturbs, which run once for each composition."""

    @cache
    def run(shard: tuple[str, ...]) -> Any:
        folder = tmp_path_factory.mktemp("whole")
        assert attempt(replace(TEN, shard=shard), 2, folder) == [0, 0]
        return result_of(folder)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("shard", COMPOSITIONS, ids="+".join)
@pytest.mark.parametrize("kind", ["killed", "told to end"])
def test_a_run_that_goes_on_has_the_bits_of_the_unbroken_run(
    kind: str,
    shard: tuple[str, ...],
    tmp_path: Path,
    whole: Callable[[tuple[str, ...]], Any],
    simulated: Any,
) -> None:
    plan = replace(TEN, shard=shard)
    for rank, step in ((0, 3), (1, 6), (1, 10)):
        codes = attempt(plan, 2, tmp_path, Event(rank, step, kind))
        assert codes == (
            [KILLED if r == rank else 1 for r in range(2)] if kind == "killed" else [0, 0]
        )
    assert attempt(plan, 2, tmp_path) == [0, 0], log_of(tmp_path)
    found = result_of(tmp_path)
    assert_same_bits(found, whole(shard))
    assert_same_bits(found, simulated)


def await_step(folder: Path, step: int) -> None:
    while not [found for found in steps_in(folder) if found >= step]:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_torchrun_starts_a_killed_run_again_and_passes_sigterm_on(tmp_path: Path) -> None:
    plan = Plan(steps=120, save_every=10)
    with torchrun(tmp_path, plan, 2, restarts=2) as launcher:
        for step in (10, 40):
            await_step(tmp_path, step)
            os.kill(children_of(launcher.pid)[step % 2], signal.SIGKILL)
        await_step(tmp_path, 70)
        launcher.send_signal(signal.SIGTERM)
        text, _ = launcher.communicate(timeout=60.0)
    assert "PeerLost" in text
    (*_, last) = steps_in(tmp_path)
    assert 70 <= last < plan.steps, text[-3000:]
    with torchrun(tmp_path, plan, 3, restarts=0) as launcher:
        text, _ = launcher.communicate(timeout=60.0)
    assert launcher.returncode == 0, text[-3000:]
    reference = unbroken([(2, last), (3, plan.steps)], tmp_path / "whole", full_text=True)
    assert_same_bits(result_of(tmp_path), reference)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_run_of_torchrun_survives_kills_at_random_times(tmp_path: Path) -> None:
    """`python -m tests.faults.programs.endurance torchrun 30 1` kills 30 times."""
    line, broken = kills(3, 5, tmp_path)
    assert broken == [], line
