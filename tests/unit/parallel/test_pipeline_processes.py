"""Pipelines over real processes: the bits of the simulation, and errors that name the rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.distributed import processes, simulated
from tests.distributed.programs import pipelining
from tests.unit.interop import test_deepspeed_pipeline as facade
from zfun.collectives import Workers
from zfun.errors import PeerLost, SpecMismatch
from zfun.testing import assert_same_bits

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

OVER_GLOO = pytest.param(False, id="gloo")
AS_CHOSEN = pytest.param(None, id="default transport")


@pytest.fixture(scope="module", params=[OVER_GLOO, AS_CHOSEN])
def four(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with processes(
        4, timeout_s=60.0, collective_timeout_s=20.0, shared_memory=request.param
    ) as held:
        yield held


def test_processes_have_the_results_of_the_simulation(four: Workers) -> None:
    expected = simulated(4, pipelining.trained)
    for rank, found in enumerate(four.run(pipelining.trained)):
        assert_same_bits(found, expected[rank], f"rank {rank} in its process and simulated")


@pytest.mark.parametrize("four", [OVER_GLOO], indirect=True)
def test_a_pipeline_of_deepspeed_has_the_numbers_of_one_process(four: Workers) -> None:
    for found in four.run(functools.partial(facade.run, stage=1, pp=2)):
        facade.assert_is(found, facade.plain(2))


def test_processes_with_other_schedules_are_refused(four: Workers) -> None:
    for outcome in four.outcomes(pipelining.of_other_schedules):
        assert isinstance(outcome, SpecMismatch)
        assert "option schedule is" in str(outcome)


def test_a_stage_that_raises_is_named_on_all_ranks() -> None:
    with processes(3, timeout_s=60.0, collective_timeout_s=20.0) as workers:
        before, raised, after = workers.outcomes(pipelining.that_raises)
    assert isinstance(raised, ValueError)
    for outcome in (before, after):
        assert isinstance(outcome, PeerLost)
        assert "rank 1 raised ValueError: no such token" in str(outcome)
