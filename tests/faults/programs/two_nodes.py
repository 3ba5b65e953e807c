"""Two nodes on one machine: two network namespaces, which a pair of virtual interfaces joins.

    python -m tests.faults.programs.two_nodes FOLDER RANKS_PER_NODE finish|cut

makes namespaces that end with this program, starts torchrun on both nodes, and cuts the link in
mid-run if asked to. Each rank trains and leaves a report in the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import zfun as zf
from tests import loopback, models
from zfun import optim

# The processes of the namespaces end when this program's does, and take the network with them.
CONTAINED = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
CONTAINED += ["--mount-proc"]
INTERFACES, ADDRESSES = ("zfun0", "zfun1"), ("10.77.0.1", "10.77.0.2")
STEPS, STAGES, TIMEOUT_S = 3, (1, 3), 4.0


def why_not() -> str:
    """Return the reason why this user cannot make two nodes, or an empty text."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"there is no program {missing[0]}"
    pair = ["ip", "link", "add", INTERFACES[0], "type", "veth", "peer", "name", INTERFACES[1]]
    tried = subprocess.run([*CONTAINED, *pair], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else ""


def run(folder: Path, per_node: int, ending: str, *, limit_s: float) -> list[dict[str, Any]]:
    """Run two nodes; return the report of each rank, with the code and the end of each launcher."""
    command = [*CONTAINED, sys.executable, "-m", "tests.faults.programs.two_nodes", str(folder)]
    done = subprocess.run(
        [*command, str(per_node), ending],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = range(2 * per_node)
    missing = [rank for rank in ranks if not (folder / f"{rank}.json").exists()]
    logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
    assert not missing, f"no report of ranks {missing}: {logs}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]


def train(group: zf.Group, stage: int, steps: int) -> str:
    """Train, and return a hash of the parameters."""
    z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, bucket_bytes=300)
    state = z.init(models.mlp(num_layers=2))
    for step in range(steps):
        batch = models.mlp_batches(step % STEPS + 1, group.size)[step % STEPS][group.rank]
        state, _ = z.step(state, batch)
    whole = b"".join(x.numpy().tobytes() for x in zf.tree.leaves(z.params(state)))
    return hashlib.sha256(whole).hexdigest()


def rank_program(folder: Path, ending: str) -> None:
    torch.set_num_threads(1)
    report = folder / f"{os.environ['RANK']}.json"
    with zf.process_group(timeout_s=TIMEOUT_S if ending == "cut" else 30.0) as group:
        hashes = [train(group, stage, STEPS) for stage in STAGES]
        if ending == "finish":
            report.write_text(json.dumps({"kind": repr(group), "hashes": hashes}))
            return
        (folder / f"{group.rank}.ready").touch()
        try:
            while True:
                train(group, 3, STEPS)
        except zf.ZfunError as error:
            found = {"at": time.monotonic(), "error": type(error).__name__, "text": str(error)}
            report.write_text(json.dumps(found))
            raise


def main(folder: Path, per_node: int, ending: str) -> None:
    """Join two networks, start a launcher in each, and wait for both."""
    other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    there = ["nsenter", f"--net=/proc/{other.pid}/ns/net", "--"]
    while Path(f"/proc/{other.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        time.sleep(0.01)
    pair = ["type", "veth", "peer", "name", INTERFACES[1], "netns", str(other.pid)]
    _do(["ip", "link", "add", INTERFACES[0], *pair])
    launchers = []
    for node, place in enumerate(([], there)):
        _do([*place, "ip", "address", "add", f"{ADDRESSES[node]}/24", "dev", INTERFACES[node]])
        for interface in ("lo", INTERFACES[node]):
            _do([*place, "ip", "link", "set", interface, "up"])
        command = [*place, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", str(per_node), "--node-rank", str(node)]
        command += ["--master-addr", ADDRESSES[0], "--master-port", "29400"]
        command += ["-m", "tests.faults.programs.two_nodes", str(folder), ending]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["GLOO_SOCKET_IFNAME"] = INTERFACES[node]
        log = (folder / f"node{node}.log").open("w")
        launchers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    if ending == "cut":
        while not all((folder / f"{rank}.ready").exists() for rank in range(2 * per_node)):
            assert all(launcher.poll() is None for launcher in launchers), "a launcher ended"
            time.sleep(0.05)
        time.sleep(0.2)
        _do(["ip", "link", "set", INTERFACES[0], "down"])
        (folder / "cut").write_text(str(time.monotonic()))
    codes = [launcher.wait() for launcher in launchers]
    (folder / "codes").write_text(json.dumps(codes))
    (folder / "ended").write_text(str(time.monotonic()))


def _do(command: list[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_program(Path(sys.argv[1]), sys.argv[2])
    else:
        loopback.switch_on()
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
