"""A step of an engine, whose module is live, beside the plain functional step at stage 3.

    python benchmarks/live.py --steps 40
    python benchmarks/live.py --write    # the table into benchmarks/results/live.md

Two ranks with one thread each train the models of ``contenders.py``. Each rank takes one step of
``zf.zero`` with ``zf.functional`` after each step of the engine, with an equal model, an equal
optimizer and the same batch, so that a slow moment of the machine hits both. ``many`` has 502 tiny
tensors, so its time is the host's, and the table has the difference for each layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import zfun as zf
from zfun.collectives import Workers, barrier
from zfun.interop import Engine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import contenders, pages
from benchmarks.trainer import interval

WARM_STEPS = 5


def measure(group: zf.Group, preset: str, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = contenders.model_of(preset)
    rule = lambda: zf.optim.adamw(3e-4)
    engine = Engine(model.build(), rule(), zero=3, group=group)
    apply = zf.functional(model.build())
    zero = zf.zero(3, lambda p, batch: model.loss(lambda x: apply(p, x), batch), rule(), group)
    state = zero.init(apply.params)
    batches, held = iter(model.batches(group.rank, group.size)), [state]

    def live(batch: Any) -> float:
        engine.backward(model.loss(engine, batch))
        info = engine.step()
        assert info is not None
        return float(info.loss)

    def plain(batch: Any) -> float:
        held[0], info = zero.step(held[0], batch)
        return float(info.loss)

    pairs: list[Any] = []
    losses: list[Any] = []
    for turn in range(steps + WARM_STEPS):
        batch = next(batches)
        times: dict[Any, float] = {}
        values: dict[Any, float] = {}
        # In turns, because the first one has cold caches.
        for step in (live, plain) if turn % 2 else (plain, live):
            barrier(group)
            began = time.perf_counter()
            values[step] = step(batch)
            times[step] = time.perf_counter() - began
        pairs.append((times[live], times[plain]))
        losses.append((values[live], values[plain]))
    num_layers = sum(1 for part in engine.module.modules() if part._parameters)
    return {"pairs": pairs[WARM_STEPS:], "losses": losses, "layers": num_layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["small", "many"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = [
        "| model | functional, ms | live, ms | ratio (95 %) | more for each layer, µs |",
        "|---|---|---|---|---|",
    ]
    for preset in options.presets:
        with Workers(2, timeout_s=170.0) as workers:
            ranks = workers.run(measure, preset, options.steps)
        for mine, other in ranks[0]["losses"]:
            if mine != other:
                raise SystemExit(f"the losses differ: {mine} and {other}")
        pairs = [
            tuple(map(max, zip(mine, other, strict=True)))
            for mine, other in zip(ranks[0]["pairs"], ranks[1]["pairs"], strict=True)
        ]
        ratios = [live / plain for live, plain in pairs]
        low, high = interval(ratios)
        live, plain = (1e3 * statistics.median(pair[place] for pair in pairs) for place in (0, 1))
        each = 1e3 * statistics.median(x - y for x, y in pairs) * 1e3 / ranks[0]["layers"]
        ratio = f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
        rows.append(f"| {preset} | {plain:.1f} | {live:.1f} | {ratio} | {each:.1f} |")
    print("\n".join(rows))
    if options.write:
        pages.write_section(
            "live.md",
            f"{options.steps} paired steps on two ranks",
            pages.environment(),
            "\n".join(rows),
        )


if __name__ == "__main__":
    main()
