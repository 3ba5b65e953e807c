"""The figures of the notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's palette, which stays distinct with any kind of colour vision.
PARTS = {"params": "#0072B2", "grads": "#E69F00", "optimizer": "#009E73"}
KINDS = {"all_gather": "#56B4E9", "reduce_scatter": "#D55E00", "all_reduce": "#CC79A7"}
INK, FAINT = "#222222", "#8a8a8a"
KB = 1024


def memory_and_traffic(rows: Mapping[str, Any]) -> Figure:
    """Draw the measurements as stacked bars, with a mark at the total of the formula.

    Args:
        rows: by name, objects with ``held``, ``held_formula``, ``sent``, ``sent_formula``: dicts
            from part to bytes.
    """
    figure, (memory, traffic) = plt.subplots(
        1, 2, figsize=(10.5, 0.55 * len(rows) + 1.9), sharey=True, width_ratios=(1.4, 1)
    )
    figure.subplots_adjust(left=0.17, right=0.98, top=0.8, bottom=0.2, wspace=0.06)
    for axes, measured, formula, title in (
        (memory, "held", "held_formula", "held by each rank, KiB"),
        (traffic, "sent", "sent_formula", "sent by each rank in a step, KiB"),
    ):
        longest = 0.0
        for y, row in enumerate(rows.values()):
            left = 0.0
            for part, count in getattr(row, measured).items():
                hatch = (
                    "////"
                    if part in getattr(row, "in_store", ()) and measured == "held"
                    else None
                )
                axes.barh(
                    y,
                    count / KB,
                    0.6,
                    left,
                    color=PARTS[part],
                    edgecolor="white",
                    linewidth=1,
                    hatch=hatch,
                )
                left += count / KB
            end = sum(getattr(row, formula).values()) / KB
            axes.plot(
                [end, end],
                [y - 0.4, y + 0.4],
                color=INK,
                linewidth=2,
                solid_capstyle="butt",
            )
            axes.annotate(
                f"{left:,.0f}",
                (left, y),
                (7, 0),
                textcoords="offset points",
                va="center",
                color=INK,
            )
            longest = max(longest, left)
        axes.set_xlim(0, 1.14 * longest)
        dress(axes, title, "x")
    memory.set_yticks(range(len(rows)), list(rows))
    memory.invert_yaxis()
    handles: list[Any] = [
        Patch(color=colour, label=part) for part, colour in PARTS.items()
    ]
    if any(getattr(row, "in_store", ()) for row in rows.values()):
        handles.append(
            Patch(
                facecolor="#bbbbbb",
                edgecolor="white",
                hatch="////",
                label="in host memory",
            )
        )
    handles.append(
        plt.Line2D(
            [],
            [],
            color=INK,
            linewidth=0,
            marker="|",
            markersize=13,
            markeredgewidth=2,
            label="formula",
        )
    )
    figure.legend(
        handles=handles,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0.16, -0.01),
        ncols=len(handles),
        handlelength=1.1,
        handleheight=1.1,
    )
    return figure


def timeline(logs: Mapping[str, Sequence[Any]]) -> Figure:
    """Draw the collectives of one step in the order of their start; the width is bytes."""
    figure, axes = plt.subplots(figsize=(10.5, 0.62 * len(logs) + 1.4))
    figure.subplots_adjust(left=0.17, right=0.98, top=0.84, bottom=0.22)
    for y, log in enumerate(logs.values()):
        left = 0.0
        for entry in log:
            if entry.kind not in KINDS or entry.name not in ("params", "grads"):
                continue
            width = entry.sent_bytes / KB
            axes.barh(
                y,
                width,
                0.6,
                left,
                color=KINDS[entry.kind],
                edgecolor="white",
                linewidth=1,
            )
            number = entry.part.removeprefix("bucket ").split(":")[0]
            axes.text(
                left + width / 2,
                y,
                number,
                ha="center",
                va="center",
                fontsize=8.5,
                color="white" if entry.kind == "reduce_scatter" else INK,
            )
            left += width
    axes.set_yticks(range(len(logs)), list(logs))
    axes.invert_yaxis()
    dress(
        axes,
        "collectives of one step in order, KiB sent; the number is the bucket",
        None,
    )
    handles = [
        Patch(color=colour, label=kind.replace("_", "-"))
        for kind, colour in KINDS.items()
    ]
    figure.legend(
        handles=handles,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0.16, -0.01),
        ncols=3,
        handlelength=1.1,
        handleheight=1.1,
    )
    return figure


def against_ranks(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    points: Mapping[str, tuple[Sequence[int], Sequence[float]]],
) -> Figure:
    """Draw the memory of a rank by number of ranks: formulae as lines, measurements as points."""
    colours = ["#222222", "#0072B2", "#E69F00", "#009E73"]
    figure, axes = plt.subplots(figsize=(8.2, 3.9))
    figure.subplots_adjust(left=0.09, right=0.8, top=0.88, bottom=0.14)
    for (name, (sizes, held)), colour in zip(curves.items(), colours, strict=True):
        axes.plot(sizes, held, color=colour, linewidth=2)
        axes.plot(
            *points[name], "o", color=colour, markersize=6.5, markeredgecolor="white"
        )
        axes.annotate(
            name,
            (sizes[-1], held[-1]),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
        )
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(7)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0)
    axes.set_xlabel("ranks", color=INK)
    dress(
        axes, "training state of each rank, bytes per parameter (points: measured)", "y"
    )
    return figure


def dress(axes: Axes, title: str, grid: Any) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color="#e2e2e2", linewidth=0.8)
