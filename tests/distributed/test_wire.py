"""Bytes on the wire, counted by the system's own counters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import loopback

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
]


def test_a_step_sends_two_or_three_times_the_parameters() -> None:
    """Ranks send the parameters and gradients of the stage; all other bytes, headers included, stay
    below one percent.
    """
    if not loopback.can_have_own_network():
        pytest.skip(
            "this user may not make network namespaces, and on the common loopback others are "
            "heard too"
        )
    command = [*loopback.OWN_NETWORK, sys.executable, "-m", "tests.loopback"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stderr
    sent = json.loads(run.stdout)
    assert list(sent) == ["0", "1", "2", "3"]
    for stage, times in sent.items():
        expected = 3.0 if stage == "3" else 2.0
        assert expected <= times <= 1.01 * expected, (
            f"stage {stage} sends {times:.4f} times the parameters"
        )
