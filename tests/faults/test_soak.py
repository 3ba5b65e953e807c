"""Ranks that are killed, stopped, late or disturbed: a named error in time, or right bits."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.distributed import needs_shared_memory
from tests.faults.programs import endurance, save_kills, soak, tracer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for files in /proc and /dev/shm"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    needs_shared_memory,
]

QUICK = [("two jobs", 0)]
SLOW = [
    ("sigterm", 0),
    ("pause", 1),
    ("stop", 0),
    ("late", 1),
    ("too late", 2),
    ("memory", 7),
    ("strangers", 0),
    ("forks", 0),
]
CASES = [pytest.param(*case, id=f"{case[0]} {case[1]}") for case in QUICK]
CASES += [pytest.param(*case, id=f"{case[0]} {case[1]}", marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_a_fault_ends_in_a_named_error_or_in_right_bits(kind: str, seed: int) -> None:
    """`python -m tests.faults.programs.soak` runs more."""
    line, broken = soak.run(kind, seed)
    assert broken == [], line


ENDURANCE = {
    "steps": lambda path: endurance.steps(200, path),
    "clock": lambda path: endurance.clock(20, path),
    "disk": endurance.disk,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ENDURANCE)
def test_ranks_endure(kind: str) -> None:
    """`python -m tests.faults.programs.endurance steps 5000` takes more steps."""
    if kind == "clock" and shutil.which("gcc") is None:
        pytest.skip("a clock that jumps is compiled")
    with tempfile.TemporaryDirectory() as name:
        # Another user looks at a path of the ranks.
        Path(name).chmod(0o755)
        line, broken = ENDURANCE[kind](Path(name) / "place")
    assert broken == [], line


traced = pytest.mark.skipif(not tracer.is_allowed(), reason="no process may be traced here")
# `python -m tests.faults.programs.save_kills 0 1 0` kills at every call.
KILLS = [
    pytest.param(False, 0, 150, id="rank 0 publishes"),
    pytest.param(True, 0, 140, id="rank 0 publishes in the background"),
    pytest.param(False, 1, 90, id="rank 1 writes", marks=pytest.mark.slow),
    pytest.param(True, 1, 70, id="rank 1 writes in the background", marks=pytest.mark.slow),
]


@traced
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("background", "lost", "at"), KILLS)
def test_a_kill_at_a_system_call_of_a_save_loses_nothing(
    background: bool, lost: int, at: int
) -> None:
    done = save_kills.run(at, lost, background=background)
    assert done.is_killed
    assert done.broken == ()
    assert done.step in (1, 2)


@traced
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_kills_at_every_thirtieth_call_lose_nothing(background: bool, lost: int) -> None:
    found = list(save_kills.sweep(7, 30, lost, background=background))
    assert [done for done in found if done.broken] == []
    assert len(found) > 3
