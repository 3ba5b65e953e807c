"""Ranks under mpirun: the bodies of gloo's tests over MPI, and the variables of launchers."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zfun as zf
from tests.conftest import FORM
from tests.distributed import simulated
from tests.distributed.programs import (
    bodies,
    branches,
    optimizers,
    placements,
    pullbacks,
    unused,
)
from zfun.collectives.launch import _environment
from zfun.errors import OptionError
from zfun.testing import assert_same_bits

# A launcher of the environment that runs the tests is the one that belongs to its library.
MPIRUN = shutil.which(
    "mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
needs_mpi = [
    pytest.mark.processes,
    pytest.mark.timeout(170),
    # torch warns at the first import of the formulas for forward-mode derivatives.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.skipif(
        MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs mpirun and mpi4py, as from pip install mpi4py mpich",
    ),
]
# These three use every part of a transport that the other bodies use.
QUICK: list[Callable[[zf.Group], Any]] = [
    bodies.any_dtype_and_shape,
    bodies.values_differ,
    bodies.goes_on_after_an_error,
]
BODIES: list[Callable[[zf.Group], Any]] = [
    *bodies.BODIES,
    *branches.BODIES,
    *optimizers.BODIES,
    *placements.BODIES,
    *pullbacks.BODIES,
    *unused.BODIES,
]


def _run(
    size: int, program: list[str], timeout_s: float = 150.0
) -> subprocess.CompletedProcess[str]:
    assert MPIRUN is not None
    process = subprocess.Popen(
        [MPIRUN, "-n", str(size), sys.executable, *program],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
            # Open MPI: more ranks than cores, in a container.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        texts = process.communicate(timeout=timeout_s)
    finally:
        # The launcher ends its ranks.
        process.terminate()
        process.wait(10.0)
    return subprocess.CompletedProcess(process.args, process.returncode, *texts)


def _have_the_results_of_the_simulation(
    size: int, bodies: list[Callable[[zf.Group], Any]], folder: Path
) -> None:
    names = [f"{body.__module__}.{body.__name__}" for body in bodies]
    program = ["-m", "tests.distributed.programs.under_mpi", str(folder), *names]
    done = _run(size, program, timeout_s=150.0 if bodies == QUICK else 550.0)
    assert done.returncode == 0, done.stderr[-5000:]
    for name, body in zip(names, bodies, strict=True):
        for rank, expected in enumerate(simulated(size, body)):
            found = pickle.loads((folder / f"{name}-{rank}").read_bytes())
            assert_same_bits(found, expected, f"{name}, rank {rank} under mpirun and simulated")


class TestUnderMpirun:
    pytestmark = needs_mpi

    @pytest.mark.skipif(FORM != "everyday", reason="these bodies run with all bodies below")
    def test_three_ranks_have_the_results_of_the_simulation(self, tmp_path: Path) -> None:
        _have_the_results_of_the_simulation(3, QUICK, tmp_path)

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("size", [2, 3])
    def test_all_bodies_have_the_results_of_the_simulation(self, size: int, tmp_path: Path) -> None:
        _have_the_results_of_the_simulation(size, BODIES, tmp_path)

    def test_groups_divide_and_a_raised_error_reaches_the_others(self, tmp_path: Path) -> None:
        done = _run(3, ["-c", DIVIDES, str(tmp_path)])
        assert done.returncode != 0
        told = [(tmp_path / str(rank)).read_text() for rank in range(3)]
        assert [float(text.split()[0]) for text in told] == [3.0, 1.0, 3.0]
        assert all("rank 2 raised ValueError: not finite" in text for text in told[:2])


# The launcher ends all ranks when the first one fails, so each waits for what the others tell.
DIVIDES = """
import sys
import time
from pathlib import Path

import torch
import zfun as zf
from zfun.collectives import AllReduce, Collective

folder = Path(sys.argv[1])

def total(group):
    return group.start(Collective(AllReduce()), torch.full((3,), 1.0 + group.rank % 2)).wait()

def tell(rank, text):
    (folder / f"{rank} new").write_text(text)
    (folder / f"{rank} new").rename(folder / str(rank))

try:
    with zf.process_group(timeout_s=30.0, shared_memory=False) as group:
        rank, found = group.rank, float(total(group.subgroup([[0, 2], [1]]))[0])
        if rank == 2:
            tell(2, f"{found}")
            raise ValueError("not finite")
        try:
            total(group)
        except zf.errors.PeerLost as error:
            tell(rank, f"{found} {error}")
            raise
except (ValueError, zf.errors.PeerLost):
    end = time.monotonic() + 60.0
    while time.monotonic() < end and not all((folder / f"{x}").exists() for x in range(3)):
        time.sleep(0.01)
    raise
"""

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment, without a launcher; what is filled in is taken out again."""
    held: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", held)
    monkeypatch.setattr(_environment, "runs_over_mpi", lambda rank, size: False)
    return held


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        # Open MPI on one host.
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            ("1", "4", "1", "4", "127.0.0.1", "29500"),
        ),
        # MPICH on two hosts, with the place given.
        (
            {
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
                "MASTER_ADDR": "node-0",
                "MASTER_PORT": "1234",
            },
            ("3", "4", "1", "2", "node-0", "1234"),
        ),
        # srun on three hosts.
        (
            {
                "SLURM_PROCID": "9",
                "SLURM_STEP_NUM_TASKS": "11",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
                "SLURM_NODEID": "2",
                "SLURM_STEP_NODELIST": "node[03-04,07]",
                "SLURM_JOB_ID": "815",
                "SLURM_STEP_ID": "0",
            },
            ("9", "11", "1", "3", "node03", "22149"),
        ),
        # Slurm sets two names of PMI beside its own.
        (
            {
                "PMI_RANK": "5",
                "PMI_SIZE": "8",
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
                "SLURM_NODEID": "1",
                "SLURM_STEP_NODELIST": "node[03-04]",
                "SLURM_JOB_ID": "815",
                "SLURM_STEP_ID": "0",
            },
            ("5", "8", "1", "4", "node03", "22149"),
        ),
        # One rank needs no other.
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # A batch script of Slurm is no rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        # The variables of torchrun win.
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "4",
            },
            ("0", "2", None, None, None, None),
        ),
    ],
)
def test_the_variables_of_torchrun_are_filled_from_those_of_other_launchers(
    environment: dict[str, str], given: dict[str, str], expected: tuple[str | None, ...] | None
) -> None:
    environment.update(given)
    assert _environment.launched() == (expected is not None)
    if expected is not None:
        assert tuple(map(environment.get, NAMES)) == expected


def test_the_first_host_must_be_known(environment: dict[str, str]) -> None:
    environment.update(PMI_RANK="0", PMI_SIZE="4", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="2")
    assert _environment.launched()
    with pytest.raises(OptionError, match=r"MASTER_ADDR.*got ''"):
        _environment.launcher_store(0, 1.0, 0)
