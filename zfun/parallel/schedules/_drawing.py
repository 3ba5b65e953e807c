"""The picture of a schedule, which matplotlib draws; imported when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Patch

from zfun import drawing
from zfun.parallel.schedules._actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action

_COLOURS = {
    FORWARD: drawing.SKY,
    BACKWARD: drawing.ORANGE,
    INPUTS: drawing.YELLOW,
    WEIGHTS: drawing.GREEN,
}
_NAMES = {
    FORWARD: "F: forward",
    BACKWARD: "B: backward",
    INPUTS: "I: backward of inputs",
    WEIGHTS: "W: backward of parameters",
}
_HIGH = 0.8  # of a bar, in rows


def drawn(rows: Sequence[Sequence[tuple[float, float, Action]]], title: str) -> drawing.Drawing:
    """Draw a row of bars for each rank.

    Args:
        rows: start, length and action, for each rank.
        title: stands above the bars.
    """
    figure = drawing.blank(11.0, 0.42 * len(rows) + 1.3, title)
    axes = figure.subplots()
    num_stages = 1 + max(action.stage for row in rows for _, _, action in row)
    for rank, row in enumerate(rows):
        for start, length, (stage, kind, k) in row:
            # Later rounds of stages on a rank are lighter.
            alpha = 1.0 - 0.55 * (stage // len(rows)) / max(1, (num_stages - 1) // len(rows))
            drawing.draw_bar(axes, rank, (start, length), _COLOURS[kind], high=_HIGH, alpha=alpha)
            axes.text(
                start + length / 2,
                rank,
                str(k),
                ha="center",
                va="center",
                fontsize=8,
                color=drawing.BLACK,
            )
    axes.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, max(start + length for row in rows for start, length, _ in row) or 1.0)
    axes.set_xlabel("time of the model, in which messages take none; numbers: micro-batches")
    drawing.frame(axes)
    kinds = {action.kind for row in rows for _, _, action in row}
    handles = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in "FBIW" if kind in kinds]
    if num_stages > len(rows):
        handles.append(Patch(color="none", label="light: later stages of a rank"))
    drawing.put_legend(figure, handles, 5)
    return figure
