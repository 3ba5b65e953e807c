"""Checkpoints on an object store beside the plain client's transfers of the same bytes.

    python benchmarks/stores/objects.py                 # moto's S3 server, in a process of its own
    python benchmarks/stores/objects.py --url s3://bucket/folder --write    # your store

``put`` and ``get`` are those of fsspec's client, between a file in shared memory and the store,
with all defaults. ``zf.save`` hashes every byte too, and ``zf.load`` verifies every byte. Rounds
take all contenders in turn. The server on loopback shares the cores with its client, so the figures
are shares of the plain client's bandwidth, and no bandwidths of a store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zfun as zf
from benchmarks import pages
from zfun.objects import Objects

MIB = 2**20
WIDTH = 1024
_SERVER = """
import logging, time
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
time.sleep(10**6)
"""


@contextlib.contextmanager
def loopback() -> Iterator[str]:
    """Start a server, and return an address in its bucket."""
    import fsspec
    from fsspec.config import conf

    server = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        conf["s3"] = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "key", "secret": "secret"}
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/benchmark"
    finally:
        server.kill()
        server.wait()


def seconds(begin: float) -> float:
    return time.perf_counter() - begin


def one_round(url: str, state: Any, num_bytes: int, step: int) -> dict[str, float]:
    """Transfer by every contender; GB/s."""
    import fsspec

    found: dict[str, float] = {}
    client = fsspec.filesystem(url.partition("://")[0])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        local = Path(folder) / "local"
        local.write_bytes(os.urandom(MIB) * (num_bytes // MIB))
        begin = time.perf_counter()
        client.put(str(local), f"{url}/plain")
        found["put"] = seconds(begin)
        begin = time.perf_counter()
        client.get(f"{url}/plain", str(local))
        found["get"] = seconds(begin)
    client.rm(f"{url}/plain")
    run = f"{url}/run"
    begin = time.perf_counter()
    zf.save(run, state, step=step)
    found["save"] = seconds(begin)
    begin = time.perf_counter()
    zf.load(run, state)
    found["load"] = seconds(begin)
    Objects(run).remove_all(run)
    return {name: num_bytes / taken / 1e9 for name, taken in found.items()}


def measure(url: str, mib: int, rounds: int) -> list[dict[str, float]]:
    num_matrices = mib // (WIDTH * WIDTH * 4 // MIB)
    draw = lambda: torch.randn(WIDTH, WIDTH)
    state = {f"w{i}": draw() for i in range(num_matrices)}
    num_bytes = num_matrices * WIDTH * WIDTH * 4
    one_round(url, state, num_bytes, 0)
    return [one_round(url, state, num_bytes, 1 + number) for number in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="a folder of a store; by default a server on loopback")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 192], help="of each state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    options = parser.parse_args()
    lines = ["| MiB | put | save | save of put | get | load | load of get |", "|---" * 7 + "|"]
    with contextlib.nullcontext(options.url) if options.url else loopback() as url:
        for mib in options.mib:
            found = measure(url, mib, options.rounds)
            middle = lambda pick, found=found: statistics.median(map(pick, found))
            cells = [
                f"{middle(lambda x: x['put']):.3f}",
                f"{middle(lambda x: x['save']):.3f}",
                f"{middle(lambda x: x['save'] / x['put']):.2f}",
                f"{middle(lambda x: x['get']):.3f}",
                f"{middle(lambda x: x['load']):.3f}",
                f"{middle(lambda x: x['load'] / x['get']):.2f}",
            ]
            lines.append(f"| {mib} | {' | '.join(cells)} |")
            print(lines[-1])
    print(*lines, sep="\n")
    if options.write:
        title = f"The store at {options.url}" if options.url else "An S3 server on loopback"
        words = f"GB/s, medians of {options.rounds} rounds; shares are medians of each round's."
        pages.write_section("objects.md", title, f"{pages.environment()} {words}", "\n".join(lines))


if __name__ == "__main__":
    main()
