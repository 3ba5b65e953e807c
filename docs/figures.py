"""Draw the pictures of the README and of the site: ``python docs/figures.py [directory]``.

Every number comes from formulae and plans, not from a measurement. The files are committed, because
readers see the README before any build.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor

from zfun import Group, optim, planner, remat, zero
from zfun.optim import Schedule

# Okabe and Ito's palette, which stays distinct with any kind of colour vision.
BLUE, SKY, ORANGE, GREEN, VERMILION = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#D55E00",
)
PARTS = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN}
INK, FAINT, PAPER = "#222222", "#8a8a8a", "#f4f4f2"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "svg.hashsalt": "zfun",
    "text.color": INK,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """The bytes that one rank of N holds, and sends in a step, per float32 parameter with Adam."""

    name: str
    shards: tuple[bool, bool, bool]  # parameters, gradients, optimizer state
    num_gathers: int  # all-gathers of the parameters in a step

    def held(self, size: int) -> tuple[float, ...]:
        return tuple(
            whole / size if sharded else whole
            for whole, sharded in zip((4.0, 4.0, 8.0), self.shards, strict=True)
        )

    def sent(self, size: int) -> tuple[float, float]:
        """Return the bytes of parameters and of gradients.

        Without sharding the gradients are all-reduced, which is a reduce-scatter and an all-gather.
        """
        once = 4.0 * (size - 1) / size
        return (
            (self.num_gathers * once, 2 * once)
            if self.num_gathers == 0
            else (self.num_gathers * once, once)
        )


STAGES = (
    Stage("data parallel", (False, False, False), 0),
    Stage("ZeRO-1", (False, False, True), 1),
    Stage("ZeRO-2", (False, True, True), 1),
    Stage("ZeRO-3", (True, True, True), 2),
)


def canvas(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasSVG(figure)
    return figure


def bars(axes: Axes, rows: list[tuple[float, ...]], colours: list[str]) -> None:
    for row, widths in enumerate(rows):
        left = 0.0
        for width, colour in zip(widths, colours, strict=True):
            axes.barh(
                row, width, 0.62, left, color=colour, edgecolor="white", linewidth=1.2
            )
            left += width
        axes.annotate(
            f"{left:g}",
            (left, row),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="x", color="#e2e2e2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)


def tradeoff(size: int = 8, *, narrow: bool = False) -> Figure:
    """Draw memory and traffic, stage by stage: below each other for a narrow screen."""
    if narrow:
        figure = canvas(5, 5.8)
        memory, traffic = figure.subplots(2, 1)
        figure.subplots_adjust(left=0.23, right=0.97, top=0.79, bottom=0.12, hspace=0.4)
    else:
        figure = canvas(10, 3.9)
        memory, traffic = figure.subplots(1, 2, width_ratios=(1.5, 1))
        figure.subplots_adjust(
            left=0.125, right=0.97, top=0.7, bottom=0.19, wspace=0.12
        )
    bars(memory, [stage.held(size) for stage in STAGES], list(PARTS.values()))
    bars(traffic, [stage.sent(size) for stage in STAGES], list(PARTS.values())[:2])
    memory.set_yticks(range(len(STAGES)), [stage.name for stage in STAGES])
    memory.set_xlim(0, 17.4 if narrow else 17.5)
    if narrow:
        traffic.set_yticks(range(len(STAGES)), [stage.name for stage in STAGES])
    else:
        traffic.set_yticks([])
    traffic.set_xlim(0, 17.4 if narrow else 12)
    memory.set_title("held by each rank", loc="left", fontsize=11.5)
    traffic.set_title("sent by each rank in a step", loc="left", fontsize=11.5)
    figure.text(
        0.012,
        0.93,
        "A rank holds less at every stage;"
        + ("\n" if narrow else " ")
        + "only ZeRO-3 sends more",
        fontsize=14,
        fontweight="bold",
        va="center",
    )
    figure.text(
        0.012,
        0.865 if narrow else 0.845,
        f"bytes for each float32 parameter, Adam, {size} ranks",
        fontsize=11,
        color="#555555",
        va="center",
    )
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in PARTS.values()]
    figure.legend(
        handles,
        list(PARTS),
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0 if narrow else 0.11, -0.005),
        ncols=3,
        handlelength=1.0,
        handleheight=1.0,
    )
    return figure


def blank(figure: Figure, width: float, height: float) -> Axes:
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    return axes


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str,
    at: tuple[float, float],
    *,
    colour: str = INK,
    bend: float = 0.0,
    ha: str = "center",
) -> None:
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=14,
            linewidth=1.6,
            color=colour,
            connectionstyle=style,
            shrinkA=0,
            shrinkB=0,
        )
    )
    axes.text(*at, text, ha=ha, va="center", fontsize=10.5, color=colour)


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    title: str,
    text: str,
    colour: str = PAPER,
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=colour,
            edgecolor="#c9c9c4",
            linewidth=1,
        )
    )
    axes.text(
        x + width / 2,
        y + height - 0.3,
        title,
        ha="center",
        va="center",
        fontweight="bold",
        fontsize=11.5,
    )
    axes.text(
        x + width / 2,
        y + (height - 0.45) / 2,
        text,
        ha="center",
        va="center",
        fontsize=10,
        color="#444444",
        linespacing=1.35,
    )


def placements() -> Figure:
    """Draw the data of four ranks under each placement, and the collectives between placements."""
    figure = canvas(10, 4.6)
    axes = blank(figure, 10, 4.6)
    _ranks(
        axes,
        0.55,
        2.6,
        "P",
        "partial",
        "each rank holds a term of the sum",
        partial=True,
    )
    _ranks(axes, 6.95, 2.6, "R", "replicated", "each rank holds the whole")
    _ranks(
        axes, 3.75, 0.35, "S", "sharded", "rank r holds the r-th piece", sharded=True
    )
    arrow(axes, (3.6, 3.08), (6.75, 3.08), "all-reduce", (5.17, 3.28), colour=VERMILION)
    arrow(
        axes,
        (1.9, 2.1),
        (3.45, 1.05),
        "reduce-scatter",
        (2.45, 1.3),
        colour=VERMILION,
        ha="right",
    )
    arrow(
        axes,
        (6.75, 1.2),
        (7.95, 2.1),
        "all-gather",
        (7.2, 1.85),
        colour=VERMILION,
        ha="right",
    )
    arrow(axes, (8.5, 2.1), (6.75, 0.75), "slice (nothing sent)", (7.8, 1.2), ha="left")
    return figure


def _ranks(
    axes: Axes,
    x: float,
    y: float,
    letter: str,
    name: str,
    meaning: str,
    *,
    partial: bool = False,
    sharded: bool = False,
) -> None:
    shades = [BLUE, SKY, GREEN, ORANGE]
    wide, high, gap = 0.16, 0.95, 0.09
    axes.text(x, y + 1.55, letter, fontsize=17, fontweight="bold", va="center")
    axes.text(x + 0.32, y + 1.53, name, fontsize=12, va="center")
    axes.text(x, y - 0.22, meaning, fontsize=9.5, color="#555555", va="center")
    for rank in range(4):
        left = x + rank * (4 * wide + gap)
        for piece in range(4):
            mine = not sharded or piece == rank
            face = shades[piece] if mine else "white"
            axes.add_patch(
                Rectangle(
                    (left + piece * wide, y),
                    wide,
                    high,
                    facecolor=face,
                    edgecolor="white" if mine else "#dddddd",
                    linewidth=0.8,
                    alpha=0.45 if partial else 1.0,
                    hatch="//" if partial else None,
                )
            )
        axes.text(
            left + 2 * wide,
            y + high + 0.14,
            f"rank {rank}",
            ha="center",
            va="center",
            fontsize=8.5,
            color="#555555",
        )


def bucket() -> Figure:
    """Draw the life of one bucket in a step of stage 3."""
    figure = canvas(11, 4.3)
    axes = blank(figure, 11, 4.3)
    wide, high = 2.15, 1.25
    columns = (0.25, 3.05, 5.85, 8.6)
    top, bottom = 2.6, 0.35
    box(
        axes,
        columns[0],
        top,
        wide,
        high,
        "shard",
        "1/N of the bucket,\nheld between steps",
    )
    box(
        axes,
        columns[1],
        top,
        wide,
        high,
        "gathered bucket",
        "whole, for a moment",
        "#dcebf6",
    )
    box(
        axes,
        columns[2],
        top,
        wide,
        high,
        "lazy leaves",
        "views of the bucket,\nmade at first use",
        "#dcebf6",
    )
    box(
        axes,
        columns[3],
        top,
        wide,
        high,
        "your loss",
        "plain PyTorch,\nno wrapper",
        "white",
    )
    box(
        axes,
        columns[3],
        bottom,
        wide,
        high,
        "gradients",
        "of the bucket's leaves",
        "#fbebcc",
    )
    box(
        axes,
        columns[2],
        bottom,
        wide,
        high,
        "bucket node",
        "one buffer;\nthe mean is taken here",
        "#fbebcc",
    )
    box(
        axes,
        columns[1],
        bottom,
        wide,
        high,
        "comm hook",
        "data_parallel,\nshard_grads, offload",
        "#fbebcc",
    )
    box(
        axes,
        columns[0],
        bottom,
        wide,
        high,
        "gradient shard",
        "placement S,\nfor the optimizer",
    )
    middle, low = top + high / 2, bottom + high / 2
    for left, label in zip(range(3), ("all-gather", "views", "use"), strict=True):
        x = columns[left] + wide
        arrow(
            axes,
            (x + 0.04, middle),
            (columns[left + 1] - 0.04, middle),
            label,
            ((x + columns[left + 1]) / 2, middle + 0.85),
            colour=VERMILION if left == 0 else INK,
        )
    for right, label in ((3, "autograd"), (2, "complete"), (1, "reduce-\nscatter")):
        x = columns[right]
        end = columns[right - 1] + wide
        arrow(
            axes,
            (x - 0.04, low),
            (end + 0.04, low),
            label,
            ((x + end) / 2, low - 0.82),
            colour=VERMILION if right == 1 else INK,
        )
    arrow(
        axes,
        (columns[3] + wide / 2, top - 0.04),
        (columns[3] + wide / 2, bottom + high + 0.04),
        "backward",
        (columns[3] + wide / 2 + 0.12, 2.1),
        ha="left",
    )
    arrow(
        axes,
        (columns[1] + wide / 2, bottom + high + 0.62),
        (columns[1] + wide / 2, top - 0.04),
        "",
        (0, 0),
        colour=BLUE,
    )
    axes.text(
        columns[1] + wide / 2,
        bottom + high + 0.42,
        "backward gathers the bucket again;\neach buffer is freed after its last use",
        ha="center",
        va="center",
        fontsize=10,
        color=BLUE,
        linespacing=1.3,
    )
    return figure


def schedules() -> Figure:
    """Draw every learning-rate schedule over 100 steps."""
    rate = 1.0
    up_and_down = optim.one_cycle(0.1, rate, 40, decay_rate=1.0, decay_steps=5)
    pieces = [optim.warmup(rate, 10), optim.constant(rate), optim.linear(rate, 0.0, 20)]
    shown: list[tuple[str, list[tuple[str, Schedule]]]] = [
        (
            "warmup",
            [
                ("linear", optim.warmup(rate, 40)),
                ("log", optim.warmup(rate, 40, shape="log")),
            ],
        ),
        ("warmup_linear", [("", optim.warmup_linear(rate, 20, 90))]),
        ("warmup_cosine", [("", optim.warmup_cosine(rate, 20, 90, end=0.1))]),
        (
            "one_cycle",
            [
                ("straight", up_and_down),
                ("4 stairs", optim.one_cycle(0.1, rate, 40, stairs_up=4)),
            ],
        ),
        ("one_cycle_momentum", [("", optim.one_cycle_momentum(0.8, 0.95, 40))]),
        (
            "lr_range_test",
            [
                ("straight", optim.lr_range_test(0.1, 20)),
                ("staircase", optim.lr_range_test(0.1, 20, staircase=True)),
            ],
        ),
        ("linear", [("", optim.linear(rate, 0.2, 60))]),
        ("join", [("", optim.join(pieces, [10, 70]))]),
    ]
    figure = canvas(10, 4.6)
    figure.subplots_adjust(
        left=0.045, right=0.985, top=0.92, bottom=0.08, hspace=0.42, wspace=0.22
    )
    steps = range(101)
    for axes, (name, lines) in zip(figure.subplots(2, 4).flat, shown, strict=True):
        for (label, schedule), colour in zip(lines, (BLUE, ORANGE), strict=False):
            axes.plot(
                steps,
                [schedule(step) for step in steps],
                color=colour,
                linewidth=1.8,
                label=label,
            )
        axes.set_title(name, fontsize=11, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(FAINT)
        axes.tick_params(colors=INK, length=2, labelsize=8.5)
        axes.set_ylim(*((0.78, 0.97) if name == "one_cycle_momentum" else (0, None)))
        if lines[0][0]:
            axes.legend(frameon=False, fontsize=8.5, handlelength=1.2, loc="best")
    return figure


def plan() -> Figure:
    """Draw the memory of a step of stage 3 with recomputed blocks, as planned."""
    empty = functools.partial(torch.empty, device="meta")
    blocks = [{"up": empty(256, 1024), "down": empty(1024, 256)} for _ in range(6)]

    def block(layer: dict[str, Tensor], x: Tensor) -> Tensor:
        return x + torch.nn.functional.gelu(x @ layer["up"]) @ layer["down"]

    def loss(params: Any, tokens: Tensor) -> Tensor:
        x = params["embed"][tokens]
        for layer in params["h"]:
            x = remat(block)(layer, x)
        logits = x @ params["embed"].T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def make(group: Group) -> Any:
        half, rule = torch.bfloat16, optim.adamw(1e-3)
        return zero(3, loss, rule, group, precision=half, bucket_bytes=2**20)

    params = {"embed": empty(1000, 256), "h": blocks}
    tokens = empty(8, 64, dtype=torch.int64)
    return planner.plan(make, params, tokens, 8).draw()


FIGURES = {
    "plan": plan,
    "schedules": schedules,
    "tradeoff": tradeoff,
    "tradeoff_narrow": functools.partial(tradeoff, narrow=True),
    "placements": placements,
    "bucket": bucket,
}


def draw(directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.svg" for name in FIGURES]
    with mpl.rc_context(STYLE):
        for path, make in zip(paths, FIGURES.values(), strict=True):
            make().savefig(path, metadata={"Date": None}, facecolor="white")
    return paths


if __name__ == "__main__":
    for written in draw(
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "_static"
    ):
        print(written)
