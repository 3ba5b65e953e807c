"""One stage-3 step stays short enough to read, and the page lists the one of today."""

from __future__ import annotations

from tools import one_step


def test_a_step_of_stage_3_runs_few_classes_and_calls() -> None:
    classes, calls = one_step.one_step()
    assert len(classes) <= 32
    assert len(calls) - 1 <= 15
    assert {"GatheredParams", "GradReducer", "ShardedLoss"} <= classes.keys()


def test_the_page_lists_the_step_of_today() -> None:
    page = one_step.PAGE.read_text(encoding="utf-8")
    assert one_step.with_section(page) == page
