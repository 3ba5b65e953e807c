"""Every rank that loses another ends in time, and names the lost rank, the step and the leaf."""

from __future__ import annotations

import sys

import pytest

from tests.distributed import needs_shared_memory
from tests.faults.programs import losses

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left-over processes in /proc"),
    needs_shared_memory,
]

# Each seed stands for the transport, the place of the store and the way to end that follow.
QUICK = {
    17: "shared memory, os._exit",
    39: "shared memory, store in rank 0, raise",
    25: "gloo, store in rank 0, rank 0 killed",
}
SLOW = {
    5: "gloo, killed",
    23: "gloo, store in rank 0, sys.exit",
    65: "gloo, store in rank 0, rank 1 killed",
}
SEEDS = [pytest.param(seed, id=name) for seed, name in QUICK.items()]
SEEDS += [pytest.param(seed, id=name, marks=pytest.mark.slow) for seed, name in SLOW.items()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_others_name_a_lost_rank_in_time(seed: int) -> None:
    assert losses.run(losses.case_of(seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_others_name_a_lost_rank_in_time_in_many_cases() -> None:
    """`python -m tests.faults.programs.losses 0 100` runs more."""
    broken = [(case, found) for case, found in losses.run_all(range(100, 130)) if found]
    # Two cases run at a time and may wait for each other, so a case that is late runs again alone.
    assert not [(case, found) for case, _ in broken if (found := losses.run(case))]
