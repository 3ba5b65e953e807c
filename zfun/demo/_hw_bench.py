"""The command ``zfun hw-bench``: the rates of this machine, measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from zfun import ops, optim, stores
from zfun.collectives import AllGather, AllReduce, Collective, Group, Workers, barrier, record
from zfun.demo._picture import check_folder, check_installed
from zfun.options import PATH, integer, takes
from zfun.planner import Hardware
from zfun.recipes import zero

NUM_MEASUREMENTS = 8
_ROUNDS = 5


class _BenchLoss(NamedTuple):
    bytes_per_s: float
    op_s: float
    flops_per_s: float


class _Network(NamedTuple):
    bytes_per_s: float
    latency_s: float


def measure_hardware(
    path: str | Path,
    *,
    ranks: int,
    mib: int,
    progress: Callable[[], object] = lambda: None,
) -> Hardware:
    """Measure the rates of this machine; medians of a few rounds. See :func:`hw_bench`.

    Of ``flops_per_s``, the lower end of a forecast, the fastest round counts, and of the fields for
    the upper end alone the slowest, except of differences. Processes share the cores, as ranks of
    the CPU do: computation and updates are measured on all ranks at the same time.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     found = measure_hardware(path, ranks=1, mib=1)
        >>> found.flops_per_s > 0 and found.disk > 0
        True
    """
    has_device = torch.cuda.is_available()
    device = torch.device("cuda" if has_device else "cpu")
    with Workers(ranks) as workers:
        flops = max(workers.run(_flops, device))
        progress()
        touch, op_s, least = map(statistics.median, zip(*workers.run(_loss, device), strict=True))
        progress()
        message_s, leaf_s, step_s = map(max, zip(*workers.run(_steps, device), strict=True))
        progress()
        memory = statistics.median(workers.run(_update, device, mib))
        progress()
        host = statistics.median(workers.run(_update, torch.device("cpu"), mib))
        progress()
        link = _copies(device, mib) if has_device else float("inf")
        progress()
        sent = workers.run(_exchange, mib)[0]
        progress()
    disk = _disk(path, mib)
    progress()
    limit = float(torch.cuda.mem_get_info()[1]) if has_device else float("inf")
    return Hardware(
        flops,
        sent.bytes_per_s,
        host_link=link,
        disk=disk,
        memory=memory,
        host_memory=host,
        device_bytes=limit,
        latency_s=sent.latency_s,
        touch=touch,
        op_s=op_s,
        message_s=message_s,
        leaf_s=leaf_s,
        step_s=step_s,
        least_flops_per_s=min(least, flops),
    )


def _seconds(
    run: Callable[[], object],
    device: torch.device,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Return the median time of a call, or the least or the most; the first is not counted."""
    return of([seconds for [seconds] in _turns([run], device)])


def _turns(runs: Sequence[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Return the times of calls that take turns, by turn; the first turn is not counted."""
    found = []
    for _ in range(1 + _ROUNDS):
        times = []
        for run in runs:
            begin = time.perf_counter()
            run()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begin)
        found.append(times)
    return found[1:]


def _flops(group: Group, device: torch.device) -> float:
    side = 8192 if device.type != "cpu" else 1024
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // group.size))
    x = torch.ones(side, side, dtype=dtype, device=device)
    barrier(group)
    return 2 * side**3 / _seconds(lambda: x @ x, device, min)


def _loss(group: Group, device: torch.device) -> _BenchLoss:
    """Return the rates of the slow operations of a loss, forward and back.

    GELU computes most of the element-wise functions, additions of few numbers are all start, and
    a thin product reads as much as it computes.
    """
    large = torch.ones(2**22, device=device, requires_grad=True)
    small = torch.ones(16, device=device, requires_grad=True)
    thin = torch.ones(64, 1024, device=device)
    wide = torch.ones(1024, 1024, device=device)

    def starts() -> None:
        x = small
        for _ in range(100):
            x = x + 1
        x.sum().backward()

    barrier(group)
    gelu = lambda: torch.nn.functional.gelu(large).backward(large.detach())
    # Of an operation, backward counts as two more.
    touched = 3 * 2 * large.nbytes / _seconds(gelu, device, max)
    op_s = _seconds(starts, device, max) / 300
    return _BenchLoss(
        touched, op_s, 2 * 64 * 1024 * 1024 / _seconds(lambda: thin @ wide, device, max)
    )


class _BenchSteps(NamedTuple):
    message_s: float
    leaf_s: float
    step_s: float


def _steps(group: Group, device: torch.device) -> _BenchSteps:
    """Return the seconds of a message, of a leaf and of an empty step, from small steps."""
    sizes = (2, 2**20), (34, 2**20), (34, 1)
    made = [_small_step(group, device, *size) for size in sizes]
    (few, _), _, (many, _) = made
    # Differences within a turn, because another turn may be one of a busier machine.
    turns = _turns([step for _, step in made], device)
    median = lambda found: max(0.0, statistics.median(found))
    leaf_s, message_s = median((leaves - bare) / 32 for bare, leaves, _ in turns), 0.0
    if many > few:
        message_s = median((last - leaves) / (many - few) for _, leaves, last in turns)
    step_s = median(bare - few * message_s - 2 * leaf_s for bare, _, _ in turns)
    return _BenchSteps(message_s, leaf_s, step_s)


def _small_step(
    group: Group, device: torch.device, num_leaves: int, bucket_bytes: int
) -> tuple[int, Callable[[], None]]:
    """Return the number of messages of a step, and the step."""
    params = {f"p{number}": torch.ones(8, device=device) for number in range(num_leaves)}
    loss = lambda p, x: sum((leaf * x).sum() for leaf in p.values())
    recorded = record(group)
    z = zero(3, loss, optim.adamw(1e-4), recorded, bucket_bytes=bucket_bytes)
    state, x = z.init(params), torch.ones(8, device=device)

    def step() -> None:
        nonlocal state
        state, _ = z.step(state, x)

    step()
    recorded.clear()
    step()
    return len(recorded.log), step


def _update(group: Group, device: torch.device, mib: int) -> float:
    """Return the bytes per second that a step of AdamW reads and writes."""
    numel = mib * 2**20 // 16
    param, grad, first, second = (torch.zeros(numel, device=device) for _ in range(4))

    rule = ops.AdamRule(b1=0.9, b2=0.95, step_size=1e-4, eps=1e-8)

    def step() -> None:
        rule(param, grad, first, second, None)

    barrier(group)
    # The parameters and both moments are read and written, the gradients read.
    return 7 * param.nbytes / _seconds(step, device)


def _copies(device: torch.device, mib: int) -> float:
    pinned = torch.empty(mib * 2**20, dtype=torch.uint8, pin_memory=True)
    return pinned.nbytes / _seconds(lambda: pinned.to(device, non_blocking=True), device)


def _exchange(group: Group, mib: int) -> _Network:
    """Return the bytes per second that a rank sends in gathers, and the time of a small message."""
    if group.size == 1:
        return _Network(float("inf"), 0.0)
    cpu = torch.device("cpu")
    small, large = torch.ones(1), torch.ones(mib * 2**18 // group.size)
    latency_s = _seconds(lambda: group.start(Collective(AllReduce(), "loss"), small).wait(), cpu)
    gather = lambda: group.start(Collective(AllGather(), "params"), large).wait()
    return _Network((group.size - 1) * large.nbytes / _seconds(gather, cpu), latency_s)


def _disk(path: str | Path, mib: int) -> float:
    store = stores.nvme(path)
    try:
        x = torch.zeros(mib * 2**20, dtype=torch.uint8)

        def there_and_back() -> None:
            handle = store.put(x, "state")
            store.flush()
            handle.get(torch.device("cpu")).wait()

        return 2 * x.nbytes / _seconds(there_and_back, torch.device("cpu"))
    finally:
        store.close()


@takes(path=PATH, ranks=integer(1), out=PATH, mib=integer(1))
def hw_bench(
    path: str | Path, *, ranks: int = 2, out: str | Path = "hardware.json", mib: int = 256
) -> int:
    """Measure the rates of this machine, print a table, and write a file for ``zfun plan``.

    Args:
        path: a directory on the disk to measure.
        ranks: the local processes that exchange messages; on a host with devices, one for each.
        out: the file.
        mib: MiB of the largest buffer.

    Returns:
        The exit status, 0.

    Raises:
        OptionError: tqdm is missing, ``path`` is no directory, or the folder of ``out`` cannot be
            written.
    """
    check_installed("hw-bench", ["tqdm"])
    from tqdm import tqdm

    check_folder(Path(out).parent)
    with tqdm(total=NUM_MEASUREMENTS, desc="hw-bench", unit="rate") as bar:
        found = measure_hardware(path, ranks=ranks, mib=mib, progress=bar.update)
    found.save(out)
    for name, value in dataclasses.asdict(found).items():
        if value is not None:
            print(f"{name:18}{value:12.4g}")
    print(f"\nwritten: {out}")
    return 0
