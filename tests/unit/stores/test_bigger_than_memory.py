"""The example whose state is larger than the memory of the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "examples" / "bigger_than_memory.py"


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), "--path", str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        # The first run compiles all kernels, as on a new machine.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "2",
            "NUMBA_CACHE_DIR": str(path.parent / "machine code"),
        },
    )


@pytest.mark.slow
@pytest.mark.processes
def test_the_peak_of_the_example_does_not_grow_with_the_depth(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    tmp_path = tmp_path / "disk"
    tmp_path.mkdir()
    peaks = []
    for num_blocks in (6, 24):
        done = run(tmp_path, "--blocks", str(num_blocks), "--width", "512", "--steps", "3")
        assert done.returncode == 0, done.stderr
        assert "3/3" in done.stderr
        number = r"([0-9.]+)"
        found = re.search(rf"loss {number} -> {number};.* peak resident {number} GB", done.stdout)
        assert found is not None, done.stdout
        first, last, peak = map(float, found.groups())
        assert last < first
        peaks.append(peak)
    # The deeper model has 0.91 GB more of state.
    assert peaks[1] < 1.1 * peaks[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.processes
def test_the_system_refuses_memory_beyond_the_limit() -> None:
    """Outside of the limit too much is an error, for torch and for Python."""
    pytest.importorskip("tqdm")
    program = """
import bigger_than_memory, torch
bigger_than_memory.limit_memory(600 * 2**20)
kept = torch.ones(100 * 2**20, dtype=torch.uint8)
for allocate in (lambda n: torch.ones(n, dtype=torch.uint8), bytearray):
    try:
        allocate(500 * 2**20)
    except (RuntimeError, MemoryError) as error:
        print("refused", type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{PROGRAM.parent}"},
    )
    assert done.stdout == "refused RuntimeError\nrefused MemoryError\n"


def test_the_example_fits_on_two_pages() -> None:
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 125
    assert max(map(len, lines)) <= 100
