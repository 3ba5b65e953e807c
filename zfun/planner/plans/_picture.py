"""Pictures of plans, which matplotlib draws; imported when a picture is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zfun import drawing
from zfun.planner._parts import Bytes, Instant, Live

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from zfun.planner.plans._hardware import Forecast

COLOURS = {
    "params": drawing.BLUE,
    "masters": "#004A73",
    "moments": drawing.GREEN,
    "grads": drawing.ORANGE,
    "gathered": drawing.SKY,
    "communication": drawing.RED,
    "activations": drawing.PINK,
    "staging": drawing.YELLOW,
    "work": drawing.GREY,
}

_PARTS = {
    "compute_s": drawing.BLUE,
    "network_s": drawing.RED,
    "host_link_s": drawing.SKY,
    "disk_s": drawing.GREY,
    "update_s": drawing.GREEN,
}


def draw(instants: Sequence[Instant], title: str) -> drawing.Drawing:
    """Draw the bytes by category over the moments of a step, on the device and below on the host.

    Args:
        instants: the moments.
        title: stands above the picture.
    """
    places = {"on the device": [instant.device for instant in instants]}
    if any(instant.host.total for instant in instants):
        places["in host memory"] = [instant.host for instant in instants]
    figure = drawing.blank(11.0, 1.2 + 2.6 * len(places), title)
    axes = figure.subplots(len(places), 1, sharex=True, squeeze=False).ravel()
    for panel, (place, held) in zip(axes, places.items(), strict=True):
        _draw_place(panel, place, held)
    axes[-1].set_xlabel("moments of a step: each time that a buffer is made", color=drawing.BLACK)
    handles = [handle for panel in axes for handle in panel.get_legend_handles_labels()[0]]
    drawing.put_legend(figure, list({handle.get_label(): handle for handle in handles}.values()))
    return figure


def draw_frontier(
    points: Sequence[tuple[float, float]],
    front: Sequence[tuple[float, float]],
    best: tuple[float, float, str] | None,
    limit: float,
) -> drawing.Drawing:
    """Draw compositions by the bytes on the device and the seconds of a step.

    Args:
        points: bytes and seconds that each composition needs at the least.
        front: those of the frontier, the shortest step first.
        best: bytes, seconds and name of the plan that was chosen.
        limit: the memory of the device; infinite without a limit.
    """
    figure = drawing.blank(8.0, 4.6)
    panel = figure.subplots()
    most = max(num_bytes for num_bytes, _ in points)
    size, unit = drawing.unit_of(most)
    scaled = [(num_bytes / size, seconds) for num_bytes, seconds in points]
    panel.scatter(*zip(*scaled, strict=True), s=9, color="#BBBBBB", label="composition")
    edge = [(num_bytes / size, seconds) for num_bytes, seconds in front]
    panel.plot(
        *zip(*edge, strict=True),
        color=COLOURS["params"],
        marker="o",
        markersize=4,
        drawstyle="steps-pre",
        label="frontier",
    )
    if math.isfinite(limit):
        panel.axvline(
            limit / size, color=drawing.BLACK, linestyle=":", linewidth=1, label="the device"
        )
    if best is not None:
        num_bytes, seconds, name = best
        panel.scatter(
            [num_bytes / size], [seconds], s=70, marker="*", color=COLOURS["communication"]
        )
        panel.set_title(name, fontsize=9, color=drawing.BLACK, loc="left")
    if min(seconds for _, seconds in points) > 0:
        panel.set_yscale("log")
    panel.set_xscale("log")
    panel.set_xlabel(f"on the device, at the least, {unit}", color=drawing.BLACK)
    panel.set_ylabel("step, s", color=drawing.BLACK)
    drawing.frame(panel)
    panel.legend(frameon=False, fontsize=8.5)
    return figure


def _draw_place(panel: Axes, place: str, held: Sequence[Bytes]) -> None:
    peak = max(one.total for one in held)
    size, unit = drawing.unit_of(peak)
    fields = [name for name in Bytes._fields if any(getattr(one, name) for one in held)]
    panel.stackplot(
        range(len(held)),
        [[getattr(one, name) / size for one in held] for name in fields],
        labels=fields,
        colors=[COLOURS[name] for name in fields],
        step="post",
        linewidth=0,
    )
    at = max(range(len(held)), key=lambda number: held[number].total)
    panel.axhline(peak / size, color=drawing.BLACK, linewidth=0.8, linestyle=":")
    panel.annotate(
        f"at most {peak / size:.3g} {unit}",
        (at, peak / size),
        (0, 2),
        textcoords="offset points",
        ha="right" if at > len(held) / 2 else "left",
        fontsize=8.5,
        color=drawing.BLACK,
    )
    panel.set_ylabel(f"{place},\n{unit}", color=drawing.BLACK)
    panel.set_ylim(0, 1.15 * max(peak / size, 1e-9))
    panel.set_xlim(0, max(len(held) - 1, 1))
    drawing.frame(panel)


def draw_bars(
    plans: Mapping[str, Live], forecasts: Mapping[str, Forecast], device_bytes: float
) -> drawing.Drawing:
    """Draw the peak of each plan by category, the limit of the device, and the times of a step.

    Args:
        plans: the plans by name.
        forecasts: the times by name; empty without a description of hardware.
        device_bytes: the memory of the device; infinite without a limit.
    """
    num_panels = 2 if forecasts else 1
    height = 2.4 + 0.45 * len(plans)
    figure = drawing.blank(10.0 + 5.0 * (num_panels - 1), height)
    axes = figure.subplots(1, num_panels, sharey=True, squeeze=False).ravel()
    peaks = {name: plan.peak.device for name, plan in plans.items()}
    most = max((held.total for held in peaks.values()), default=0)
    size, unit = drawing.unit_of(most)
    fields = [name for name in Bytes._fields if any(getattr(one, name) for one in peaks.values())]
    _stack(
        axes[0],
        {field: [getattr(one, field) / size for one in peaks.values()] for field in fields},
        COLOURS,
    )
    if math.isfinite(device_bytes):
        axes[0].axvline(device_bytes / size, color=drawing.BLACK, linestyle=":", linewidth=1)
    axes[0].set_yticks(range(len(plans)), list(plans), fontsize=8.5)
    axes[0].invert_yaxis()
    axes[0].set_xlabel(f"peak on the device, {unit}", color=drawing.BLACK)
    if forecasts:
        shown = {
            part: [getattr(forecasts[name], part) for name in plans]
            for part in _PARTS
            if any(getattr(one, part) for one in forecasts.values())
        }
        _stack(axes[1], shown, _PARTS)
        axes[1].set_xlabel("seconds of a step in which nothing overlaps", color=drawing.BLACK)
    return figure


def _stack(panel: Axes, values: Mapping[str, list[float]], colours: Mapping[str, str]) -> None:
    """Draw one horizontal bar for each plan, of one piece for each name."""
    left = [0.0] * max(map(len, values.values()), default=0)
    for name, widths in values.items():
        label = name.removesuffix("_s").replace("_", " ")
        panel.barh(range(len(widths)), widths, left=left, color=colours[name], label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    drawing.frame(panel)
    panel.legend(frameon=False, fontsize=8.5, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
