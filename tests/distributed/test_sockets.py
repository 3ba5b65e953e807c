"""Sockets: processes listen on the loopback interface only, and send what the formula says."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests import loopback
from tests.distributed import needs_shared_memory, processes
from zfun.collectives import Group

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; network namespaces"),
]
_LISTENS = "0A"


def listening(group: Group | None = None) -> dict[str, str]:
    """Return the address of each listening TCP socket of this process, by inode."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # The descriptor of the folder itself is closed again.
        with contextlib.suppress(OSError):
            own.add(str(descriptor.readlink()))
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in own:
                found[fields[9]] = _address(fields[1].partition(":")[0])
    return found


def _address(text: str) -> str:
    """The kernel prints words of 32 bits in the byte order of the machine."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


@pytest.mark.parametrize("shared_memory", [False, pytest.param(True, marks=needs_shared_memory)])
def test_spawned_processes_listen_on_the_loopback_interface_only(shared_memory: bool) -> None:
    before = listening()
    with processes(2, timeout_s=40.0, shared_memory=shared_memory) as workers:
        ranks = workers.run(listening)
        parent = [address for inode, address in listening().items() if inode not in before]
    addresses = parent + [address for rank in ranks for address in rank.values()]
    # The store of the parent, and gloo in each rank.
    assert len(parent) == 1
    assert all(ranks)
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_step_sends_two_or_three_times_the_parameters() -> None:
    """Ranks send the parameters and gradients of the stage; all other bytes, headers included, stay
    below one percent. By default two of the four buckets stay for backward.
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
    expected_times = {"0": 2.0, "1": 2.0, "2": 2.0, "3": 3.0, "3, default": 2.5}
    assert list(sent) == list(expected_times)
    for stage, times in sent.items():
        expected = expected_times[stage]
        assert expected <= times <= 1.01 * expected, (
            f"stage {stage} sends {times:.4f} times the parameters"
        )
