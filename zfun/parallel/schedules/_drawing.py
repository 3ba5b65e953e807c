"""The picture of a schedule, which matplotlib draws; imported when a picture is asked for."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zfun.parallel.schedules._actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action

# Okabe and Ito's palette, whose colours differ for colour-blind readers and in grey.
_COLOURS = {FORWARD: "#56B4E9", BACKWARD: "#E69F00", INPUTS: "#F0E442", WEIGHTS: "#009E73"}
_NAMES = {
    FORWARD: "F: forward",
    BACKWARD: "B: backward",
    INPUTS: "I: backward of inputs",
    WEIGHTS: "W: backward of parameters",
}
_INK = "#222222"
_HIGH = 0.8  # of a bar, in rows


class Drawing(Figure):
    """A figure that a notebook and a page show without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


def drawn(rows: Sequence[Sequence[tuple[float, float, Action]]], title: str) -> Drawing:
    """Draw a row of bars for each rank.

    Args:
        rows: start, length and action, for each rank.
        title: stands above the bars.
    """
    figure = Drawing(figsize=(11.0, 0.42 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    num_stages = 1 + max(action.stage for row in rows for _, _, action in row)
    for rank, row in enumerate(rows):
        for start, length, (stage, kind, k) in row:
            # Later rounds of stages on a rank are lighter.
            alpha = 1.0 - 0.55 * (stage // len(rows)) / max(1, (num_stages - 1) // len(rows))
            axes.barh(
                rank,
                length,
                _HIGH,
                start,
                color=_COLOURS[kind],
                alpha=alpha,
                edgecolor="white",
                linewidth=1,
            )
            axes.text(
                start + length / 2, rank, str(k), ha="center", va="center", fontsize=8, color=_INK
            )
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, max(start + length for row in rows for start, length, _ in row) or 1.0)
    axes.set_xlabel("time of the model, in which messages take none; numbers: micro-batches")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    kinds = {action.kind for row in rows for _, _, action in row}
    handles = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in "FBIW" if kind in kinds]
    if num_stages > len(rows):
        handles.append(Patch(color="none", label="light: later stages of a rank"))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=5,
        frameon=False,
        fontsize=9,
        handlelength=1.1,
        handleheight=1.1,
    )
    return figure
