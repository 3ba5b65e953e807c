from __future__ import annotations

import dataclasses
import functools
import gc
import mmap
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zfun as zf
from zfun import cli, demo
from zfun.collectives import Workers
from zfun.demo._examples import load_example
from zfun.demo._memory import forget_peak, peak_bytes
from zfun.demo._picture import draw
from zfun.demo._table import DemoResult, differences, headline, table, verdict
from zfun.demo._train import COMPOSITIONS, DemoJob, RankReport, train
from zfun.errors import OptionError


def report(stage: int) -> RankReport:
    psi = 8_000_000
    kept = [psi // (2 if stage >= first else 1) for first in (3, 2, 1)]
    sent = (3 if stage == 3 else 2) * psi // 2
    return RankReport(
        losses=(5.5, 4.25, 3.125),
        digest="ab" * 32,
        step_s=(9.0, 0.1, 0.2, 0.3),
        held_bytes={"params": kept[0], "grads": kept[1], "optimizer": 2 * kept[2]},
        peak_bytes=50_000_000,
        sent_bytes=sent,
        theory_bytes=float(sent),
    )


RESULTS = [
    DemoResult(composition, (report(composition.stage),) * 2) for composition in COMPOSITIONS
]


def with_last_rank(**changes: Any) -> list[DemoResult]:
    first, second = RESULTS[-1].ranks
    return [
        *RESULTS[:-1],
        DemoResult(RESULTS[-1].composition, (first, dataclasses.replace(second, **changes))),
    ]


def test_the_table_has_a_row_for_each_composition_and_straight_columns() -> None:
    lines = table(RESULTS).splitlines()
    assert len(lines) == 3 + len(COMPOSITIONS)
    assert len({len(line) for line in lines}) == 1
    assert lines[3].split() == [
        "DDP",
        "3.125000",
        "200",
        "8.00",
        "8.00",
        "16.00",
        "50",
        "8.000",
        "8.000",
    ]
    assert lines[-1].split() == [
        "ZeRO-3",
        "+",
        "offload",
        "3.125000",
        "200",
        "*4.00",
        "*4.00",
        "*8.00",
        "50",
        "12.000",
        "12.000",
    ]


def test_the_verdict_of_equal_results_says_equal() -> None:
    assert differences(RESULTS) == []
    assert "Equal to the last bit under all 5 compositions" in verdict(RESULTS, [])
    assert (
        headline(RESULTS)
        == "ZeRO-3 keeps 50% of DDP's training state on each rank for 1.5 times the bytes sent"
    )


def test_one_bit_of_one_loss_on_one_rank_is_found() -> None:
    found = differences(with_last_rank(losses=(5.5, 4.25 + 2**-50, 3.125)))
    assert len(found) == 1
    assert found[0].startswith("ZeRO-3 + offload, rank 1: loss of step 2 is")
    assert "NOT agree" in verdict(RESULTS, found)


def test_other_parameters_behind_the_same_losses_are_found() -> None:
    assert (
        "parameters cdcdcdcdcdcd…, not abababababab…"
        in differences(with_last_rank(digest="cd" * 32))[0]
    )


def test_a_nan_equals_itself() -> None:
    losses = (5.5, float("nan"), float("nan"))
    results = [
        DemoResult(
            result.composition,
            tuple(dataclasses.replace(rank, losses=losses) for rank in result.ranks),
        )
        for result in RESULTS
    ]
    assert differences(results) == []


def test_the_picture_is_a_png(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = draw(RESULTS, tmp_path / "new" / "tradeoff.png", equal=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_peak_counts_memory_that_is_free_again() -> None:
    baseline = forget_peak()
    # mmap, because malloc may return resident memory, which does not change the peak.
    with mmap.mmap(-1, 64 * 2**20) as block:
        block[:: 2**12] = bytes(len(block) // 2**12)  # touch every page
    assert peak_bytes() - baseline >= 60 * 2**20


@pytest.fixture
def quick_start(monkeypatch) -> Iterator[None]:
    """Read the text and collect garbage once instead of once for each composition."""
    text = load_example("text")
    monkeypatch.setattr(text, "stdlib_bytes", functools.cache(text.stdlib_bytes))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.processes
def test_the_demo_runs_on_processes_and_all_compositions_agree(
    tmp_path, capfd, monkeypatch
) -> None:
    # fresh processes for each composition would import torch again
    with Workers(2, timeout_s=100.0) as workers:

        def on_held_processes(
            n: int, fn: Callable[..., RankReport], *args: Any, **limits: float
        ) -> list[RankReport]:
            assert n == 2
            assert limits.keys() == {"timeout_s", "collective_timeout_s"}
            return workers.run(fn, *args)

        monkeypatch.setattr(zf.collectives, "spawn", on_held_processes)
        run_the_demo(tmp_path, capfd)


def run_the_demo(tmp_path, capfd) -> None:
    assert (
        cli.main(
            ["demo", "--preset", "tiny", "--steps", "3", "--ranks", "2", "--out", str(tmp_path)]
        )
        == 0
    )
    printed = capfd.readouterr()
    assert "Equal to the last bit under all 5 compositions" in printed.out
    assert (tmp_path / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert all(composition.name in printed.err for composition in COMPOSITIONS)  # the progress bars


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.usefixtures("quick_start")
def test_the_demo_agrees_on_any_number_of_ranks(ranks: int, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        zf.collectives, "spawn", lambda n, fn, *args, **limits: zf.simulate(n, fn, *args)
    )
    assert demo.run(ranks=ranks, steps=2, preset="tiny", out=tmp_path) == 0
    assert "the loss of each of the 2 steps" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_start")
def test_recorded_bytes_and_held_bytes_follow_the_formulas() -> None:
    for composition in COMPOSITIONS:
        for measured in zf.simulate(2, train, DemoJob("tiny", 2), composition):
            assert measured.sent_bytes == measured.theory_bytes
            assert measured.held_bytes["optimizer"] >= 2 * measured.held_bytes["params"] // (
                1 if composition.stage in (0, 3) else 2
            )
            assert measured.losses[1] != measured.losses[0]


def test_demo_that_finds_a_difference_exits_with_1(tmp_path, monkeypatch, capsys) -> None:
    reports = iter(result.ranks for result in with_last_rank(digest="cd" * 32))
    monkeypatch.setattr(zf.collectives, "spawn", lambda *args, **kwargs: next(reports))
    assert demo.run(out=tmp_path) == 1
    assert "NOT agree" in capsys.readouterr().out


def test_an_unknown_preset_is_refused_with_the_known_presets(capsys) -> None:
    with pytest.raises(OptionError, match="tiny, demo, small, medium"):
        demo.run(preset="big")
    assert cli.main(["demo", "--preset", "big"]) == 2
    assert "zfun: the preset must be one of" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["a file", "a file/below"])
def test_an_impossible_folder_is_refused_before_training(
    place: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(zf.collectives, "spawn", lambda *args, **limits: pytest.fail("trained"))
    (tmp_path / "a file").write_text("")
    assert cli.main(["demo", "--out", str(tmp_path / place)]) == 2
    said = capsys.readouterr()
    assert "where no file can be written" in said.err
    assert "name another folder with --out" in said.err
    assert said.out == ""


# zfun is imported where both packages are missing.
WITHOUT_PACKAGES = """
import sys
for missing in (["matplotlib", "tqdm"], ["matplotlib"], ["tqdm"]):
    sys.modules |= dict.fromkeys(missing)
    from zfun import cli
    cli.main(["demo"])
    for name in missing:
        del sys.modules[name]
"""


def test_the_command_names_missing_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    both, *each = done.stderr.splitlines()
    assert "; matplotlib and tqdm cannot be imported; install zfun[demo]" in both
    for name, said in zip(("matplotlib", "tqdm"), each, strict=True):
        assert f"; {name} cannot be imported; install zfun[demo]" in said


@pytest.mark.parametrize("options", [{"ranks": 0}, {"steps": 0}, {"preset": 3}, {"out": None}])
def test_wrong_options_are_refused_before_training(options: Any, monkeypatch) -> None:
    monkeypatch.setattr(zf.collectives, "spawn", lambda *args, **limits: pytest.fail("trained"))
    with pytest.raises(OptionError, match=rf"{next(iter(options))} of run\(\) must be"):
        demo.run(**options)


def test_a_missing_package_is_named_with_a_remedy(monkeypatch) -> None:
    monkeypatch.setattr("zfun.demo._run.NEEDED", ("matplotlib", "surely_not_installed"))
    with pytest.raises(
        OptionError, match=r"surely_not_installed cannot be imported; install zfun\[demo\]"
    ):
        demo.run()


def test_version_and_help_are_printed(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("zfun 0")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["demo", "--help"])
    assert "to the last bit" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "-3", "two"])
def test_a_wrong_number_of_ranks_is_refused(value: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--ranks", value])
    assert "--ranks" in capsys.readouterr().err


def test_the_module_runs_as_a_command(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["zfun", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("zfun", run_name="__main__")
    assert capsys.readouterr().out.startswith("zfun 0")
