"""The hash of zfun's own kernel beside those of packages, and a save with each.

    pip install xxhash blake3
    python benchmarks/stores/checksums.py /local_nvme --write

Bytes are chunks of 1 MiB, more than the caches hold. The speed is by the time of the CPU, because
other programs may share the cores. Saves are of 384 MiB on one rank, with 4 threads that hash and
write; rounds take all contenders in turn. ``none`` hashes nothing. The first use is that of a new
process, with an empty folder of machine code and with a full one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zfun as zf
from benchmarks import pages
from zfun.checkpoint.format import _hash, _write

MIB = 2**20
_FIRST = """
import time, numpy as np, torch, zfun
from zfun.checkpoint.format._hash import digest_of
begin = time.process_time()
digest_of("xxh64", np.zeros(64, np.uint8))
print(time.process_time() - begin)
"""


def contenders() -> dict[str, Callable[[Any], Any]]:
    xxhash, blake3 = map(importlib.import_module, ("xxhash", "blake3"))
    return {
        "own kernel, XXH64": lambda data: _hash.digest_of("xxh64", data),
        "xxhash, XXH64": xxhash.xxh64_hexdigest,
        "xxhash, XXH3 of 64 bits": xxhash.xxh3_64_hexdigest,
        "xxhash, XXH3 of 128 bits": xxhash.xxh3_128_hexdigest,
        "blake3": lambda data: blake3.blake3(data).hexdigest(),
        "hashlib, SHA-256": lambda data: hashlib.sha256(data).hexdigest(),
    }


def speeds(rounds: int) -> dict[str, float]:
    """GB/s of one thread."""
    generator = np.random.default_rng(1)
    chunks = [generator.integers(0, 256, MIB, np.uint8) for _ in range(64)]
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, digest in contenders().items():
            begin = time.process_time()
            for chunk in chunks:
                digest(chunk)
            taken = time.process_time() - begin
            found.setdefault(name, []).append(len(chunks) * MIB / taken / 1e9)
    return {name: statistics.median(values) for name, values in found.items()}


def named(digest: Callable[[Any], Any]) -> Callable[[str, np.ndarray], str]:
    """Return a hash as the library calls it."""

    def digest_of(name: str, data: np.ndarray) -> str:
        # A manifest has 16 digits of each chunk.
        return digest(data)[:16]

    return digest_of


def saves(folder: Path, rounds: int) -> dict[str, float]:
    """The time of a save, as a share of the one with the own kernel in the same round."""
    state = {f"w{i}": torch.randn(1024, 1024) for i in range(96)}
    digests: dict[str, Any] = {name: f for name, f in contenders().items() if "XXH" in name}
    digests["none"] = lambda data: "0" * 16
    found: dict[str, list[float]] = {name: [] for name in digests}
    own = _write.digest_of
    with tempfile.TemporaryDirectory(dir=folder) as path:
        for step in range(rounds):
            for name, digest in digests.items():
                setattr(_write, "digest_of", named(digest))  # noqa: B010, for the type checker
                begin = time.perf_counter()
                zf.save(f"{path}/{name}", state, step=step, keep=1)
                found[name].append(time.perf_counter() - begin)
    _write.digest_of = own
    base = found["own kernel, XXH64"]
    return {
        name: statistics.median(x / y for x, y in zip(values, base, strict=True))
        for name, values in found.items()
    }


def first_uses() -> tuple[float, float]:
    """Seconds of the first hash of a process: compiled, and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", _FIRST]
        new, kept = (
            float(subprocess.check_output(command, text=True, env=environment)) for _ in range(2)
        )
    return new, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a folder on the disk of the saves")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    options = parser.parse_args()
    new, kept = first_uses()
    rates, shares = speeds(options.rounds), saves(options.path, options.rounds)
    lines = ["| hash | GB/s of one thread | time of a save |", "|---|---|---|"]
    for name in dict.fromkeys([*rates, *shares]):
        cells = (
            f"{rates[name]:.1f}" if name in rates else "–",
            f"{shares[name]:.2f}" if name in shares else "–",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = (
        f"The first hash of a process takes {new:.2f} s of the CPU where the kernel is compiled, once on a "
        f"machine, and {kept:.2f} s where it is loaded."
    )
    print(*lines, text, sep="\n")
    if options.write:
        head = f"{pages.environment()} Medians of {options.rounds} rounds."
        pages.write_section("checkpoint.md", "Checksums", head, "\n".join(lines), text)


if __name__ == "__main__":
    main()
