"""The pictures that zfun draws, and the short and the HTML forms of plans."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from zfun.errors import OptionError
from zfun.planner import Meter, ScheduleOptions, Timeline, Trace, TracedBucket, schedule, timeline

matplotlib = pytest.importorskip("matplotlib")


def plan(count: int, size: int = 4) -> Timeline:
    blocks = tuple(
        TracedBucket(f"bucket {i}: h.{i}", ((f"h.{i}", 4096),), 4096, 4, 4, 4) for i in range(count)
    )
    return timeline(schedule(Trace(blocks, size, tuple(range(count))), ScheduleOptions()))


def texts(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_a_figure_shows_itself_in_a_notebook_and_on_a_page() -> None:
    figure = plan(3).draw()
    assert figure._repr_png_().startswith(b"\x89PNG")
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(figure)
    assert shown["image/png"].startswith(b"\x89PNG")


def test_the_numbers_of_twenty_buckets_are_readable() -> None:
    figure = plan(20).draw()
    figure.draw_without_rendering()
    bars = figure.axes[0]
    assert {str(i) for i in range(20)} <= set(texts(figure))
    boxes = [text.get_window_extent() for text in bars.texts]
    assert not [
        (a, b)
        for i, a in enumerate(boxes)
        for b in boxes[:i]
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]


def test_the_picture_has_a_title_a_legend_and_units() -> None:
    figure = plan(4).draw()
    assert figure.get_suptitle() == "One step of 4 buckets, planned"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["gather", "compute", "reduce", "light: for backward", "numbers: buckets"]
    bars, live = figure.axes
    assert "forward takes 1" in live.get_xlabel()
    assert live.get_ylabel().split() == ["gathered,", "KiB"]
    assert "at most 32.0 KiB" in texts(figure)
    assert [tick.get_text() for tick in bars.get_yticklabels()] == ["gather", "compute", "reduce"]
    assert plan(4).draw("Mine").get_suptitle() == "Mine"
    # Nothing lies outside of the figure; the legend has an empty margin of half a point.
    inside = figure.get_tightbbox()
    assert min(inside.x0, inside.y0) > -0.02
    assert inside.x1 < figure.get_figwidth() + 0.02
    assert inside.y1 < figure.get_figheight() + 0.02


def test_a_panel_without_bytes_is_left_out() -> None:
    found = plan(4)
    whole = Timeline(tuple(s for s in found.spans if s.lane == "compute"), (), "s", found.labels)
    figure = whole.draw()
    assert len(figure.axes) == 1
    assert "measured" in figure.get_suptitle()


def test_plans_are_short_in_a_console_and_tables_in_a_notebook() -> None:
    blocks = tuple(TracedBucket(f"b{i}: <h>", ((f"h.{i}", 64),), 64, 4, 4, 4) for i in range(3))
    trace = Trace(blocks, 2, (0, 1, 2))
    made = schedule(trace)
    assert repr(trace) == "Trace(3 buckets over 2 ranks: 3 uses forward, 6 events backward)"
    assert repr(made).startswith("Schedule(3 buckets over 2 ranks: ")
    assert "at most 512 bytes gathered" in repr(timeline(made))
    for value in (trace, made):
        assert "<caption>" in value._repr_html_()
        assert "b0: &lt;h&gt;" in value._repr_html_()
    assert 'src="data:image/png;base64,' in timeline(made)._repr_html_()
    long = schedule(Trace(blocks, 2, (0, 1, 2) * 40))
    assert "more</td>" in long._repr_html_()


def test_live_bytes_are_a_table_in_a_notebook() -> None:
    with Meter() as meter:
        kept = torch.ones(1000)
    assert kept.numel() == 1000
    found = meter.live()
    assert repr(found).startswith("Live(2 moments, 0 bytes between steps, at most 3.91 KiB on")
    assert "<th>peak</th>" in found._repr_html_()


def test_a_timeline_without_matplotlib_is_a_table(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "<td>compute</td>" in plan(2)._repr_html_()


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"cannot be imported; install zfun\[demo\]"):
        plan(2).draw()
