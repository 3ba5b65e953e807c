"""The figures of the notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
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
# TrueType letters, which publishers take, and the same bytes in each run.
FOR_PAPERS = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "zfun"}


def export(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure for a paper, as ``path.svg`` and ``path.pdf``.

    Letters stay text, which a paper's index and its readers can find and copy.

    Args:
        figure: of this module, or of a ``draw`` of zfun.
        path: of the files, without an ending.

    Returns:
        The paths of the two files.
    """
    written = [Path(f"{path}.{ending}") for ending in ("svg", "pdf")]
    with plt.rc_context(FOR_PAPERS):
        for file in written:
            dates = {"Date": None} if file.suffix == ".svg" else {"CreationDate": None}
            figure.savefig(file, bbox_inches="tight", metadata=dates)
    return written


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
    legend_with_mark(figure, handles, "formula", left=0.16)
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
    made: str = "measured",
) -> Figure:
    """Draw the memory of a rank by number of ranks: formulae as lines, measurements as points."""
    colours = ["#222222", "#0072B2", "#E69F00", "#009E73"]
    figure, axes = plt.subplots(figsize=(8.2, 3.9))
    figure.subplots_adjust(left=0.09, right=0.8, top=0.88, bottom=0.14)
    for (name, (sizes, held)), colour in zip(curves.items(), colours, strict=False):
        axes.plot(sizes, held, color=colour, linewidth=2)
        axes.plot(
            *points[name],
            "o",
            color=colour,
            markersize=6.5,
            markeredgecolor="white",
            clip_on=False,
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
    last = round(math.log2(max(max(sizes) for sizes, _ in curves.values())))
    ticks = [2**i for i in range(0, last + 1, 1 if last < 7 else 2)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    # The axes end at the last size, so that neither grid nor axis crosses a curve's name.
    axes.set_xlim(0.85, max(max(sizes) for sizes, _ in curves.values()))
    axes.set_ylim(0)
    axes.tick_params(axis="x", pad=8)  # below a point on the axis
    axes.set_xlabel("ranks", color=INK)
    dress(
        axes, f"training state of each rank, bytes per parameter (points: {made})", "y"
    )
    return figure


def errors_by_leaf(table: Mapping[int, Mapping[str, float]], title: str) -> Figure:
    """Draw relative errors as a table of shades.

    Args:
        table: by number of ranks, the error of each leaf.
        title: of the figure.
    """
    leaves = list(next(iter(table.values())))
    cells = [[row[leaf] for row in table.values()] for leaf in leaves]
    figure, axes = plt.subplots(figsize=(7.0, 0.6 * len(leaves) + 1.5))
    figure.subplots_adjust(left=0.13, right=0.98, top=0.8, bottom=0.24)
    axes.imshow(cells, cmap="Oranges", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(cells):
        for x, error in enumerate(row):
            axes.annotate(
                f"{error:.2f}" if error > 1e-9 else "0",
                (x, y),
                ha="center",
                va="center",
                color="white" if error > 0.6 else INK,
            )
    axes.set_xticks(range(len(table)), list(map(str, table)))
    axes.set_yticks(range(len(leaves)), leaves)
    axes.set_xlabel("ranks", color=INK)
    dress(axes, title, None)
    return figure


def drawn_cases(cases: Sequence[tuple[int, int]]) -> Figure:
    """Draw the cases that were tried.

    Args:
        cases: number of ranks and number of elements of each case.
    """
    figure, axes = plt.subplots(figsize=(7.0, 3.0))
    figure.subplots_adjust(left=0.1, right=0.98, top=0.86, bottom=0.19)
    axes.scatter(
        [size for size, _ in cases],
        [numel for _, numel in cases],
        s=36,
        alpha=0.6,
        color=PARTS["params"],
        linewidths=0,
    )
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=-0.3)
    axes.set_xlabel("ranks", color=INK)
    dress(axes, "cases that were drawn: elements of the tree", "both")
    return figure


def owned(rows: Sequence[Mapping[str, int]], share: float) -> Figure:
    """Draw the leaves of each rank as blocks, and the padding.

    Args:
        rows: for each rank the number of elements of its leaves, by path.
        share: the elements of each rank under an equal cut.
    """
    longest = max(sum(row.values()) for row in rows)
    figure, axes = plt.subplots(figsize=(9.0, 0.5 * len(rows) + 1.5))
    figure.subplots_adjust(left=0.09, right=0.98, top=0.82, bottom=0.2)
    for y, row in enumerate(rows):
        left = 0
        for path, numel in row.items():
            axes.barh(
                y,
                numel,
                0.62,
                left,
                color=PARTS["params"],
                edgecolor="white",
                linewidth=1,
            )
            if numel > 0.08 * longest:
                axes.annotate(
                    path,
                    (left + numel / 2, y),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                )
            left += numel
        axes.barh(
            y, longest - left, 0.62, left, color="white", edgecolor=FAINT, hatch="////"
        )
    axes.axvline(share, color=INK, linewidth=2)
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.invert_yaxis()
    dress(axes, "elements owned by each rank (hatched: padding)", "x")
    return figure


def bytes_by_size(
    sizes: Sequence[int], measured: Mapping[str, Sequence[int]]
) -> Figure:
    """Draw the bytes that a rank sends in a step, against the number of ranks.

    Args:
        sizes: numbers of ranks.
        measured: by name of a strategy, the bytes for each size.
    """
    figure, axes = plt.subplots(figsize=(7.0, 3.2))
    figure.subplots_adjust(left=0.1, right=0.8, top=0.87, bottom=0.17)
    colours = (PARTS["params"], KINDS["reduce_scatter"])
    for colour, (name, counts) in zip(colours, measured.items(), strict=False):
        heights = [count / KB for count in counts]
        axes.plot(sizes, heights, "o-", color=colour, linewidth=2, clip_on=False)
        axes.annotate(
            name,
            (sizes[-1], heights[-1]),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    axes.set_xlim(sizes[0] - 0.25, sizes[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks", color=INK)
    dress(axes, "sent by a rank in a step, KiB", "y")
    axes.tick_params(axis="x", pad=8)  # below a point on the axis
    return figure


def dress(axes: Axes, title: str, grid: Any) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color="#e2e2e2", linewidth=0.8)


def legend_with_mark(
    figure: Figure, handles: list[Any], label: str, left: float
) -> None:
    """Put a legend below the axes: ``handles``, and the line of ink that stands for ``label``."""
    mark = plt.Line2D(
        [],
        [],
        color=INK,
        linewidth=0,
        marker="|",
        markersize=13,
        markeredgewidth=2,
        label=label,
    )
    figure.legend(
        handles=[*handles, mark],
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(left, -0.01),
        ncols=len(handles) + 1,
        handlelength=1.1,
        handleheight=1.1,
    )


def trade(rows: Mapping[str, tuple[int, int]]) -> Figure:
    """Draw bars of the bytes held at most and of the bytes sent in a step, by name."""
    figure, panels = plt.subplots(
        1, 2, figsize=(10.5, 0.45 * len(rows) + 1.1), sharey=True
    )
    figure.subplots_adjust(left=0.2, right=0.98, top=0.84, bottom=0.12, wspace=0.06)
    titles = "gathered parameters held at most, KiB", "sent by each rank in a step, KiB"
    for column, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        counts = [row[column] / KB for row in rows.values()]
        colour = tuple(PARTS.values())[column]
        axes.barh(range(len(rows)), counts, 0.6, color=colour)
        for y, count in enumerate(counts):
            axes.annotate(
                f"{count:,.0f}",
                (count, y),
                (5, 0),
                textcoords="offset points",
                va="center",
                color=INK,
            )
        axes.set_xlim(0, 1.14 * max(counts))
        dress(axes, title, "x")
    panels[0].set_yticks(range(len(rows)), list(rows))
    panels[0].invert_yaxis()
    return figure


TIERS = {"device": "#0072B2", "host memory": "#E69F00", "disk": "#999999"}


def tiers(rows: Mapping[str, Sequence[int]], peaks: Mapping[str, int]) -> Figure:
    """Draw the bytes of each tier as stacked bars, with a mark at the device's peak in a step.

    Args:
        rows: by name, the bytes on the device, in host memory and on the disk between steps.
        peaks: by name, the most bytes on the device within a step.
    """
    figure, axes = plt.subplots(figsize=(9.5, 0.55 * len(rows) + 1.7))
    figure.subplots_adjust(left=0.23, right=0.97, top=0.84, bottom=0.24)
    for y, (name, held) in enumerate(rows.items()):
        left = 0.0
        for count, colour in zip(held, TIERS.values(), strict=True):
            axes.barh(
                y, count / KB, 0.6, left, color=colour, edgecolor="white", linewidth=1
            )
            left += count / KB
        axes.plot(
            [peaks[name] / KB] * 2,
            [y - 0.4, y + 0.4],
            color=INK,
            linewidth=2,
            solid_capstyle="butt",
        )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    dress(axes, "bytes of a rank between steps, KiB", "x")
    handles: list[Any] = [
        Patch(color=colour, label=name) for name, colour in TIERS.items()
    ]
    legend_with_mark(figure, handles, "most on the device within a step", left=0.2)
    return figure


def efficiency(
    bandwidths: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    links: Mapping[str, float],
) -> Figure:
    """Draw the share of a device's speed against bandwidth; links are vertical lines."""
    figure, axes = plt.subplots(figsize=(8.6, 4.1))
    figure.subplots_adjust(left=0.09, right=0.74, top=0.88, bottom=0.15)
    colours = ["#0072B2", "#56B4E9", "#009E73", "#E69F00"]
    for (name, shares), colour in zip(curves.items(), colours, strict=False):
        axes.plot(
            [b / 1e9 for b in bandwidths], shares, color=colour, linewidth=2, label=name
        )
    for name, bandwidth in links.items():
        axes.axvline(bandwidth / 1e9, color=FAINT, linewidth=1, linestyle=":")
        place = min(
            range(len(bandwidths)), key=lambda i: abs(bandwidths[i] - bandwidth)
        )
        is_above = max(shares[place] for shares in curves.values()) < 0.85
        axes.annotate(
            name,
            (bandwidth / 1e9, 0.94 if is_above else 0.02),
            (3, 0),
            textcoords="offset points",
            color=FAINT,
            fontsize=9,
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("bandwidth of a rank, GB/s", color=INK)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    dress(axes, "share of the device's own speed", "y")
    return figure


RUNS = ["#222222", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7"]


def running_means(values: Sequence[float], length: int) -> list[float]:
    """Return the mean of the last ``length`` values at each place."""
    windows = [values[max(0, end - length) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def losses(
    curves: Mapping[str, Sequence[float]], smooth: int = 10, *, log: bool = False
) -> Figure:
    """Draw the losses of runs, each the mean of the last ``smooth`` steps; in a log scale."""
    figure, axes = plt.subplots(figsize=(8.6, 4.1))
    figure.subplots_adjust(left=0.08, right=0.7, top=0.88, bottom=0.13)
    for (name, values), colour in zip(curves.items(), RUNS, strict=False):
        axes.plot(running_means(values, smooth), color=colour, linewidth=2, label=name)
    axes.set_xlabel("step", color=INK)
    if log:
        axes.set_yscale("log")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    dress(axes, f"loss, mean of {smooth} steps" if smooth > 1 else "loss", "y")
    return figure


def differences(
    curves: Mapping[str, Sequence[float]], exact: str, smooth: int = 10
) -> Figure:
    """Draw the loss of one run, and below by how much the losses of the others are higher.

    Args:
        curves: by name, the losses of each run.
        exact: name of the run that the others are compared with.
        smooth: number of steps whose mean is drawn.
    """
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8.6, 6.2), sharex=True, height_ratios=(1, 2)
    )
    figure.subplots_adjust(left=0.09, right=0.7, top=0.93, bottom=0.09, hspace=0.22)
    below.axhline(0, color=INK, linewidth=0.8)
    for place, (name, values) in enumerate(curves.items()):
        if name == exact:
            above.plot(running_means(values, smooth), color=INK, linewidth=2)
            continue
        gaps = [one - other for one, other in zip(values, curves[exact], strict=True)]
        # A curve shows under those that follow because it is wider.
        below.plot(
            running_means(gaps, smooth),
            color=RUNS[place],
            linewidth=1.5 + 0.7 * (len(curves) - place),
            label=name,
        )
    # Straight below a hundredth, so that small differences show beside large ones.
    below.set_yscale("symlog", linthresh=0.01)
    ticks = [-0.01, -0.005, 0, 0.005, 0.01, 0.03, 0.1, 0.3]
    below.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    below.minorticks_off()
    below.set_xlabel("step", color=INK)
    below.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    dress(above, f"loss of the {exact} run, mean of {smooth} steps", "y")
    dress(below, f"loss beyond the {exact} run, mean of {smooth} steps", "y")
    return figure


def scatter(points: Sequence[Sequence[float]], title: str) -> Figure:
    """Draw points of the plane, and the unit circle."""
    figure, axes = plt.subplots(figsize=(5.2, 5.2))
    figure.subplots_adjust(left=0.11, right=0.97, top=0.92, bottom=0.07)
    axes.scatter(*zip(*points, strict=True), s=10, color="#0072B2", alpha=0.5)
    axes.add_patch(
        plt.Circle((0, 0), 1, fill=False, color="#D55E00", linewidth=2, zorder=3)
    )
    # No point is cut off, however far out.
    limit = 1.05 * max(1.0, *(abs(x) for point in points for x in point))
    axes.set_aspect("equal")
    axes.set_xlim(-limit, limit)
    axes.set_ylim(-limit, limit)
    dress(axes, title, None)
    return figure


def peaks(rows: Mapping[str, Any]) -> Figure:
    """Draw bytes by category as stacked bars, in GiB; rows are named tuples of bytes."""
    colours = [
        "#0072B2",
        "#56B4E9",
        "#009E73",
        "#E69F00",
        "#D55E00",
        "#CC79A7",
        "#F0E442",
    ]
    figure, axes = plt.subplots(figsize=(9.5, 0.55 * len(rows) + 1.7))
    figure.subplots_adjust(left=0.1, right=0.97, top=0.84, bottom=0.26)
    fields = next(iter(rows.values()))._fields
    shown = [
        field for field in fields if any(getattr(row, field) for row in rows.values())
    ]
    for y, row in enumerate(rows.values()):
        left = 0.0
        for field, colour in zip(shown, colours, strict=False):
            width = getattr(row, field) / 2**30
            axes.barh(y, width, 0.6, left, color=colour, edgecolor="white", linewidth=1)
            left += width
        axes.annotate(
            f"{left:,.1f}",
            (left, y),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    dress(
        axes, "the most bytes of a rank at once, GiB: each category at that moment", "x"
    )
    figure.legend(
        handles=[
            Patch(color=colour, label=field)
            for field, colour in zip(shown, colours, strict=False)
        ],
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0.08, -0.01),
        ncols=len(shown),
        handlelength=1.1,
        handleheight=1.1,
        fontsize=9,
    )
    return figure


def cells(meshes: Sequence[Mapping[str, int]], num_blocks: int) -> Figure:
    """Draw the part of the model that each rank of some meshes holds.

    Args:
        meshes: the sizes of ``pp``, ``dp`` and ``tp``; ranks along the last are neighbours.
        num_blocks: of the model.
    """
    figure, panels = plt.subplots(2, -(-len(meshes) // 2), figsize=(10.5, 4.6))
    figure.subplots_adjust(left=0.03, right=0.99, top=0.92, bottom=0.08, hspace=0.42)
    colours = plt.get_cmap("viridis")
    for axes, sizes in zip(panels.ravel(), meshes, strict=False):
        pp, dp, tp = (sizes[name] for name in ("pp", "dp", "tp"))
        width, height = num_blocks / pp, 1 / tp
        for rank in range(pp * dp * tp):
            stage, data, part = rank // (dp * tp), rank // tp % dp, rank % tp
            left, top = stage * width + data * width / dp, part * height
            place = 0.15 + 0.8 * data / max(1, dp - 1)
            axes.add_patch(
                plt.Rectangle(
                    (left, top),
                    width / dp,
                    height,
                    facecolor=colours(place),
                    edgecolor="white",
                    alpha=0.75,
                )
            )
            axes.text(
                left + width / dp / 2,
                top + height / 2,
                str(rank),
                ha="center",
                va="center",
                fontsize=8,
                color=INK if place > 0.5 else "white",
            )
        for stage in range(1, pp):
            axes.axvline(stage * width, color=INK, linewidth=1.6)
        axes.set_xlim(0, num_blocks)
        axes.set_ylim(1, 0)
        axes.set_yticks([])
        axes.set_xticks(range(0, num_blocks + 1, 2))
        axes.tick_params(labelsize=8, colors=INK)
        axes.set_title(
            " ".join(f"{name}={count}" for name, count in sizes.items()),
            loc="left",
            fontsize=10,
            color=INK,
        )
    return figure


def by_axis(rows: Mapping[str, Mapping[str, int]]) -> Figure:
    """Draw the bytes that a rank sends along each axis, as stacked bars."""
    colours = {"pp": "#D55E00", "dp": "#0072B2", "tp": "#E69F00"}
    figure, axes = plt.subplots(figsize=(10.5, 0.5 * len(rows) + 1.3))
    figure.subplots_adjust(left=0.17, right=0.98, top=0.86, bottom=0.22)
    for y, row in enumerate(rows.values()):
        left = 0.0
        for name, count in row.items():
            axes.barh(y, count / KB, 0.6, left, color=colours[name], edgecolor="white")
            left += count / KB
        axes.text(left, y, f" {left:,.0f}", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    dress(axes, "sent by a rank in a step, KiB: the most along each axis", "x")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
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
