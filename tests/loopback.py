"""Bytes on the wire as the system counts them on the loopback interface, which gloo ranks use.

A separate network namespace has no other traffic. As a program, this module prints the bytes that a
step of each stage sends, as JSON, without buckets that stay for backward and with them:

    unshare --map-root-user --net python -m tests.loopback
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zfun as zf
from zfun import optim
from zfun.collectives import Workers

OWN_NETWORK = ["unshare", "--map-root-user", "--net"]
_SET_FLAGS, _UP = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP

TURNS, STEPS = 5, 2
PARAMS = {f"w{index}": (512, 512) for index in range(4)}


def can_have_own_network() -> bool:
    """Whether this user may start a program in a network namespace."""
    if shutil.which(OWN_NETWORK[0]) is None:
        return False
    return subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0


def switch_on() -> None:
    """Switch on the loopback interface, which is off in a new namespace."""
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))


def received_bytes() -> int:
    """Return the bytes that the loopback interface has received, including headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise OSError("there is no loopback interface in /proc/net/dev")


def idle_bytes_per_s(seconds: float = 0.5) -> float:
    """Return the background traffic of the interface, in bytes per second."""
    before, began = received_bytes(), time.perf_counter()
    time.sleep(seconds)
    return (received_bytes() - before) / (time.perf_counter() - began)


_held: dict[str, Any] = {}


def begin(group: zf.Group, stage: int, reuse_distance: int | None) -> None:
    """Make the state of a stage and take the first step, which also sends the order of use."""

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for weight in params.values():
            x = torch.tanh(x @ weight)
        return x.pow(2).mean()

    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator) * 0.05 for name, shape in PARAMS.items()
    }
    schedule = zf.ScheduleOptions(reuse_distance=reuse_distance)
    z = zf.zero(stage, loss_fn, optim.adamw(1e-3), group, bucket_bytes=2**20, schedule=schedule)
    _held["step"], _held["state"] = z.step, z.init(params)
    take(group, 1)


def take(group: zf.Group, steps: int) -> None:
    for step in range(steps):
        _held["state"], _ = _held["step"](
            _held["state"], torch.full((2, 512), 0.1 * (step + group.rank))
        )


def per_step() -> Iterator[tuple[str, float]]:
    """Yield (stage, bytes of a step of all ranks / bytes of all parameters)."""
    size = 4 * sum(a * b for a, b in PARAMS.values())
    with Workers(2, timeout_s=120.0, shared_memory=False) as workers:
        cases: dict[str, tuple[int, int | None]] = {
            str(stage): (stage, None) for stage in (0, 1, 2)
        }
        cases |= {"3": (3, 0), "3, default": (3, None)}
        for name, (stage, reuse_distance) in cases.items():
            workers.run(begin, stage, reuse_distance)
            # The median of several turns, because a stalled machine makes the system send twice.
            yield name, statistics.median(_sent(workers) for _ in range(TURNS)) / STEPS / size


def _sent(workers: Workers) -> int:
    before = received_bytes()
    workers.run(take, STEPS)
    return received_bytes() - before


if __name__ == "__main__":
    switch_on()
    print(json.dumps(dict(per_step())))
