"""The results of the demo as a table and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from zfun.demo._train import DemoComposition, RankReport
from zfun.tables import in_columns

HEADER = (
    ("", "loss", "step", "params", "grads", "optimizer", "peak", "sent", "theory"),
    ("", "at the end", "ms", "MB", "MB", "MB", "MB", "MB/step", "MB/step"),
)
MB = 1e6


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The measurements of all ranks of one composition."""

    composition: DemoComposition
    ranks: tuple[RankReport, ...]

    @property
    def step_s(self) -> float:
        """Median step of rank 0, without the first step, which allocates buffers."""
        steps = self.ranks[0].step_s
        return statistics.median(steps[1:] or steps)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all ranks."""
        return max(report.peak_bytes for report in self.ranks)


def table(results: Sequence[DemoResult]) -> str:
    """Format the results in columns."""
    lines = in_columns([*HEADER, *map(_row, results)]).splitlines()
    lines.insert(len(HEADER), "-" * len(lines[0]))
    return "\n".join(lines)


def _row(result: DemoResult) -> tuple[str, ...]:
    report = result.ranks[0]
    held = [
        f"{'*' if result.composition.offload else ''}{report.held_bytes[part] / MB:.2f}"
        for part in ("params", "grads", "optimizer")
    ]
    return (
        result.composition.name,
        f"{report.losses[-1]:.6f}",
        f"{1000 * result.step_s:.0f}",
        *held,
        f"{result.peak_bytes / MB:.0f}",
        f"{report.sent_bytes / MB:.3f}",
        f"{report.theory_bytes / MB:.3f}",
    )


def differences(results: Sequence[DemoResult]) -> list[str]:
    """List the differences in bits between ranks or compositions; empty if all agree."""
    first = results[0].ranks[0]
    reference = f"{results[0].composition.name}, rank 0"
    found = []
    for result in results:
        for rank, report in enumerate(result.ranks):
            place = f"{result.composition.name}, rank {rank}"
            pairs = zip(report.losses, first.losses, strict=True)
            step = next(
                (i for i, (mine, theirs) in enumerate(pairs) if mine.hex() != theirs.hex()), None
            )
            if step is not None:
                found.append(
                    f"{place}: loss of step {step + 1} is {report.losses[step]!r}, not "
                    f"{first.losses[step]!r} as under {reference}"
                )
            elif report.digest != first.digest:
                found.append(
                    f"{place}: losses as under {reference}, but parameters {report.digest[:12]}…, "
                    f"not {first.digest[:12]}…"
                )
    return found


def verdict(results: Sequence[DemoResult], found: Sequence[str]) -> str:
    """Report in words whether the compositions agree."""
    report = results[0].ranks[0]
    if found:
        return "\n".join(["The compositions do NOT agree:", *(f"  {line}" for line in found)])
    return (
        f"Equal to the last bit under all {len(results)} compositions on all ranks: the loss of "
        f"each of the {len(report.losses)} steps, and the parameters\nafter the last one (SHA-256 "
        f"{report.digest[:16]}…)."
    )


def headline(results: Sequence[DemoResult]) -> str:
    """Compare the memory and the traffic of ZeRO-3 and DDP in one sentence."""
    ddp = next(result for result in results if result.composition.stage == 0).ranks[0]
    zero3 = next(result for result in results if result.composition.stage == 3).ranks[0]
    held = sum(zero3.held_bytes.values()) / sum(ddp.held_bytes.values())
    sent = (
        f" for {zero3.sent_bytes / ddp.sent_bytes:.1f} times the bytes sent"
        if ddp.sent_bytes
        else ""
    )
    return f"ZeRO-3 keeps {held:.0%} of DDP's training state on each rank{sent}"
