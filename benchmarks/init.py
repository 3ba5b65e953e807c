"""The peak of a process while the first state of a run is made.

    python benchmarks/init.py                          # two ranks, 114M parameters
    python benchmarks/init.py --only "zfun-3, deferred" --preset small
    python benchmarks/init.py --write                  # into benchmarks/results/init.md

Every contender runs in fresh processes, one for each rank. All states count: parameters, AdamW's
two moments and, in bfloat16, master weights. A contender "from the model" gets the values of a
model that the rank holds whole; "deferred" has an initialiser for each leaf; "safetensors" reads
the files of a folder; "disk" keeps all states in a file.

peak: the largest resident set during the init less the resident set before, VmHWM less VmRSS; the
model of "from the model" counts. state: the bytes of the result in memory, shared memory included.
buffers: the states of one bucket on the way to a disk, and the pages in which threads write. bound:
1.1 x (state + largest leaf + buffers) + 100 MB, which the contenders of zfun without a whole model
must keep, or the script fails.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import math
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zfun as zf
from zfun.collectives import Workers, barrier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import pages
from benchmarks.contenders import LEARNING_RATE, model_of
from zfun.demo._memory import forget_peak, peak_bytes

MB = 1e6


@dataclass(frozen=True)
class Case:
    """The task of the ranks.

    Attributes:
        name: of the contender.
        preset: of the model.
        folder: with the safetensors files, and room for a store.
    """

    name: str
    preset: str
    folder: str


@dataclass(frozen=True)
class Found:
    """The measurements of a rank, in bytes and seconds."""

    peak: int
    state: int
    largest: int
    buffers: int
    seconds: float


def initialise(path: str, spec: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    return torch.empty(spec.shape, dtype=spec.dtype).normal_(0.0, 0.02, generator=generator)


def specs(preset: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        return zf.functional(model_of(preset).build()).params


def moments(params: Any) -> Any:
    """AdamW's state of parameters of torch, which its first step would make."""
    return [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]


def ddp(case: Case, group: zf.Group) -> Any:
    module = nn.parallel.DistributedDataParallel(model_of(case.preset).build())
    return module, moments(module.parameters())


def fsdp2(case: Case, group: zf.Group) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        module = model_of(case.preset).build()
    blocks: Any = getattr(module, "blocks", ())
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    for param in module.parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        local.detach().normal_(0.0, 0.02)
    return module, moments(module.parameters())


def start(params: Any, group: zf.Group, **options: Any) -> Any:
    rule = zf.optim.adamw(LEARNING_RATE)
    return zf.zero(3, lambda params, batch: torch.zeros(()), rule, group, **options).init(params)


def from_model(case: Case, group: zf.Group) -> Any:
    params = zf.functional(model_of(case.preset).build()).params
    return start(params, group), params


def deferred(**options: Any) -> Callable[[Case, zf.Group], Any]:
    def make(case: Case, group: zf.Group) -> Any:
        return start(zf.sources.initialised(specs(case.preset), initialise), group, **options)

    return make


def safetensors(**options: Any) -> Callable[[Case, zf.Group], Any]:
    def make(case: Case, group: zf.Group) -> Any:
        params = zf.sources.safetensors(case.folder, specs(case.preset))
        return start(params, group, **options)

    return make


def on_disk(
    make: Callable[..., Callable[[Case, zf.Group], Any]], **options: Any
) -> Callable[[Case, zf.Group], Any]:
    def with_store(case: Case, group: zf.Group) -> Any:
        store = zf.stores.nvme(case.folder)
        offload = zf.stores.Offload(params=store, optimizer=store)
        return make(offload=offload, **options)(case, group), store

    return with_store


HALF = torch.bfloat16
CONTENDERS: dict[str, Callable[[Case, zf.Group], Any]] = {
    "ddp": ddp,
    "fsdp2, meta": fsdp2,
    "zfun-3, from the model": from_model,
    "zfun-3, deferred": deferred(),
    "zfun-3, safetensors": safetensors(),
    "zfun-3, deferred, bf16": deferred(precision=HALF),
    "zfun-3, safetensors, bf16": safetensors(precision=HALF),
    "zfun-3, deferred, disk": on_disk(deferred),
    "zfun-3, safetensors, disk": on_disk(safetensors),
    "zfun-3, safetensors, bf16, disk": on_disk(safetensors, precision=HALF),
}


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors that a result holds in memory."""
    if isinstance(value, nn.Module):
        return [p.to_local() if hasattr(p, "to_local") else p for p in value.parameters()]
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return [x for part in value for x in tensors_of(part)]
    found = [
        x.to_local() if hasattr(x, "to_local") else x
        for x in zf.tree.leaves(value)
        if isinstance(x, Tensor)
    ]
    return [x for x in found if not x.is_meta]


def measure(group: zf.Group, case: Case) -> Found:
    """Make the state on one rank."""
    torch.set_num_threads(1)
    make = CONTENDERS[case.name]
    # A tiny model loads libraries and compiles kernels.
    tiny = Case(case.name, "tiny", f"{case.folder}/tiny")
    make(tiny, group)
    barrier(group)
    largest = max(leaf.numel() * leaf.itemsize for leaf in specs(case.preset).values())
    gc.collect()
    baseline = resident_bytes()
    forget_peak()
    began = time.perf_counter()
    result = make(case, group)
    seconds = time.perf_counter() - began
    peak = peak_bytes() - baseline
    state = sum(x.nbytes for x in tensors_of(result))
    found = Found(peak, state, largest, buffers_of(case, group.size), seconds)
    barrier(group)
    return found


def buffers_of(case: Case, size: int) -> int:
    """The bytes of the states of one bucket, and of the pages of the threads that write."""
    if "disk" not in case.name:
        return 0
    # In bfloat16: parameters, and in float32 unrounded parameters, master weights and two moments.
    itemsize, others = (2, 16) if "bf16" in case.name else (4, 8)
    dtype = HALF if "bf16" in case.name else None
    layout = zf.layout.layout_of(specs(case.preset), size, dtype=dtype)
    numel = max(bucket.padded_numel for bucket in layout.buckets) // size
    store = inspect.signature(zf.stores.nvme).parameters
    pages = (store[name].default for name in ("num_threads", "block_size", "queue_depth"))
    return numel * (itemsize + others) + math.prod(pages)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def write_folder(folder: Path, preset: str) -> None:
    """Write a model in two files, as large models are stored."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    leaves = {path: initialise(path, spec) for path, spec in specs(preset).items()}
    places: dict[str, str] = {}
    for number in (0, 1):
        part = dict(list(leaves.items())[number::2])
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="medium")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/results/init.md"
    )
    options = parser.parse_args()
    numel = sum(leaf.numel() for leaf in specs(options.preset).values())
    lines = ["| | peak MB | state MB | buffers MB | bound MB | s |", "|---|---|---|---|---|---|"]
    over = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        write_folder(Path(name), options.preset)
        write_folder(Path(name) / "tiny", "tiny")
        for contender in options.only:
            case = Case(contender, options.preset, str(Path(name).resolve()))
            with Workers(options.ranks, timeout_s=300.0) as workers:
                ranks = workers.run(measure, case)
            worst = max(ranks, key=lambda found: found.peak)
            bound = 1.1 * (worst.state + worst.largest + worst.buffers) + 100 * MB
            is_bound = "zfun" in contender and "from the model" not in contender
            if is_bound and worst.peak > bound:
                over.append(contender)
            lines.append(
                f"| {contender} | {worst.peak / MB:,.0f} | {worst.state / MB:,.0f} | "
                f"{worst.buffers / MB:,.0f} | "
                f"{f'{bound / MB:,.0f}' if is_bound else ''} | {worst.seconds:.1f} |"
            )
            print(lines[-1], flush=True)
    largest = max(leaf.numel() * leaf.itemsize for leaf in specs(options.preset).values())
    head = (
        f"{numel / MB:.0f}M parameters on {options.ranks} ranks, the largest leaf "
        f"{largest / MB:.0f} MB; the rank with the larger peak."
    )
    print(head, *lines, sep="\n")
    if options.write:
        about = f"{pages.environment()} {head}"
        print(pages.write_section("init.md", "Peak of an init", about, "\n".join(lines)))
    if over:
        raise SystemExit(f"above the bound: {', '.join(over)}")


if __name__ == "__main__":
    main()
