"""Meshes of real processes: the bits of the simulation, and a dead rank is noticed in the row and
in the column.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zfun as zf
from tests.conftest import on_one_core
from tests.distributed import needs_shared_memory, processes
from tests.distributed.programs import experts, mesh_bodies, optimizers, sequences, tensor_bodies
from zfun.collectives import Workers
from zfun.errors import PeerLost
from zfun.testing import assert_same_bits

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90), needs_shared_memory]


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    with processes(4, timeout_s=60.0, collective_timeout_s=20.0) as held:
        yield held


BODIES = [
    mesh_bodies.collectives,
    mesh_bodies.trained,
    mesh_bodies.over_named_axes,
    mesh_bodies.over_model_axes,
    mesh_bodies.branching,
    mesh_bodies.over_two_hosts,
    tensor_bodies.trained_over_tensor_ranks,
    tensor_bodies.refused_over_tensor_ranks,
    experts.trained_over_experts,
    optimizers.every_optimizer_over_a_mesh,
    sequences.trained_over_sequences,
]


LONG = (optimizers.every_optimizer_over_a_mesh,)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=body.__name__, marks=pytest.mark.slow if body in LONG else ())
        for body in BODIES
    ],
)
def test_processes_have_the_results_of_the_simulation(
    four: Workers, body: Callable[[zf.Group], Any]
) -> None:
    with on_one_core():
        expected = zf.simulate(4, body)
    for rank, found in enumerate(four.run(body)):
        assert_same_bits(found, expected[rank], f"rank {rank} in its process and simulated")


def test_ranks_of_two_hosts_that_start_different_collectives_are_named(four: Workers) -> None:
    started = time.monotonic()
    for text in four.run(mesh_bodies.starts_something_else):
        assert "'same'" in text
        assert "'other'" in text
    # The error comes before the timeout of 20 s.
    assert time.monotonic() - started < 15


def test_a_rank_that_dies_on_one_of_two_hosts_is_named_on_both(four: Workers) -> None:
    started = time.monotonic()
    outcomes = four.outcomes(mesh_bodies.dies_on_a_host)
    for outcome in outcomes[:3]:
        assert isinstance(outcome, PeerLost), outcome
        assert "all_reduce 'after'" in str(outcome)
    # The first rank that notices tells the others.
    assert any("lost rank 3" in str(outcome) for outcome in outcomes[:3])
    assert time.monotonic() - started < 40


def test_a_rank_that_dies_is_named_by_the_global_rank(four: Workers) -> None:
    started = time.monotonic()
    first, second, third, dead = four.outcomes(mesh_bodies.dies_in_a_row)
    for outcome in (first, second, third, dead):
        assert isinstance(outcome, PeerLost)
    # Rank 1 shares a column with rank 3, and rank 2 a row; rank 0 learns the cause from rank 1 or
    # 2.
    assert "rank 1 lost rank 3" in str(second)
    assert "rank 2 lost rank 3" in str(third)
    assert "lost rank 3" in str(first)
    assert "killed by signal 9" in str(dead)
    assert time.monotonic() - started < 30
