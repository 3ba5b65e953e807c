"""Two nodes: training across a network that is real to the ranks, and that is cut."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import zfun as zf
from tests.faults.programs import two_nodes

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

# From the cut to the error: the wait for the other rank, and for the answers of the store.
LATE_S = two_nodes.TIMEOUT_S + 4.0
# A launcher ends the ranks first.
LAUNCHER_S = 20.0


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    if reason := two_nodes.why_not():
        pytest.skip(reason)


@pytest.mark.parametrize("per_node", [1, 2])
def test_two_nodes_train_to_the_bits_of_the_simulation(per_node: int, tmp_path: Path) -> None:
    reports = two_nodes.run(tmp_path, per_node, "finish", limit_s=180.0)
    for stage, hashes in zip(
        two_nodes.STAGES, zip(*(report["hashes"] for report in reports), strict=True), strict=True
    ):
        simulated = zf.simulate(2 * per_node, two_nodes.train, stage, two_nodes.STEPS)
        assert list(hashes) == simulated, stage
    # Ranks of two networks share no memory, even on one machine.
    kind = {1: "ExchangeGroup", 2: "HostsGroup"}[per_node]
    assert all(kind in report["kind"] for report in reports)
    assert json.loads((tmp_path / "codes").read_text()) == [0, 0]


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_cut_link_is_an_error_that_names_a_rank_of_the_other_node(
    per_node: int, tmp_path: Path
) -> None:
    """A rank may also name a neighbour on its node, which has ended because of the link.

    The store is on one of the nodes, so on the other node no rank can tell why it ends.
    """
    reports = two_nodes.run(tmp_path, per_node, "cut", limit_s=180.0)
    cut_at = float((tmp_path / "cut").read_text())
    nodes_with_the_cause = set()
    for rank, report in enumerate(reports):
        assert report["error"] == "PeerLost", report
        named = re.match(rf"rank {rank} lost rank (\d+) in collective \d+ ", report["text"])
        assert named, report
        if int(named[1]) // per_node != rank // per_node:
            nodes_with_the_cause.add(rank // per_node)
        assert report["at"] - cut_at < LATE_S, report
    assert nodes_with_the_cause == {0, 1}, reports
    assert json.loads((tmp_path / "codes").read_text()) == [1, 1]
    assert float((tmp_path / "ended").read_text()) - cut_at < LATE_S + LAUNCHER_S
