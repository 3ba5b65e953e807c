"""How long the first steps of a program compile CPU kernels, where no machine code is kept.

    python benchmarks/cold_start.py

Each run trains a toy model for two steps (stage 3, AdamW, two ranks), in new processes, with an
empty folder for Numba's machine code: once with ranks as threads, once with ranks as processes, and
once more over the folder that the processes filled. A line has the seconds that the slowest process
compiled, loaded or waited for kernels, and the wall time of the two steps of that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import zfun as zf


def train(group: zf.Group) -> tuple[float, dict[str, float]]:
    """Take two steps; return the wall time and the seconds that each kernel was compiled for."""
    from zfun.ops import numba

    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(64, 64, generator=generator) for name in ("first", "second")}

    def loss(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params["first"]) @ params["second"]).square().mean()

    z = zf.zero(3, loss, zf.optim.adamw(1e-3), group)
    start, state = time.perf_counter(), z.init(params)
    for _ in range(2):
        state, _info = z.step(state, torch.randn(8, 64, generator=generator))
    return time.perf_counter() - start, numba.seconds_compiled()


def run(kind: str) -> None:
    found = zf.simulate(2, train) if kind == "threads" else zf.collectives.spawn(2, train)
    seconds, kernels = max(found, key=lambda pair: sum(pair[1].values()))
    parts = ", ".join(f"{name} {spent:.2f}" for name, spent in kernels.items())
    print(
        f"compiled {sum(kernels.values()):.2f} s, steps {seconds:.2f} s ({parts or 'no kernel'})",
        flush=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        runs = (("threads", first), ("processes", second), ("processes, kept", second))
        for name, folder in runs:
            print(f"{name}: ", end="", flush=True)
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            command = [sys.executable, __file__, name.split(",")[0]]
            subprocess.run(command, check=True, env=environment, timeout=300)


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
