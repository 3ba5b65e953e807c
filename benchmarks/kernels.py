"""CPU kernels against the least that their bytes can cost, and against torch's own; interleaved.

    python benchmarks/kernels.py --threads 1 --numel 32000000 --rounds 9

The limit of a kernel is a loop that reads and writes the same arrays and computes next to nothing.
The loop runs before and after the kernel in every round. ``of limit`` is the median over rounds of
the mean time of the loop divided by the time of the kernel. Torch's contender is the fused or
``_foreach`` form of the same update; where torch needs several calls (a cast), the times
are added. DeepSpeed's Adam takes part where DeepSpeed is installed; the first use
compiles the kernel, with the ninja beside python:

    make bench-deepspeed BENCH_FLAGS="--preset many --rounds 1"    # makes the environment
    PATH="$PWD/.venv-deepspeed/bin:$PATH" python benchmarks/kernels.py --only adamw
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zfun import ops
from zfun.ops._tensors import as_array
from zfun.ops.numba._compile import in_parts, jit

Run = Callable[[], object]
BF16, FP32 = torch.bfloat16, torch.float32


@jit
def _limit_of_four(p: Any, g: Any, m: Any, v: Any, begin: Any, end: Any) -> None:
    ps, gs, ms, vs = p[begin:end], g[begin:end], m[begin:end], v[begin:end]
    for i in range(ps.size):
        x = np.float32(gs[i])
        ps[i] += x
        ms[i] += x
        vs[i] += x


@jit
def _limit_of_three(p: Any, g: Any, m: Any, begin: Any, end: Any) -> None:
    ps, gs, ms = p[begin:end], g[begin:end], m[begin:end]
    for i in range(ps.size):
        x = np.float32(gs[i])
        ps[i] += x
        ms[i] += x


@jit
def _limit_of_two(p: Any, g: Any, begin: Any, end: Any) -> None:
    ps, gs = p[begin:end], g[begin:end]
    for i in range(ps.size):
        ps[i] += gs[i]


@jit
def _limit_of_lamb(p: Any, g: Any, m: Any, v: Any, begin: Any, end: Any) -> None:
    """A pass for the norms, which writes the moments, and one that reads the moments again."""
    ps, gs, ms, vs = p[begin:end], g[begin:end], m[begin:end], v[begin:end]
    for i in range(ps.size):
        x = ps[i] + gs[i]
        ms[i] += x
        vs[i] += x
    for i in range(ps.size):
        ps[i] += ms[i] + vs[i]


@jit
def _limit_of_copy(source: Any, out: Any, begin: Any, end: Any) -> None:
    x, y = source[begin:end], out[begin:end]
    for i in range(y.size):
        y[i] = np.int32(x[i])


@jit
def _limit_of_sum(x: Any, y: Any, out: Any, begin: Any, end: Any) -> None:
    xs, ys, outs = x[begin:end], y[begin:end], out[begin:end]
    for i in range(outs.size):
        outs[i] = xs[i] + ys[i]


def limit(kernel: Any, *tensors: Tensor) -> Run:
    """Run a limit over copies, because the sums soon grow beyond the numbers of an optimizer."""
    arrays = [as_array(x.clone()) for x in tensors]
    length = arrays[0].size
    return lambda: in_parts(length, lambda begin, end: kernel(*arrays, begin, end))


class Case(NamedTuple):
    name: str
    nbytes: int
    ours: Run
    limit: Run
    others: dict[str, Run]


def optimizer_cases(numel: int, only: str) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    p, g, m, v = (torch.randn(numel, generator=generator).mul_(1e-2) for _ in range(4))
    v.square_()
    gb = g.to(BF16)
    adam = ops.AdamRule(b1=0.9, b2=0.999, step_size=1e-6, eps=1e-8, l2=0.1, correction=0.9)
    adamw = dataclasses.replace(adam, l2=0.0, decay=1e-7)
    sgd = ops.SgdRule(learning_rate=1e-6, momentum=0.9)
    nesterov = dataclasses.replace(sgd, nesterov=True, l2=0.1)
    plain = ops.SgdRule(learning_rate=1e-6)
    lion = ops.LionRule(b1=0.9, b2=0.99, learning_rate=1e-6, decay=1e-7)
    adagrad = ops.AdagradRule(learning_rate=1e-6, eps=1e-10)
    lamb = ops.LambRule(0.9, 0.999, 1e-6, eps=1e-6, weight_decay=0.1, bias=0.9)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = g

    def torchs(
        make: Callable[..., torch.optim.Optimizer], *, half: bool = False, **options: Any
    ) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for form in ("fused", "foreach"):
            try:
                optimizer = make([parameter], lr=1e-6, **{form: True}, **options)
                optimizer.step()
            except (RuntimeError, TypeError, ValueError):
                continue
            found[f"torch {form}"] = (
                functools.partial(_with_cast, optimizer, parameter, gb) if half else optimizer.step
            )
        return found

    def deepspeeds() -> dict[str, Run]:
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return {
                "DeepSpeedCPUAdam": DeepSpeedCPUAdam([parameter], lr=1e-6, weight_decay=0.1).step
            }
        except Exception as error:  # noqa: BLE001 - the compilation may fail in any way
            print(f"without DeepSpeedCPUAdam: {type(error).__name__}", file=sys.stderr)
            return {}

    def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
        yield (
            "adamw",
            lambda: Case(
                "adamw",
                28,
                lambda: adamw(p, g, m, v, None),
                limit(_limit_of_four, p, g, m, v),
                {**torchs(torch.optim.AdamW), **deepspeeds()},
            ),
        )
        yield (
            "adamw_bf16",
            lambda: Case(
                "adamw, bf16 gradients",
                26,
                lambda: adamw(p, gb, m, v, None),
                limit(_limit_of_four, p, gb, m, v),
                torchs(torch.optim.AdamW, half=True),
            ),
        )
        yield (
            "adam",
            lambda: Case(
                "adam, l2",
                28,
                lambda: adam(p, g, m, v, None),
                limit(_limit_of_four, p, g, m, v),
                torchs(torch.optim.Adam, weight_decay=0.1),
            ),
        )
        yield (
            "sgd",
            lambda: Case(
                "sgd, momentum",
                20,
                lambda: sgd(p, g, m, None),
                limit(_limit_of_three, p, g, m),
                torchs(torch.optim.SGD, momentum=0.9),
            ),
        )
        yield (
            "nesterov",
            lambda: Case(
                "sgd, nesterov, l2, bf16 gradients",
                18,
                lambda: nesterov(p, gb, m, None),
                limit(_limit_of_three, p, gb, m),
                torchs(torch.optim.SGD, half=True, momentum=0.9, nesterov=True, weight_decay=0.1),
            ),
        )
        yield (
            "plain",
            lambda: Case(
                "sgd, plain",
                12,
                lambda: plain(p, g, None, None),
                limit(_limit_of_two, p, g),
                torchs(torch.optim.SGD),
            ),
        )
        yield (
            "lion",
            lambda: Case(
                "lion",
                20,
                lambda: lion(p, g, m, None),
                limit(_limit_of_three, p, g, m),
                {},
            ),
        )
        yield (
            "adagrad",
            lambda: Case(
                "adagrad",
                20,
                lambda: adagrad(p, g, v, None),
                limit(_limit_of_three, p, g, v),
                torchs(torch.optim.Adagrad),
            ),
        )
        layers = [(start, min(start + 1_000_000, numel)) for start in range(0, numel, 1_000_000)]
        yield (
            "lamb",
            lambda: Case(
                "lamb, layers of 1M",
                40,
                lambda: lamb(p, g, m, v, None, segments=layers),
                limit(_limit_of_lamb, p, g, m, v),
                {},
            ),
        )

    for key, make in cases():
        if key.startswith(only) or only in key:
            case = make()
            yield case._replace(nbytes=case.nbytes * numel)


def sum_cases(numel: int) -> Iterator[Case]:
    for dtype in (FP32, BF16):
        x, y = torch.randn(numel).to(dtype), torch.randn(numel).to(dtype)
        out = torch.empty_like(x)
        yield Case(
            f"sum of 2, {str(dtype).removeprefix('torch.')}",
            3 * numel * dtype.itemsize,
            functools.partial(ops.sum_in_rank_order, [x, y], out),
            limit(_limit_of_sum, x, y, out),
            {"torch add": functools.partial(torch.add, x, y, out=out)},
        )


def _with_cast(optimizer: torch.optim.Optimizer, parameter: Tensor, grad: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.copy_(grad)
    optimizer.step()


def ravel_cases() -> Iterator[Case]:
    """Copy tensors like those of a transformer, and many tiny ones, into one buffer."""
    shapes = [(1024, 1024), (1024,), (512, 1024), (512,), (11,), (33, 77)] * 50
    large = tuple(torch.randn(shape) for shape in shapes[:291])
    scale = 0.5
    for name, leaves, dtype in (
        ("ravel 291 tensors to bf16, scale", large, BF16),
        ("ravel 291 tensors, fp32 to fp32", large, FP32),
        ("ravel 500 x 64 to fp32, scale", tuple(torch.randn(64) for _ in range(500)), FP32),
        ("ravel 500 x 64 to bf16, scale", tuple(torch.randn(64) for _ in range(500)), BF16),
    ):
        offsets = tuple(itertools.accumulate((-(-x.numel() // 32) * 32 for x in leaves), initial=0))
        out = torch.zeros(offsets[-1], dtype=dtype)
        views = [
            out[start : start + x.numel()].view(x.shape)
            for x, start in zip(leaves, offsets, strict=False)
        ]
        source = torch.randn(offsets[-1])
        kept, fresh = ops.AddressTable(), ops.AddressTable()
        factor = 1.0 if name.endswith("fp32 to fp32") else scale
        as_list = list(leaves)
        others: dict[str, Run] = {
            "torch foreach": functools.partial(_foreach, leaves, views, out, factor),
            "torch mul into views": functools.partial(_mul_into, leaves, views, factor),
        }
        if len(leaves) == 500:
            others["ravel_into, new addresses"] = functools.partial(
                ops.ravel_into,
                out,
                as_list,
                offsets[:-1],
                scale=factor,
                table=fresh,
            )
        yield Case(
            name,
            sum(x.numel() for x in leaves) * (4 + dtype.itemsize),
            functools.partial(ops.ravel_into, out, leaves, offsets[:-1], scale=factor, table=kept),
            limit(_limit_of_copy, source, out)
            if dtype == BF16
            else functools.partial(out.copy_, source),
            others,
        )


def _foreach(leaves: tuple[Tensor, ...], views: list[Tensor], out: Tensor, scale: float) -> None:
    torch._foreach_copy_(views, leaves)
    if scale != 1.0:
        out.mul_(scale)


def _mul_into(leaves: tuple[Tensor, ...], views: list[Tensor], scale: float) -> None:
    for leaf, view in zip(leaves, views, strict=True):
        torch.mul(leaf, scale, out=view)


def timed(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(case: Case, rounds: int) -> dict[str, Any]:
    contenders = {"ours": case.ours, **case.others}
    for run in (case.limit, *contenders.values()):
        run()
    repeat = max(1, int(2e-3 / max(timed(case.ours), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in ("limit", *contenders)}
    for _ in range(rounds):
        for name, run in contenders.items():
            before = min(timed(case.limit) for _ in range(repeat))
            times[name].append(min(timed(run) for _ in range(repeat)))
            after = min(timed(case.limit) for _ in range(repeat))
            times["limit"].append((before + after) / 2)
    limits = {
        name: times["limit"][index :: len(contenders)] for index, name in enumerate(contenders)
    }
    rows = {
        name: {
            "ms": 1e3 * statistics.median(times[name]),
            "GB/s": case.nbytes / statistics.median(times[name]) / 1e9,
            "of limit": statistics.median(
                x / y for x, y in zip(limits[name], times[name], strict=True)
            ),
        }
        for name in contenders
    }
    return {
        "kernel": case.name,
        "bytes": case.nbytes,
        "limit ms": 1e3 * statistics.median(times["limit"]),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--numel", type=int, default=32_000_000, help="parameters of the optimizers"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only",
        default="",
        help="part of a kernel's name: ravel, sum, adamw, adamw_bf16, sgd, ...",
    )
    parser.add_argument("--json", type=Path, help="where all figures go")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{options.threads} threads, {options.numel} parameters, torch {torch.__version__}, "
        f"{platform.machine()}\n"
    )
    print(
        "| kernel | contender | ms | GB/s | of limit | / best of torch |\n|---|---|---|---|---|---|"
    )
    found = []
    ravels = ravel_cases() if options.only in ("", "ravel") else ()
    sums = sum_cases(options.numel) if options.only in ("", "sum") else ()
    is_step = options.only not in ("ravel", "sum")
    steps = optimizer_cases(options.numel, options.only) if is_step else ()
    for case in itertools.chain(ravels, sums, steps):
        result = measure(case, options.rounds)
        found.append(result)
        theirs = [row["ms"] for name, row in result["rows"].items() if name.startswith("torch")]
        for name, row in result["rows"].items():
            best = f"{row['ms'] / min(theirs):.2f}" if theirs else "–"
            print(
                f"| {result['kernel']} | {name} | {row['ms']:.4g} | {row['GB/s']:.1f} | "
                f"{row['of limit']:.2f} | {best} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(
            json.dumps(
                {"threads": options.threads, "numel": options.numel, "results": found}, indent=1
            )
        )


if __name__ == "__main__":
    main()
