"""The same programs on simulated ranks and on real gloo processes, equal to the last bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zfun as zf
from tests.conftest import FORM
from tests.distributed import processes, simulated
from tests.distributed.programs import (
    bodies,
    branches,
    experts,
    optimizers,
    placements,
    pullbacks,
    sequences,
    unused,
)
from zfun.collectives import Workers
from zfun.errors import CollectiveMismatch, PeerLost
from zfun.testing import assert_same_bits

# torch warns at the first import of the formulas for forward-mode derivatives.
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]


TWO_OVER_GLOO = pytest.param((2, False), marks=pytest.mark.slow, id="2 over gloo")
OVER_GLOO = pytest.param((3, False), marks=pytest.mark.slow, id="3 over gloo")
AS_CHOSEN = pytest.param((2, None), id="2 over the default transport")
# Over gloo, three ranks send every message that two ranks send.
RANKS = [*([TWO_OVER_GLOO] if FORM == "search" else []), OVER_GLOO, AS_CHOSEN]


@pytest.fixture(scope="module", params=RANKS)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[int, Workers]]:
    size, shared_memory = request.param
    with processes(
        size, timeout_s=40.0, collective_timeout_s=20.0, shared_memory=shared_memory
    ) as held:
        yield size, held


BODIES = [
    *bodies.BODIES,
    *branches.BODIES,
    *optimizers.BODIES,
    *placements.BODIES,
    *pullbacks.BODIES,
    experts.trained_over_experts,
    sequences.trained_over_sequences,
    *unused.BODIES,
]


LONG = (bodies.starts_leaf_by_leaf, optimizers.every_optimizer)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=body.__name__, marks=pytest.mark.slow if body in LONG else ())
        for body in BODIES
    ],
)
def test_processes_have_the_results_of_the_simulation(
    ranks: tuple[int, Workers], body: Callable[[zf.Group], Any]
) -> None:
    size, workers = ranks
    expected = simulated(size, body)
    found = workers.run(body)
    for rank in range(size):
        assert_same_bits(found[rank], expected[rank], f"rank {rank} in its process and simulated")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [TWO_OVER_GLOO, AS_CHOSEN], indirect=True)
def test_two_hundred_steps_that_branch_at_random_have_equal_bits(
    ranks: tuple[int, Workers],
) -> None:
    test_processes_have_the_results_of_the_simulation(ranks, branches.two_hundred_steps)


@pytest.mark.parametrize("ranks", [AS_CHOSEN], indirect=True)
def test_compiled_blocks_run_on_processes(ranks: tuple[int, Workers]) -> None:
    _, workers = ranks
    first, second = workers.run(bodies.compiled)
    assert_same_bits(first, second)


def test_a_rank_that_raises_in_the_loss_is_named() -> None:
    started = time.monotonic()
    with processes(2, timeout_s=40.0, collective_timeout_s=20.0) as workers:
        waiting, raised = workers.outcomes(bodies.raises_in_the_loss)
    assert isinstance(raised, ValueError)
    assert isinstance(waiting, PeerLost)
    assert "rank 1 raised ValueError: bad batch in shard 7" in str(waiting)
    assert "'params'" in str(waiting)
    assert time.monotonic() - started < 40
    with pytest.raises(ValueError, match="bad batch in shard 7"):
        zf.simulate(2, bodies.raises_in_the_loss)


def test_a_rank_that_starts_another_collective_is_named() -> None:
    with processes(2, timeout_s=40.0, collective_timeout_s=20.0) as workers:
        outcomes = workers.outcomes(bodies.starts_another_collective)
    for outcome in outcomes:
        assert isinstance(outcome, (CollectiveMismatch, PeerLost))
        assert "'grads'" in str(outcome)
    with pytest.raises(CollectiveMismatch, match=r"by hand"):
        zf.simulate(2, bodies.starts_another_collective)
