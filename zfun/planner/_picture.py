"""The picture of a timeline, which matplotlib draws; imported when a picture is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from zfun import drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from zfun.planner._spans import Span

_COLOURS = {
    "gather": drawing.BLUE,
    "compute": drawing.GREEN,
    "reduce": drawing.ORANGE,
    "optimizer": drawing.PINK,
    "read": drawing.SKY,
    "write": drawing.RED,
}
_LANES = ("read", "gather", "compute", "reduce", "write")
_LIGHT = 0.45
_HIGH = 0.64  # of a bar, in rows
_WIDTH = 11.0  # inches; of the bars 9.6
_POINTS = 9.6 * 72


def draw(
    bars: Sequence[tuple[Span, tuple[str, int]]],
    live: Sequence[tuple[float, int]],
    unit: str,
    title: str,
) -> drawing.Drawing:
    """Draw the bars of a timeline, and below the bytes that are gathered, if there are any.

    Args:
        bars: each with its lane and its row there.
        live: pairs of a time and the bytes that are gathered from then on.
        unit: of the times.
        title: stands above the bars.
    """
    spans = [span for span, _ in bars]
    duration = max((span.end for span in spans), default=0.0)
    shown = [
        (lane, row)
        for lane in _lanes(spans)
        for row in range(1 + max((r for _, (name, r) in bars if name == lane), default=-1))
    ]
    is_live = any(nbytes for _, nbytes in live)
    heights = [0.46 * max(len(shown), 1) + 0.1, *([1.1] if is_live else [])]
    figure = drawing.blank(_WIDTH, sum(heights) + 1.35, title)
    axes = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
    ).ravel()
    _draw_bars(axes[0], bars, shown, duration)
    if is_live:
        _draw_live(axes[1], live, duration)
    for panel in axes:
        drawing.frame(panel)
        panel.set_xlim(0, duration or 1.0)
    if unit == "s":
        axes[-1].xaxis.set_major_formatter(EngFormatter(unit="s"))
        axes[-1].set_xlabel("time, measured on this rank")
    else:
        axes[-1].xaxis.set_major_formatter(EngFormatter())
        is_pipeline = any(span.lane not in _LANES for span in spans)
        is_update = all(span.name.startswith("update") for span in spans)
        axes[-1].set_xlabel(
            "time of the model; "
            f"{'the step' if is_update else 'forward'} takes 1 for each "
            f"{'stage' if is_pipeline else 'element of a bucket'}"
        )
    drawing.put_legend(figure, _legend(spans))
    return figure


def _lanes(spans: Sequence[Span]) -> list[str]:
    """Return the lanes from top to bottom: queues of one rank, or the ranks of a pipeline."""
    ranks = {span.lane for span in spans} - {*_LANES}
    return [*_LANES, *sorted(ranks, key=lambda lane: int(lane.rpartition(" ")[2]))]


def _kind(span: Span) -> str:
    if span.lane not in _LANES:
        return "optimizer" if span.name.startswith("weights") else "compute"
    return "optimizer" if (span.lane, span.name) == ("compute", "update") else span.lane


def _is_light(span: Span) -> bool:
    return span.lane != "reduce" and span.name.startswith("backward")


def _draw_bars(
    axes: Axes,
    bars: Sequence[tuple[Span, tuple[str, int]]],
    shown: list[tuple[str, int]],
    duration: float,
) -> None:
    written: dict[int, float] = {}  # the end of the last number above each row
    for span, row in bars:
        kind, width, height = _kind(span), span.end - span.start, shown.index(row)
        alpha = _LIGHT if _is_light(span) else 1.0
        drawing.draw_bar(axes, height, (span.start, width), _COLOURS[kind], high=_HIGH, alpha=alpha)
        _write(axes, span, height, _POINTS / (duration or 1.0), written)
    lanes = {lane: [i for i, (name, _) in enumerate(shown) if name == lane] for lane, _ in shown}
    ticks = {lane: sum(places) / len(places) for lane, places in lanes.items() if places}
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(shown) - 0.5, -0.62)


def _write(axes: Axes, span: Span, height: int, scale: float, written: dict[int, float]) -> None:
    """Write the bucket into the bar, or above a narrow bar where no other number stands."""
    text, middle = str(span.bucket), (span.start + span.end) / 2
    width = (span.end - span.start) * scale
    is_inside = width >= 8
    if span.bucket < 0 or width < 1:
        return
    if not is_inside:
        half = 2.1 * len(text) / scale
        if middle - half < written.get(height, -math.inf):
            return
        written[height] = middle + half
    is_dark = _kind(span) in ("gather", "compute") and not _is_light(span)
    axes.text(
        middle,
        height if is_inside else height - _HIGH / 2 - 0.02,
        text,
        ha="center",
        va="center" if is_inside else "bottom",
        rotation=90 if is_inside and width < 5.5 * len(text) + 1 else 0,
        color="white" if is_inside and is_dark else drawing.BLACK,
        fontsize=8 if is_inside else 6.5,
    )


def _draw_live(axes: Axes, live: Sequence[tuple[float, int]], duration: float) -> None:
    peak = max(nbytes for _, nbytes in live)
    size, unit = drawing.unit_of(peak)
    # A release and a gather at one moment are one change.
    changes = dict(live)
    times, held = list(changes), [n / size for n in changes.values()]
    axes.fill_between(
        [*times, duration],
        [*held, held[-1]],
        step="post",
        color=_COLOURS["gather"],
        alpha=0.35,
        linewidth=0,
    )
    axes.set_ylabel(f"gathered,\n{unit}", color=drawing.BLACK)
    top = peak / size
    axes.set_ylim(0, 1.3 * top)
    axes.axhline(top, color=_COLOURS["gather"], linewidth=0.8, linestyle=":")
    digits = max(0, 2 - math.floor(math.log10(top)))
    axes.annotate(
        f"at most {top:.{digits}f} {unit}",
        (1, top),
        (-2, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8.5,
        color=drawing.BLACK,
    )


def _legend(spans: Sequence[Span]) -> list[Any]:
    kinds = {_kind(span) for span in spans}
    is_pipeline = any(span.lane not in _LANES for span in spans)
    labels = {"optimizer": "for weights"} if is_pipeline else {}
    handles = [
        Patch(color=colour, label=labels.get(kind, kind))
        for kind, colour in _COLOURS.items()
        if kind in kinds
    ]
    if any(_is_light(span) for span in spans):
        handles.append(Patch(color="#555555", alpha=_LIGHT, label="light: for backward"))
    if any(span.bucket >= 0 for span in spans):
        handles.append(
            Patch(color="none", label=f"numbers: {'micro-batches' if is_pipeline else 'buckets'}")
        )
    return handles
