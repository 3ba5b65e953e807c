from __future__ import annotations

import atexit
import collections
import gc
import os
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, Phase, settings

from tests import left_over

# One thread for each tensor operation: the ranks of a simulation are threads already.
torch.set_num_threads(1)
torch.set_printoptions(threshold=8, edgeitems=2)

# How much is run: "everyday" is `make test`, "all" is `make test-all`, and "search" looks for
# failures for hours.
FORM = os.environ.get("ZFUN_TESTS", "everyday")
# A test with more cases than this is thinned. Every day each fifth case runs, because five shares
# no divisor with the two, three or four values of most parameters.
_MANY = {"everyday": 3, "all": 6}
_STEP = 5
_SCALES = {"everyday": 0.125, "all": 1, "search": 50}
if FORM not in _SCALES:
    raise pytest.UsageError(f"ZFUN_TESTS is one of {', '.join(_SCALES)}; got {FORM!r}")


def examples(count: int) -> int:
    """Scale the number of examples of a property to the form that is run; ``count`` is for every
    day.
    """
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
# Shrinking trains hundreds of models; without shrinking, a failure is reported within the time
# limit of a test.
_REPEATABLE = settings(
    _COMMON, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("everyday", _REPEATABLE)
settings.register_profile("all", _REPEATABLE)
settings.register_profile("search", _COMMON)
settings.load_profile(FORM)


def _number() -> int:
    """Return a number that differs between the processes of pytest-xdist."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "")
    return int(name.removeprefix("gw")) if name else os.getpid()


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this thread, and threads started by this one, on one core.

    Simulated ranks take turns. Handing the turn to a thread on another core takes several times as
    long as the arithmetic of the tests. A search uses all cores.
    """
    if not hasattr(os, "sched_setaffinity") or FORM == "search":
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[_number() % len(cores)]})
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


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_over() -> Iterator[None]:
    """After the last test, no process of the tests runs, and no file of the tests is left."""
    left_over.mark_session()
    before = left_over.files()
    yield
    assert left_over.ended() == []
    assert sorted(left_over.files() - before) == []


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage() -> None:
    """Let collections of garbage leave out all that earlier tests and imports have made.

    A collection that looks through the modules of torch, triton and transformers takes a second.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    # The destructors of nanobind's objects run at the end of the process. pytest still looks for
    # garbage of the tests before that.
    atexit.register(gc.unfreeze)


# The marks that all tests of a file have.
_MARKS = re.compile(r"^pytestmark = (\[\n.*?^\]|.*?$)", re.MULTILINE | re.DOTALL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which no test is chosen: imports take longer than reading.

    pytest does not ask about files that are named on the command line.
    """
    if collection_path.suffix != ".py":
        return None
    text, chosen = collection_path.read_text(encoding="utf-8"), config.option.markexpr
    found = _MARKS.search(text)
    marks = found[0] if found else ""
    is_left_out = (
        not collection_path.name.startswith("test_")
        or (chosen == "processes" and "processes" not in text)
        or (chosen == "not processes" and "mark.processes" in marks)
        or (FORM == "everyday" and "mark.slow" in marks)
    )
    return is_left_out or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no examples in the docstrings of tests."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def _thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave out cases of tests with many cases, which are much alike.

    Every day the first and every fifth are left. Of cases that start processes the long form has
    half, by a hash, so that the halves of two parameters differ.
    """
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    name = lambda item: (str(item.path), getattr(item, "originalname", item.name))
    counts = collections.Counter(map(name, items))
    kept = []
    for item in items:
        if counts[name(item)] <= _MANY[FORM]:
            is_kept = True
        elif FORM == "everyday":
            is_kept = seen[name(item)] % _STEP == 0
        else:
            starts = item.get_closest_marker("processes") is not None
            is_kept = not starts or zlib.crc32(item.name.encode()) % 2 == 0
        if is_kept:
            kept.append(item)
        seen[name(item)] += 1
    return kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A test that is named on the command line runs in any form.
    if FORM != "search" and not any("::" in argument for argument in config.args):
        is_slow = lambda item: item.get_closest_marker("slow") is not None
        left = _thinned([item for item in items if FORM == "all" or not is_slow(item)])
        kept = set(map(id, left))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = left
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
