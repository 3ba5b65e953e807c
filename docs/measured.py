"""Pictures of ``benchmarks/results`` for the site: ``python docs/measured.py [directory]``.

The tables of the results pages are the only source of numbers. The build draws the pictures anew,
so a picture never shows a run that is no longer on its page. Each has a second form for a phone,
``NAME_narrow.svg``, with its panels below each other.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
# Okabe and Ito's palette, which stays distinct with any kind of colour vision.
BLUE, SKY, ORANGE, GREY = "#0072B2", "#56B4E9", "#E69F00", "#8a8a8a"
VERMILION = "#D55E00"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "svg.hashsalt": "zfun",
    "text.color": "#222222",
}
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Section:
    """One run on a results page.

    Attributes:
        title: the heading.
        setup: the first paragraph, with the machine, the versions and the commit.
        tables: each a list of rows, by the heads of the columns; the head of the names is ``""``.
        origin: the section that names the machine, where this one says "the same machine".
    """

    title: str
    setup: str
    tables: list[list[Row]]
    origin: Section | None = None

    @property
    def name(self) -> str:
        """The title, without what all runs have in common."""
        return self.title.replace(", fp32, 2 ranks", "")


def sections(page: str) -> dict[str, Section]:
    """Read a results page."""
    _, *parts = re.split(
        r"^## ", (RESULTS / page).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    found: dict[str, Section] = {}
    origin = None
    for part in parts:
        title, _, body = part.partition("\n")
        blocks = body.strip().split("\n\n")
        tables = [
            rows_of(block) for block in blocks if block.startswith(("| ", "```text\n"))
        ]
        section = Section(title, " ".join(blocks[0].split()), tables)
        if re.match("(The same|That) machine", section.setup):
            section = replace(section, origin=origin)
        else:
            origin = section
        found[title] = section
    return found


def rows_of(block: str) -> list[Row]:
    """Read a table of Markdown, or one of columns that two spaces part."""
    if block.startswith("```"):
        lines = [re.split(r" {2,}", line) for line in block.splitlines()[1:-1]]
        head, *body = lines
    else:
        cells = [
            [cell.strip() for cell in line.strip().removesuffix("|")[1:].split("|")]
            for line in block.splitlines()
        ]
        head, _, *body = cells
    return [dict(zip(["", *head[1:]], row, strict=True)) for row in body]


def number(cell: str) -> float:
    """Read the first number of a cell, as of ``1,359``, ``0.97 / 0.98`` and ``2.00 P``."""
    found = re.match(r"[\d,]+(\.\d+)?", cell)
    if found is None:
        raise ValueError(f"a cell of a picture starts with a number; got {cell!r}")
    return float(found[0].replace(",", ""))


def column(rows: Sequence[Row], head: str) -> dict[str, float]:
    """The numbers of a column by name, without the cells that have none."""
    return {row[""]: number(row[head]) for row in rows if re.match(r"\d", row[head])}


def colour_of(name: str) -> str:
    if name.startswith(("zfun", "store", "one rank", "two ranks")):
        return BLUE
    return {"fsdp2": ORANGE, "ddp": SKY}.get(name.partition(",")[0], GREY)


def bars(
    axes: Axes, values: dict[str, float], title: str, form: str = "{:,.0f}"
) -> None:
    """Draw one bar for each name, with its number at the end."""
    axes.barh(
        list(values),
        list(values.values()),
        0.66,
        color=[colour_of(name) for name in values],
    )
    for name, value in values.items():
        axes.annotate(
            form.format(value),
            (value, name),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.margins(y=0.02)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values.values()))
    axes.set_xticks([])
    head(axes, title)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)


def canvas(
    narrow: bool, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels: in a grid of this height for a screen, or in one column."""
    size = (4.6, 2.5 * rows * columns + 1) if narrow else (10, height)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    FigureCanvasSVG(figure)
    if narrow:
        rows, columns, options = rows * columns, 1, {}
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def head(axes: Axes, title: str) -> None:
    """Write a title above a panel, and draw no frame."""
    width = int(9 * axes.figure.get_figwidth())
    lines = [line for part in title.split("\n") for line in textwrap.wrap(part, width)]
    axes.set_title("\n".join(lines), loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def signed(figure: Figure, *runs: Section) -> Figure:
    """Write below a picture where its numbers were measured."""
    origins = [run.origin for run in runs if run.origin and run.origin not in runs]
    width = int(16.5 * figure.get_figwidth())
    lines = [
        line
        for run in (*origins[:1], *runs)
        for line in textwrap.wrap(f"{run.title}: {run.setup}", width)
    ]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color="#555555")
    return figure


def step(*, narrow: bool = False) -> Figure:
    """Draw the time of a step beside DDP and FSDP2."""
    runs = [
        sections("step.md")[title]
        for title in (
            "small, fp32, 2 ranks, shared memory",
            "small, fp32, 2 ranks, gloo",
            "medium, fp32, 2 ranks, shared memory",
        )
    ]
    figure, panels = canvas(narrow, 3.9, columns=3)
    for axes, run in zip(panels, runs, strict=True):
        bars(axes, column(run.tables[0], "ms"), f"{run.name}\nms")
    return signed(figure, *runs)


def memory(*, narrow: bool = False) -> Figure:
    """Draw the memory of a step and of an init beside DDP and FSDP2."""
    steps = sections("step.md")
    runs = [
        steps["small, fp32, 2 ranks, gloo"],
        steps["medium, fp32, 2 ranks, shared memory"],
        sections("init.md")["Peak of an init"],
    ]
    figure, panels = canvas(narrow, 4.6, columns=3, width_ratios=(1, 1, 1.2))
    for axes, run in zip(panels, runs, strict=True):
        bars(axes, column(run.tables[0], "peak MB"), f"{run.name}\npeak, MB")
    return signed(figure, *runs)


def traffic(*, narrow: bool = False) -> Figure:
    """Draw the bytes sent by a rank against the number of ranks, and those of two ranks."""
    run = sections("step.md")["small, fp32, 2 ranks, gloo"]
    figure, (lines, measured) = canvas(narrow, 3.6, columns=2, width_ratios=(1.3, 1))
    sizes = range(1, 17)
    for name, passes, colour in (
        ("stage 3", 3, BLUE),
        ("data parallel, stages 1 and 2", 2, SKY),
    ):
        lines.plot(sizes, [passes * (n - 1) / n for n in sizes], color=colour)
        lines.text(16, passes * 15 / 16 + 0.07, name, ha="right", color=colour)
    # The table counts the bytes of both ranks.
    each = {
        name: wire / 2 for name, wire in column(run.tables[0], "wire").items() if wire
    }
    for name in ("zfun-1", "zfun-3"):
        lines.plot(2, each[name], "o", color="#222222", zorder=3)
    lines.set_xticks([1, 2, 4, 8, 16])
    lines.set_ylim(0, 3.2)
    lines.set_xlabel("ranks")
    head(lines, "sent by a rank, in units of P: formula, and measured points")
    bars(measured, each, f"{run.name}\nsent by a rank, in units of P", "{:.2f}")
    return signed(figure, run)


def stores(*, narrow: bool = False) -> Figure:
    """Draw the transfers of the disk store, of checkpoints and of an object store."""
    disk = sections("io.md")["Direct transfers, memory used before"]
    saved = sections("checkpoint.md")["Two cores and a virtual disk"]
    figure, panels = canvas(narrow, 4.8, 2, 2, sharey="row")
    shown = [
        *((disk, name) for name in ("write GB/s", "read GB/s")),
        *((saved, name) for name in ("save GB/s", "load GB/s")),
    ]
    for axes, (run, name) in zip(panels, shown, strict=True):
        bars(axes, column(run.tables[0], name), name, "{:.2f}")
    return signed(figure, disk, saved)


def kernels(*, narrow: bool = False) -> Figure:
    """Draw how near the optimizers' kernels come to the speed of memory."""
    run = sections("kernels.md")["Steps of optimizers, 32M parameters"]
    ours = column(run.tables[0], "of limit")
    best = {
        row[""]: float(found[1])
        for row in run.tables[0]
        if (found := re.search(r", ([\d.]+)", row["torch's best form, of limit"]))
    }
    figure, (axes,) = canvas(narrow, 3.9)
    for y, name in enumerate(ours):
        axes.barh(y - 0.18, ours[name], 0.34, color=BLUE)
        if name in best:
            axes.barh(y + 0.18, best[name], 0.34, color=GREY)
    axes.axvline(1, color="#222222", linewidth=1)
    axes.set_yticks(range(len(ours)), list(ours))
    axes.invert_yaxis()
    head(axes, "")
    title = "speed, of the limit of memory, one thread:\nzfun (blue), torch's best form (grey)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    setup = (RESULTS / "kernels.md").read_text(encoding="utf-8").split("\n\n")[1]
    return signed(figure, Section(run.title, " ".join(setup.split()), []))


def host(*, narrow: bool = False) -> Figure:
    """Draw the time of Python in a step of a large model, beside FSDP2."""
    run = sections("host.md")["Llama 3 8B, 8 ranks"]
    figure, (axes,) = canvas(narrow, 2.7)
    bars(axes, column(run.tables[0], "median ms"), "host time, ms", "{:.1f}")
    return signed(figure, run)


def forecast(*, narrow: bool = False) -> Figure:
    """Draw measured steps between the bounds of their forecasts."""
    run = sections("forecast.md")["demo, fp32, 2 ranks, shared memory"]
    measured, least, most = (
        column(run.tables[0], name)
        for name in ("measured, ms", "at least, ms", "at most, ms")
    )
    figure, (axes,) = canvas(narrow, 2.7)
    for y, name in enumerate(measured):
        axes.barh(y, most[name] - least[name], 0.3, least[name], color=SKY)
        axes.plot(measured[name], y, "o", color=BLUE)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xlim(0, None)
    head(axes, "ms: the forecast's bounds, and the measured step")
    return signed(figure, run)


def deepspeed(*, narrow: bool = False) -> Figure:
    """Draw the time and the memory of a step beside DeepSpeed."""
    run = sections("step.md")["small, fp32, 2 ranks, shared memory, with DeepSpeed"]
    figure, panels = canvas(narrow, 3.6, columns=2, sharey=True)
    for axes, name in zip(panels, ("ms", "peak MB"), strict=True):
        bars(axes, column(run.tables[0], name), f"{run.name}\n{name}")
    return signed(figure, run)


def convergence(*, narrow: bool = False) -> Figure:
    """Draw the losses of one run, and how far each is from plain PyTorch's."""
    (run,) = sections("convergence.md").values()
    rows = run.tables[0]
    losses = {
        name: [number(row[name]) for row in rows[:-1]] for name in rows[0] if name
    }
    steps = [int(row[""]) for row in rows[:-1]]
    plain, *others = losses
    figure, (curves, apart) = canvas(narrow, 4.2, columns=2)
    for (name, ys), colour in zip(
        losses.items(), (GREY, SKY, BLUE, ORANGE, VERMILION), strict=True
    ):
        held = f"{name}: {rows[-1][name]} held out"
        curves.plot(steps, ys, color=colour, label=held)
        if name in others:
            gaps = [y - base for y, base in zip(ys, losses[plain], strict=True)]
            apart.plot(steps, gaps, color=colour)
    curves.legend(frameon=False, fontsize=9)
    titles = ("loss, nats for each byte", f"the same, less that of {plain}")
    for axes, title in zip((curves, apart), titles, strict=True):
        head(axes, title)
        axes.set_xlabel("steps")
    return signed(figure, run)


DRAWN = (
    *(step, memory, traffic, stores, kernels, host, forecast, convergence),
    deepspeed,
)
PICTURES: dict[str, Callable[..., Figure]] = {make.__name__: make for make in DRAWN}


def draw(directory: Path) -> list[Path]:
    """Draw every picture into a directory, in both forms."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context(STYLE):
        for name, make in PICTURES.items():
            for path, narrow in ((f"{name}.svg", False), (f"{name}_narrow.svg", True)):
                figure = make(narrow=narrow)
                figure.savefig(
                    directory / path, metadata={"Date": None}, facecolor="white"
                )
                written.append(directory / path)
    return written


if __name__ == "__main__":
    for written in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "pictures"):
        print(written)
