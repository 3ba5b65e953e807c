"""Where a step of each stage waits for the GPU, by phase, and the profile of the step.

    python benchmarks/gpu/waits.py --preset small
    python benchmarks/gpu/waits.py --trace traces        # the profiles too, for chrome://tracing
    python benchmarks/gpu/waits.py --device cpu --preset tiny    # the same program in small

A wait is a call that torch's synchronisation debug mode warns of: a number that the host reads, a
result whose shape depends on values, a copy from memory that is not pinned. Debug mode does not see
a wait inside a library; so the profile's own synchronisations are counted beside. Between forward
and backward, and between backward and update, a step should wait once at most.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile, record_function

import zfun as zf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.contenders import LEARNING_RATE, model_of
from benchmarks.gpu.step import one_rank, placed, synchronize

LIBRARY = str(Path(zf.__file__).parent)
PHASES = ("before", "forward", "turn", "backward", "norm", "update")
SYNCHRONISATIONS = {
    "aten::_local_scalar_dense",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
}
Rows = list[dict[str, Any]]


class Phases:
    """The phase of the current step, also marked in the profile."""

    def __init__(self) -> None:
        self.now = ""

    def enter(self, name: str) -> None:
        self.now = name
        with record_function(f"phase: {name}"):
            pass

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        grad = torch.autograd.grad

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self.now == "backward":  # a block that is recomputed
                return grad(*args, **kwargs)
            self.enter("backward")
            found = grad(*args, **kwargs)
            self.enter("norm")
            return found

        torch.autograd.grad = marked
        try:
            yield
        finally:
            torch.autograd.grad = grad


def step_of(
    stage: int, args: argparse.Namespace, group: zf.Group, phases: Phases, max_skipped: int | None
) -> Callable[[Any], Tensor]:
    model = model_of(args.preset)
    module = model.build().to(args.device)
    params = {name: weight.detach() for name, weight in module.named_parameters()}
    skeleton = module.to("meta")

    def loss_fn(params: Any, batch: Any) -> Tensor:
        phases.enter("forward")
        loss = model.loss(lambda *args: functional_call(skeleton, params, args), batch)
        phases.enter("turn")
        return loss

    inner = zf.optim.adamw(LEARNING_RATE)

    def apply(*args: Any, **kwargs: Any) -> Any:
        phases.enter("update")
        return inner.apply(*args, **kwargs)

    precision = torch.bfloat16 if args.dtype == "bf16" else None
    # Where the device decides, the kernels take more than this apply, and norm and update are one.
    rule = inner if max_skipped is None else inner._replace(apply=apply)
    zero = zf.zero(stage, loss_fn, rule, group, precision=precision, max_skipped=max_skipped)
    state = zero.init(params)

    def step(batch: Any) -> Tensor:
        nonlocal state
        phases.enter("before")
        state, info = zero.step(state, batch)
        return info.loss

    return step


def place_of_wait() -> str:
    """The innermost line of the library above this call."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(LIBRARY):
            return f"{file[len(LIBRARY) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside the library"


def waits(
    step: Callable[[Any], Tensor], batch: Any, phases: Phases, device: str
) -> dict[str, list[str]]:
    """The places that torch's debug mode warns of in one step, by phase."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    if device == "cpu":
        return found

    def note(message: Any, *details: Any, **more: Any) -> None:
        if "synchroniz" in str(message):
            found[phases.now].append(place_of_wait())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def profiled(
    step: Callable[[Any], Tensor], batch: Any, device: str, trace: Path | None
) -> tuple[dict[str, int], dict[str, float]]:
    """The profile's synchronisations in one step, by phase; and the number of kernels, their time
    and the step's, in microseconds.
    """
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    ) as found:
        step(batch)
        synchronize(device)
    if trace:
        found.export_chrome_trace(str(trace))
    events: list[Any] = list(found.events() or ())
    on_host = sorted(
        (e for e in events if e.device_type == torch.autograd.DeviceType.CPU),
        key=lambda e: e.time_range.start,
    )
    kernels = [
        e
        for e in events
        if e.device_type != torch.autograd.DeviceType.CPU and not e.name.startswith("phase: ")
    ]
    phase, counts = "", collections.Counter[str]()
    begin: dict[str, float] = {}
    for event in on_host:
        if event.name.startswith("phase: "):
            phase = event.name.removeprefix("phase: ")
            begin.setdefault(phase, event.time_range.start)
        elif event.name in SYNCHRONISATIONS:
            counts[phase] += 1
    span = max(e.time_range.end for e in on_host) - begin["before"]
    # The synchronisation at the end of the step belongs to this function.
    counts["update"] -= device == "cuda"
    return counts, {
        "kernels": len(kernels),
        "kernel_us": sum(e.time_range.elapsed_us() for e in kernels),
        "step_us": span,
    }


def table(rows: Rows) -> str:
    """Waits of each phase, as seen by debug mode and by the profile, with their places below."""
    lines = [
        "| stage | " + " | ".join(PHASES) + " | kernels | their time, us | the step, us |",
        "|---" * (len(PHASES) + 4) + "|",
    ]
    places: dict[str, None] = {}
    for row in rows:
        cells = [
            f"{len(row['waits'].get(phase, []))} / {row['synchronisations'].get(phase, 0)}"
            for phase in PHASES
        ]
        figures = f"{row['kernels']:.0f} | {row['kernel_us']:.0f} | {row['step_us']:.0f}"
        lines.append(f"| {row['stage']} | {' | '.join(cells)} | {figures} |")
        places |= dict.fromkeys(
            f"* {phase}: `{place}`" for phase in PHASES for place in row["waits"].get(phase, [])
        )
    return "\n".join([*lines, "", *places])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--preset", default="small", choices=["tiny", "demo", "small", "medium", "many"]
    )
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--trace", type=Path, help="folder for the profile of a step of each stage")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    rows: Rows = []
    with one_rank(args.device) as group:
        for stage, max_skipped in itertools.product((0, 1, 2, 3), (100, None)):
            phases = Phases()
            step, data = (
                step_of(stage, args, group, phases, max_skipped),
                iter(model_of(args.preset).batches(0, 1)),
            )
            batches = [placed(next(data), args.device) for _ in range(7)]
            with phases.around_backward():
                for batch in batches[:5]:
                    step(batch)
                found = waits(step, batches[5], phases, args.device)
                synchronize(args.device)
                name = f"zfun-{stage}" + ("" if max_skipped else "-none")
                path = args.trace / f"{name}.json" if args.trace else None
                counts, figures = profiled(step, batches[6], args.device, path)
            label = str(stage) if max_skipped else f"{stage}, `max_skipped=None`"
            rows.append({"stage": label, "waits": found, "synchronisations": counts, **figures})
            if args.json:
                args.json.write_text(json.dumps(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
