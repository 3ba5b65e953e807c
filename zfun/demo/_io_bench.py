"""Measure which settings of a store on a disk are fastest on a path."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from zfun import stores
from zfun.collectives import Work
from zfun.demo._picture import FAINT, INK, check_folder, check_installed, dress
from zfun.options import PATH, integer, takes
from zfun.tables import in_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDED = ("matplotlib", "tqdm")
MIB = 2**20
# Bytes of a tensor: a bucket of a model of billions of parameters.
_TENSOR_BYTES = 64 * MIB
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00")


class Setting(NamedTuple):
    """Options of :func:`zfun.stores.nvme`."""

    block_size: int
    queue_depth: int
    num_threads: int

    def __str__(self) -> str:
        return (
            f"block_size={self.block_size}, queue_depth={self.queue_depth}, "
            f"num_threads={self.num_threads}"
        )


class Rate(NamedTuple):
    """The bytes per second of one setting: medians of the rounds, in GB/s."""

    setting: Setting
    write: float
    read: float


GRID = tuple(
    Setting(block_size, queue_depth, num_threads)
    for block_size, queue_depth, num_threads in itertools.product((MIB,), (1, 2, 8), (1, 2, 4, 8))
)


def sweep(
    path: str | Path,
    *,
    num_bytes: int,
    rounds: int,
    grid: Sequence[Setting] = GRID,
    progress: Callable[[], object] = lambda: None,
) -> list[Rate]:
    """Measure each setting by writes and reads of tensors through a store.

    Rounds take the settings in turn, so that a disk that changes speed treats all alike. Each
    measurement transfers ``num_bytes``, and then calls ``progress``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     rates = sweep(path, num_bytes=4096, rounds=1, grid=[Setting(4096, 1, 1)])
        >>> len(rates), rates[0].read > 0
        (1, True)
    """
    found: list[list[tuple[float, float]]] = [[] for _ in grid]
    for _ in range(rounds):
        for setting, rates in zip(grid, found, strict=True):
            rates.append(measure(path, setting, num_bytes))
            progress()
    return [
        Rate(setting, *(statistics.median(column) for column in zip(*rates, strict=True)))
        for setting, rates in zip(grid, found, strict=True)
    ]


def measure(path: str | Path, setting: Setting, num_bytes: int) -> tuple[float, float]:
    """Return the GB/s of one write and of one read of all tensors."""
    store = stores.nvme(path, **setting._asdict())
    count, numel = max(1, num_bytes // _TENSOR_BYTES), min(num_bytes, _TENSOR_BYTES)
    random = torch.randint(0, 256, (numel,), dtype=torch.uint8)
    try:
        # A step writes to a part of the file that earlier steps have written, and reads into memory
        # that earlier reads have filled.
        handles = [store.put(random, "state") for _ in range(count)]
        values = _read(handles)
        del handles
        begin = time.perf_counter()
        handles = [store.put(values[index % len(values)], "state") for index in range(count)]
        store.flush()
        written = time.perf_counter()
        del values
        _read(handles)
        end = time.perf_counter()
    finally:
        store.close()
    moved = count * numel / 1e9
    return moved / (written - begin), moved / (end - written)


def _read(handles: Sequence[stores.Stored]) -> list[torch.Tensor]:
    """Read tensors, of which three are under way at a time; return the last three."""
    works: list[Work] = []
    for handle in handles:
        works = [*works[-2:], handle.get(handle.store.device)]
        works[0].wait()
    return [work.wait() for work in works]


def best(rates: Sequence[Rate]) -> Rate:
    """Return the setting of the largest sum of writes and reads.

    A step reads as many bytes as are written. Of settings within 3 %, take the fewest threads and
    the smallest depth, because the difference is noise and each thread has memory of its own.

    Example:
        >>> slow, fast = (Setting(4096, 1, threads) for threads in (1, 4))
        >>> best([Rate(fast, 2.01, 2.0), Rate(slow, 2.0, 2.0)]).setting.num_threads
        1
    """
    most = max(rate.write + rate.read for rate in rates)
    near = [rate for rate in rates if rate.write + rate.read >= 0.97 * most]
    return min(near, key=lambda rate: (rate.setting.num_threads, rate.setting))


def rates_table(rates: Sequence[Rate]) -> str:
    """Return a table of all settings, the best one marked."""
    chosen = best(rates)
    rows = [("block size", "queue depth", "threads", "write GB/s", "read GB/s")]
    rows += [(*map(str, rate.setting), f"{rate.write:.2f}", f"{rate.read:.2f}") for rate in rates]
    lines = in_columns(rows).splitlines()
    lines[1 + rates.index(chosen)] += "  <- best"
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def draw_rates(rates: Sequence[Rate], path: Path) -> Path:
    """Draw writes and reads over the number of threads; return the file."""
    from zfun import drawing

    chosen = best(rates)
    figure = drawing.blank(10, 4.4, f"Fastest: {chosen.setting}")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("write", "read"), strict=True):
        _draw_one(axes, rates, chosen, name)
    panels[0].set_ylabel("GB/s", color=INK)
    panels[1].legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_one(axes: Axes, rates: Sequence[Rate], chosen: Rate, name: str) -> None:
    shapes = sorted({(rate.setting.block_size, rate.setting.queue_depth) for rate in rates})
    threads = sorted({rate.setting.num_threads for rate in rates})
    for (block_size, queue_depth), colour in zip(shapes, itertools.cycle(COLOURS), strict=False):
        line = [
            (threads.index(rate.setting.num_threads), getattr(rate, name))
            for rate in rates
            if rate.setting[:2] == (block_size, queue_depth)
        ]
        axes.plot(
            *zip(*line, strict=True),
            "o-",
            color=colour,
            label=f"{block_size / MIB:g} MiB x {queue_depth}",
        )
    axes.plot(
        threads.index(chosen.setting.num_threads),
        getattr(chosen, name),
        "o",
        markersize=14,
        markerfacecolor="none",
        markeredgecolor=FAINT,
        label="fastest",
    )
    axes.set_xticks(range(len(threads)), [str(count) for count in threads])
    axes.set_xlabel("threads", color=INK)
    axes.set_ylim(bottom=0)
    dress(axes, name, "y")


@takes(path=PATH, num_bytes=integer(4096), rounds=integer(1), out=PATH)
def io_bench(
    path: str | Path, *, num_bytes: int = 2**30, rounds: int = 3, out: str | Path = "zfun-io"
) -> int:
    """Measure a disk, print a table and the settings to paste, and draw a picture.

    Args:
        path: a directory on the disk.
        num_bytes: bytes that each measurement writes and reads; the disk needs twice as much room.
        rounds: measurements of each setting.
        out: folder for the picture.

    Returns:
        The exit status, 0.

    Raises:
        OptionError: a package of the extra ``demo`` is missing, ``path`` is no directory, or
            ``out`` cannot be written.
        OffloadError: the disk has too little room, or fails.
    """
    check_installed("io-bench", NEEDED)
    from tqdm import tqdm

    stores.nvme(path).close()  # refuses a path that is no directory
    folder = check_folder(out)
    with tqdm(total=rounds * len(GRID), desc=f"io-bench {path}", unit="run") as bar:
        rates = sweep(path, num_bytes=num_bytes, rounds=rounds, grid=GRID, progress=bar.update)
    chosen = best(rates)
    picture = draw_rates(rates, folder / "io.png")
    print(
        f"\n{rates_table(rates)}\n\nPicture: {picture}\nFastest settings:\n\n"
        f"    zf.stores.nvme({str(path)!r}, {chosen.setting})"
    )
    return 0
