"""The check at the end of a session finds processes and files."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests import left_over

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


def is_found(process: int) -> bool:
    return any(line.startswith(f"process {process}: ") for line in left_over.processes())


def test_a_process_that_lives_is_found() -> None:
    # The child of a shell that has ended has another parent.
    with subprocess.Popen(["sh", "-c", "sleep 100 & echo $!"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        try:
            shell.wait(5.0)
            # The system shows no environment of a process that is just starting another program.
            deadline = time.monotonic() + 5.0
            while not is_found(child):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            subprocess.run(["kill", "-9", str(child)], check=True)
    time.sleep(0.2)
    assert not is_found(child)


def test_a_file_beside_the_code_is_found() -> None:
    before, path = left_over.files(), left_over.ROOT / "left-over"
    path.touch()
    try:
        assert left_over.files() - before == {str(path)}
    finally:
        path.unlink()
    assert left_over.files() == before
