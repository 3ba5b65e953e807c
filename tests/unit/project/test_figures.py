"""The figures of the house, and what must stay at zero."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import figures

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def package() -> list[figures.Module]:
    return figures.modules()


def module(name: str, text: str) -> figures.Module:
    """Parse a file of a made-up package."""
    path = figures.ROOT.parent / name
    return figures.Module(path, name, text.splitlines(), ast.parse(text))


@pytest.mark.slow
def test_the_command_prints_every_figure() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tools.figures", "--list", "long"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "lines in all / of code" in found.stdout
    assert "zfun/planner/plans/_plan.py 4" in found.stdout


def test_lines_of_code_are_no_docstrings_comments_or_blanks() -> None:
    top = '"""Doc.\n\nMore.\n"""\n\n# A comment.\nimport os\nx = 1\n'
    one = module("zfun/a.py", top + '\ndef f():\n    """Doc."""\n    return x\n')
    assert figures.code_lines(one) == 4
    assert figures.import_lines(one) == 1


def test_folders_that_import_each_other_are_found(package: list[figures.Module]) -> None:
    back = module("zfun/stores/made_up.py", "from zfun.transforms import zero\n")
    assert "zfun: stores and transforms" in figures.folder_circles([*package, back])


def test_no_folders_import_each_other(package: list[figures.Module]) -> None:
    assert figures.folder_circles(package) == []


def test_one_name_for_two_classes_is_found() -> None:
    first, second = module("zfun/a.py", "class Plan: ..."), module("zfun/b.py", "class _Plan: ...")
    assert figures.with_two_meanings([first, second]) == ["Plan: zfun/a.py, zfun/b.py"]


def test_a_name_of_a_class_has_one_meaning(package: list[figures.Module]) -> None:
    assert figures.with_two_meanings(package) == []


def test_many_parameters_are_found() -> None:
    names = ", ".join(f"a{i}" for i in range(9))
    one = module("zfun/a.py", f"class A:\n    def f(self, {names}): ...\n    def g(self, x): ...\n")
    assert figures.with_many_parameters([one]) == ["zfun/a.py:2 f (9)"]


def test_few_functions_have_many_parameters_and_few_files_are_long(
    package: list[figures.Module],
) -> None:
    assert len(figures.with_many_parameters(package)) <= 15
    lengths = [len(one.lines) for one in package]
    assert max(lengths) <= 450
    assert sum(length > figures.LONG_FILE for length in lengths) <= 10


def test_contributing_says_what_the_lines_of_each_large_folder_buy(
    package: list[figures.Module],
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = {name: float(x) for name, x in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.M)}
    counts = {name: n / 1000 for name, n in figures.lines_by_folder(package).items() if n >= 1000}
    assert told == pytest.approx(counts, rel=0.1)
