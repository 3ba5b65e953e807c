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

# How much is run: "everyday" is `make test`, "all" is `make test-all`, and "search" looks for
# failures for hours.
FORM = os.environ.get("ZFUN_TESTS", "everyday")
_SCALES = {"everyday": 0.5, "all": 3, "search": 50}
if FORM not in _SCALES:
    raise pytest.UsageError(f"ZFUN_TESTS is one of {', '.join(_SCALES)}; got {FORM!r}")


def examples(count: int) -> int:
    """Scale the examples of a property, of which ``count`` say enough, to the form that is run."""
    return max(2, round(count * _SCALES[FORM]))


_COMMON = settings(
    deadline=None,
    max_examples=examples(40),
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
# Shrinking trains hundreds of models: without shrinking a failure is told within the time limit of
# a test.
_REPEATABLE = settings(
    _COMMON, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("everyday", _REPEATABLE)
settings.register_profile("all", _REPEATABLE)
settings.register_profile("search", _COMMON)
settings.load_profile(FORM)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and threads started by this one, on one core.

    Simulated ranks hand the interpreter's lock to each other at every operation. Between two cores
    the hand-over takes several times as long as the arithmetic of the tests. A search does use all
    cores, so that ranks meet in every order.
    """
    if not hasattr(os, "sched_setaffinity") or FORM == "search":
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A test that is named on the command line runs in any form.
    if FORM == "everyday" and not any("::" in argument for argument in config.args):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
