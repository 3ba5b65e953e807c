"""The host's time of a step: all that a program does before it hands work to a device.

    python benchmarks/gpu/host.py
    python benchmarks/gpu/host.py --rounds 30 --stages 3

The model has the tree of Llama 3 8B and positions that are learnt, 292 leaves in 32 blocks, and
tensors so small that arithmetic costs nothing. Rank 0 of 8 runs over torch's fake process group,
whose collectives send nothing, so only the calls cost time. The buckets are those that the options
by default give to the sizes of Llama 3 8B: a block each. The contenders take turns, and each time
is the CPU time of the thread.

* plain: the loss of a dict, backward, and torch's AdamW (``foreach``, as on a device);
* fsdp2: the same blocks as modules, ``fully_shard`` on each, and the same AdamW;
* zfun-0 to zfun-3: ``zf.zero`` over the group for nccl, its watchdog included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import zfun as zf
from zfun.collectives import Stream
from zfun.collectives.backends._nccl import NativeGroup
from zfun.layout import Layout, layout_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import pages

SIZE, NUM_BLOCKS, LENGTH = 8, 32, 4
Step = Callable[[], Any]
Params = Mapping[str, Tensor]


def shapes_of(width: int, hidden: int, kv: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The leaves of the model."""
    block = {
        "n1": (width,),
        "q": (width, width),
        "k": (width, kv),
        "v": (width, kv),
        "o": (width, width),
        "n2": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    blocks = {
        f"layers.{i}.{name}": shape for i in range(NUM_BLOCKS) for name, shape in block.items()
    }
    return {
        "embed": (vocabulary, width),
        "positions": (vocabulary, width),
        **blocks,
        "norm": (width,),
        "head": (vocabulary, width),
    }


SMALL, LLAMA = shapes_of(8, 8, 8, 128), shapes_of(4096, 14336, 1024, 128256)
# Small blocks share a bucket by default, so a bound closes the buckets where those of Llama close.
BLOCK_BYTES = 4096


def make_params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in SMALL.items()}


def block_of(p: Callable[[str], Tensor], x: Tensor) -> Tensor:
    """A block of Llama with one head, without rotations."""
    h = F.rms_norm(x, x.shape[-1:], p("n1"))
    mixed = F.scaled_dot_product_attention(h @ p("q"), h @ p("k"), h @ p("v"))
    x = x + mixed @ p("o")
    h = F.rms_norm(x, x.shape[-1:], p("n2"))
    return x + (F.silu(h @ p("gate")) * (h @ p("up"))) @ p("down")


def loss_fn(p: Params, tokens: Tensor) -> Tensor:
    x = p["embed"][tokens] + p["positions"][tokens]
    for i in range(NUM_BLOCKS):
        x = block_of(lambda name, i=i: p[f"layers.{i}.{name}"], x)
    return (F.rms_norm(x, x.shape[-1:], p["norm"]) @ p["head"].T).logsumexp(-1).mean()


class Block(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return block_of(lambda name: getattr(self, name), x)


class Llama(nn.Module):
    embed: Tensor
    positions: Tensor
    norm: Tensor
    head: Tensor

    def __init__(self, params: Params) -> None:
        super().__init__()
        outer = {name: value for name, value in params.items() if "." not in name}
        for name, value in outer.items():
            self.register_parameter(name, nn.Parameter(value))
        inner = [f"layers.{i}." for i in range(NUM_BLOCKS)]
        self.layers = nn.ModuleList(
            Block({k.removeprefix(start): v for k, v in params.items() if k.startswith(start)})
            for start in inner
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embed) + F.embedding(tokens, self.positions)
        for layer in self.layers:
            x = layer(x)
        return (F.rms_norm(x, x.shape[-1:], self.norm) @ self.head.T).logsumexp(-1).mean()


def plain(tokens: Tensor) -> Step:
    params = {name: leaf.requires_grad_() for name, leaf in make_params().items()}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3, foreach=True)
    return _torch_step(lambda: loss_fn(params, tokens), optimizer)


def fsdp2(tokens: Tensor) -> Step:
    module, mesh = Llama(make_params()), init_device_mesh("cpu", (SIZE,))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True)
    return _torch_step(lambda: module(tokens), optimizer)


def _torch_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Marks:
    """Marks on a device that is always there already."""

    def add(self) -> Callable[[], bool]:
        return lambda: True


def group_for_nccl() -> NativeGroup:
    """Make the group for nccl over the fake process group, and let its watchdog follow."""
    assert dist.group.WORLD is not None
    group = NativeGroup(dist.group.WORLD, FakeStore(), 0, SIZE, 600.0, None)
    group._marks = dict.fromkeys(Stream, _Marks())  # type: ignore[assignment]
    return group


def zfun(stage: int, group: NativeGroup, tokens: Tensor) -> Step:
    zero = zf.zero(stage, loss_fn, zf.optim.adamw(1e-3), group, bucket_bytes=BLOCK_BYTES)
    state = zero.init(make_params())

    def step() -> None:
        nonlocal state
        state, _ = zero.step(state, tokens)

    return step


def check_buckets() -> Layout:
    """Refuse to measure other buckets than those of Llama 3 8B by default."""
    sizes = {name: torch.empty(shape, device="meta") for name, shape in LLAMA.items()}
    wanted, found = layout_of(sizes, SIZE), layout_of(make_params(), SIZE, BLOCK_BYTES)
    if [bucket.leaves for bucket in wanted.buckets] != [bucket.leaves for bucket in found.buckets]:
        sys.exit(f"buckets differ: {len(found.buckets)} and not the {len(wanted.buckets)} of Llama")
    return found


def measure(stages: list[int], rounds: int) -> dict[str, list[float]]:
    tokens = torch.arange(LENGTH)[None]
    group = group_for_nccl()
    steps = {"plain": plain(tokens), "fsdp2": fsdp2(tokens)}
    steps |= {f"zfun-{stage}": zfun(stage, group, tokens) for stage in stages}
    for step in steps.values():
        for _ in range(4):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            before = time.thread_time()
            step()
            times[name].append(time.thread_time() - before)
    group.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/results/host.md"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    layout = check_buckets()
    times = measure(options.stages, options.rounds)
    dist.destroy_process_group()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    head = (
        f"{NUM_BLOCKS} blocks, {len(layout.leaves)} leaves in {len(layout.buckets)} buckets, rank "
        f"0 of {SIZE}, one thread, {options.rounds} rounds; not run on a GPU"
    )
    lines = [f"{'':8}{'median ms':>10}{'least ms':>10}{'/ plain':>9}{'/ fsdp2':>9}"]
    for name, median in medians.items():
        lines.append(
            f"{name:8}{1e3 * median:10.1f}{1e3 * min(times[name]):10.1f}"
            f"{median / medians['plain']:9.2f}{median / medians['fsdp2']:9.2f}"
        )
    print("\n".join([head, *lines]))
    if options.write:
        print(f"written: {pages.write_table('host.md', 'Llama 3 8B, 8 ranks', head, lines)}")


if __name__ == "__main__":
    main()
