"""The step times of zfun's stages: the bounds of a forecast from a plan, and measured.

    python benchmarks/forecast.py --preset small --rounds 6
    python benchmarks/forecast.py --write     # into benchmarks/results/forecast.md

The rates of this machine are measured as ``zfun hw-bench`` does, each stage is planned on them, and
the same steps are taken as in ``benchmarks/step.py``. A measured time should lie between the two
bounds. Two stages whose measured times differ by less than 5 % have no order.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

import zfun as zf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import pages, step
from benchmarks.contenders import LEARNING_RATE, model_of
from zfun.demo import measure_hardware

STAGES = (0, 1, 2, 3)


def planned(preset: str, stage: int, ranks: int) -> zf.planner.Plan:
    model = model_of(preset)
    module = model.build()
    batch = next(model.batches(0, ranks))
    skeleton = module.to("meta")
    params = dict(skeleton.named_parameters())

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return model.loss(lambda *args: functional_call(skeleton, params, args), batch)

    recipe = lambda group: zf.zero(stage, loss_fn, zf.optim.adamw(LEARNING_RATE), group)
    return zf.plan(recipe, {name: leaf.detach() for name, leaf in params.items()}, batch, ranks)


def wrong_pairs(forecast: dict[str, float], measured: dict[str, float]) -> list[str]:
    """The pairs whose measured times differ by 5 % or more in the other order."""
    return [
        f"{one} and {other}"
        for one, other in itertools.combinations(forecast, 2)
        if max(measured[one], measured[other]) >= 1.05 * min(measured[one], measured[other])
        and (forecast[one] < forecast[other]) != (measured[one] < measured[other])
    ]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small", choices=["tiny", "demo", "small", "medium"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--write", action="store_true", help="write the page of results")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    with tempfile.TemporaryDirectory() as path:
        machine = measure_hardware(path, ranks=args.ranks, mib=args.mib)
    names = {f"zfun-{stage}": stage for stage in STAGES}
    forecasts = {
        name: planned(args.preset, stage, args.ranks).on(machine) for name, stage in names.items()
    }
    args.only, args.dtype, args.no_shared_memory, args.in_turn = [*names], "fp32", False, False
    rows = step.rows_of(step.measure(args), 1)
    measured = {name: row["ms"] / 1e3 for name, row in rows.items()}
    head = "measured, ms | at least, ms | at most, ms | compute | network | update | loss"
    lines = [f"| | {head} |", "|---" * 8 + "|"]
    for name, found in forecasts.items():
        bounds = found.at_least_s, found.at_most_s
        parts = found.compute_s, found.network_s, found.update_s, found.loss_s
        lines.append(
            f"| {name} | "
            + " | ".join(f"{1e3 * x:.1f}" for x in (measured[name], *bounds, *parts))
            + " |"
        )
    wrong = wrong_pairs({name: found.at_most_s for name, found in forecasts.items()}, measured)
    outside = [
        name
        for name, one in forecasts.items()
        if not one.at_least_s <= measured[name] <= one.at_most_s
    ]
    verdict = f"In another order: {', '.join(wrong)}." if wrong else "All pairs are in order."
    verdict += (
        f" Outside of the bounds: {', '.join(outside)}." if outside else " All are in bounds."
    )
    print("\n".join([*lines, "", verdict, repr(machine)]))
    if args.write:
        title = f"{args.preset}, fp32, {args.ranks} ranks, shared memory"
        figures = "\n".join(lines)
        head = f"{pages.environment()} {args.rounds} rounds of {args.steps} steps. {verdict}"
        print(f"written: {pages.write_section('forecast.md', title, head, figures)}")
    if wrong or outside:
        sys.exit(1)


if __name__ == "__main__":
    main()
