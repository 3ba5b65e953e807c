from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# One thread for each tensor operation: the ranks of a simulation are threads already.
torch.set_num_threads(1)
torch.set_printoptions(threshold=8, edgeitems=2)

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40, database=None, suppress_health_check=_SLOW)
# Shrinking trains hundreds of models: without it a failure is told within the time limit of a test.
settings.register_profile("quick", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("dev", deadline=None, max_examples=40, suppress_health_check=_SLOW)
settings.register_profile("long", deadline=None, max_examples=2000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def examples(count: int) -> int:
    """How many examples a test of its own weight takes: ``count`` in a common run, fifty times as many in a long one."""
    return count * 50 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else count


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core.

    Simulated ranks hand the interpreter's lock to each other at every operation. Between two cores that takes several times as long as
    what the tests compute. In a long run they do have all cores, so that they meet in every order there is.
    """
    if not hasattr(os, "sched_setaffinity") or os.environ.get("HYPOTHESIS_PROFILE") == "long":
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture(autouse=True)
def _on_one_core(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("processes"):
        yield
        return
    with on_one_core():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
