"""The hash of a checkpoint's chunks beside others, and a save with each.

    pip install blake3
    python benchmarks/stores/checksums.py /local_nvme --write

Bytes are chunks of 1 MiB, more than the caches hold. The speed is by the time of the CPU, because
other programs may share the cores. Saves are of 384 MiB on one rank, with 4 threads that hash and
write; rounds take all contenders in turn. ``none`` hashes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import statistics
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
from zfun.checkpoint.format import _write, digest_of

MIB = 2**20
OURS = "xxhash, XXH64, of zfun"


def contenders() -> dict[str, Callable[[Any], Any]]:
    xxhash, blake3 = map(importlib.import_module, ("xxhash", "blake3"))
    return {
        OURS: lambda data: digest_of("xxh64", data),
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
    """The time of a save, as a share of zfun's own in the same round."""
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
    base = found[OURS]
    return {
        name: statistics.median(x / y for x, y in zip(values, base, strict=True))
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a folder on the disk of the saves")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    options = parser.parse_args()
    rates, shares = speeds(options.rounds), saves(options.path, options.rounds)
    lines = ["| hash | GB/s of one thread | time of a save |", "|---|---|---|"]
    for name in dict.fromkeys([*rates, *shares]):
        cells = (
            f"{rates[name]:.1f}" if name in rates else "–",
            f"{shares[name]:.2f}" if name in shares else "–",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    print(*lines, sep="\n")
    if options.write:
        head = f"{pages.environment()} Medians of {options.rounds} rounds."
        pages.write_section("checkpoint.md", "Checksums", head, "\n".join(lines))


if __name__ == "__main__":
    main()
