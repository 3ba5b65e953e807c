"""The store on a disk beside plain direct transfers of the same bytes.

    python benchmarks/io.py /local_nvme
    python benchmarks/io.py /local_nvme --write    # into benchmarks/results/io.md

The plain transfers are those of ``benchmarks/direct.py``; the store writes and reads tensors of
64 MiB. Rounds take all contenders in turn, because a shared disk changes speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import direct, pages
from zfun.demo._io_bench import MIB, Setting, measure

# The bytes of a block, the threads, and the bytes of the buffer of each thread.
PLAIN = [(block * MIB, threads, block * MIB) for block in (1, 8) for threads in (1, 2, 4)]
PLAIN += [(block * MIB, threads, 64 * MIB) for block in (1, 8) for threads in (2, 4)]
STORE = [
    Setting(MIB, queue_depth, num_threads)
    for queue_depth, num_threads in ((1, 2), (1, 4), (2, 2), (2, 4), (8, 1), (8, 2), (8, 4))
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=80.0, help="no round begins after that")
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/results/io.md"
    )
    options = parser.parse_args()
    begin = time.monotonic()
    names = [
        f"plain, {block // MIB} MiB of {span // MIB} MiB, {threads} threads"
        for block, threads, span in PLAIN
    ]
    names += [f"store, 1 MiB x {depth}, {threads} threads" for _, depth, threads in STORE]
    found: list[list[tuple[float, float]]] = [[] for _ in names]
    rounds, longest = 0, 0.0
    while time.monotonic() - begin + longest < options.seconds or not rounds:
        start = time.monotonic()
        for (block, threads, span), rates in zip(PLAIN, found, strict=False):
            rates.append(
                direct.rates(
                    options.path, options.mib * MIB, block=block, threads=threads, span=span
                )
            )
        for setting, rates in zip(STORE, found[len(PLAIN) :], strict=True):
            rates.append(measure(options.path, setting, options.mib * MIB))
        rounds, longest = rounds + 1, max(longest, time.monotonic() - start)
    medians = [
        tuple(statistics.median(column) for column in zip(*rates, strict=True)) for rates in found
    ]
    limits = [max(column) for column in zip(*medians[: len(PLAIN)], strict=True)]
    lines = [
        "| | write GB/s | of best plain | read GB/s | of best plain |",
        "|---|---|---|---|---|",
    ]
    for name, (write, read) in zip(names, medians, strict=True):
        lines.append(
            f"| {name} | {write:.2f} | {write / limits[0]:.2f} | {read:.2f} | "
            f"{read / limits[1]:.2f} |"
        )
    head = f"{rounds} rounds of {options.mib} MiB each way, medians; tensors of 64 MiB."
    print(head, *lines, sep="\n")
    if options.write:
        about = f"{pages.environment()} {head}"
        print(pages.write_section("io.md", "Direct transfers", about, "\n".join(lines)))


if __name__ == "__main__":
    main()
