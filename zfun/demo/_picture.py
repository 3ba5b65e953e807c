"""Draw the tradeoff between memory and traffic."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zfun.demo._table import MB, DemoResult, headline
from zfun.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, whose colours differ for colour-blind readers and in grey.
PARTS = {"params": "#0072B2", "grads": "#E69F00", "optimizer": "#009E73"}
SENT = "#56B4E9"
INK = "#222222"
FAINT = "#8a8a8a"


def check_folder(out: str | Path) -> Path:
    """Make a folder and write a file there, before measurements that take minutes."""
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OptionError(
            f"results go into a folder that can be written; got {str(out)!r}, where no file can be "
            f"written ({error.strerror}); name another folder with --out"
        ) from error
    return out


def draw(results: Sequence[DemoResult], path: Path, *, equal: bool) -> Path:
    """Draw memory, traffic and losses of all compositions side by side; return the file."""
    from zfun import drawing

    figure = drawing.blank(13, 5.2, headline(results))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    memory, traffic, losses = figure.subplots(1, 3, width_ratios=(1.3, 1, 1.1))
    _draw_memory(memory, results)
    _draw_traffic(traffic, results)
    _draw_losses(losses, results, equal=equal)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def check_installed(command: str, names: Sequence[str]) -> None:
    """Refuse a command whose packages, those of the extra ``demo``, are missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"{command} needs {' and '.join(names)}; {' and '.join(missing)} cannot be imported; "
            "install zfun[demo]"
        )


def _draw_memory(axes: Axes, results: Sequence[DemoResult]) -> None:
    from matplotlib.patches import Patch

    rows = range(len(results))
    left = [0.0] * len(results)
    for part, colour in PARTS.items():
        for row, result in enumerate(results):
            width = result.ranks[0].held_bytes[part] / MB
            axes.barh(
                row,
                width,
                0.62,
                left[row],
                color=colour,
                edgecolor="white",
                hatch="///" if result.composition.offload else None,
            )
            left[row] += width
    for row, total in enumerate(left):
        axes.annotate(
            f"{total:.1f}", (total, row), (5, 0), textcoords="offset points", va="center", color=INK
        )
    (peaks,) = axes.plot(
        [result.peak_bytes / MB for result in results],
        rows,
        "D",
        color=INK,
        markersize=6,
        label="measured peak",
    )
    axes.set_yticks(rows, [result.composition.name for result in results])
    axes.set_xlim(0, 1.16 * max(*left, *(result.peak_bytes / MB for result in results)))
    axes.set_ylim(len(results) - 0.5, -0.5)
    dress(axes, "Memory of each rank, MB (peak: with activations)", "x")
    parts = [Patch(color=colour, label=part) for part, colour in PARTS.items()]
    hosted = Patch(facecolor="white", edgecolor=FAINT, hatch="///", label="in host memory")
    # A legend fills columns from top to bottom, so the parts stand in the first row.
    handles = [parts[0], hosted, parts[1], peaks, parts[2]]
    axes.legend(
        handles=handles,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.45, -0.08),
        ncols=3,
        handlelength=1.4,
    )


def _draw_traffic(axes: Axes, results: Sequence[DemoResult]) -> None:
    for row, result in enumerate(results):
        report = result.ranks[0]
        sent, theory = report.sent_bytes / MB, report.theory_bytes / MB
        axes.barh(row, sent, 0.62, color=SENT, label="recorded" if row == 0 else None)
        axes.plot(
            [theory, theory],
            [row - 0.42, row + 0.42],
            color=INK,
            linewidth=2,
            label="ZeRO's formula" if row == 0 else None,
        )
        axes.annotate(
            f"{sent:.1f}", (sent, row), (7, 0), textcoords="offset points", va="center", color=INK
        )
    axes.set_yticks(range(len(results)), [])
    axes.set_xlim(0, 1.2 * max(1e-3, *(result.ranks[0].theory_bytes / MB for result in results)))
    axes.set_ylim(len(results) - 0.5, -0.5)
    dress(axes, "Sent by each rank in a step, MB", "x")
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, handlelength=1.4
    )


def _draw_losses(axes: Axes, results: Sequence[DemoResult], *, equal: bool) -> None:
    styles = [
        ("-", 7.0, 0.25),
        ("-", 4.0, 0.45),
        ("-", 1.8, 1.0),
        ("--", 1.6, 1.0),
        (":", 1.6, 1.0),
    ]
    colours = ["#0072B2", "#56B4E9", "#E69F00", "#009E73", "#222222"]
    for result, (line, width, alpha), colour in zip(results, styles, colours, strict=False):
        curve = result.ranks[0].losses
        steps = range(1, len(curve) + 1)
        axes.plot(
            steps,
            curve,
            line,
            linewidth=width,
            alpha=alpha,
            color=colour,
            label=result.composition.name,
        )
    agreement = "equal to the last bit" if equal else "NOT equal"
    dress(axes, f"Loss: {len(results)} curves, {agreement}", "y")
    axes.set_xlabel("step", color=INK)
    axes.legend(frameon=False, loc="upper right", handlelength=2.2)


def dress(axes: Axes, title: str, grid: Literal["x", "y"]) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
