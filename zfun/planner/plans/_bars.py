"""The picture of several plans side by side; imported when a picture is asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zfun import drawing
from zfun.planner._parts import Bytes
from zfun.planner.plans._picture import COLOURS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes

    from zfun.planner.plans._hardware import Forecast
    from zfun.planner.plans._record import Plan

_PARTS = {
    "compute_s": drawing.BLUE,
    "network_s": drawing.RED,
    "host_link_s": drawing.SKY,
    "disk_s": drawing.GREY,
    "update_s": drawing.GREEN,
}


def draw_bars(
    plans: Mapping[str, Plan], forecasts: Mapping[str, Forecast], device_bytes: float
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
