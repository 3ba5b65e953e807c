"""The command zfun from outside: what it imports, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zfun as zf
from zfun import cli

# Prints which of these were imported, after the command.
PROBE = """
import sys, zfun.cli
try:
    status = zfun.cli.main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print("imported:", sorted({"torch", "numba", "numpy"} & sys.modules.keys()), status)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["plan", "--help"],
        ["ckpt", "inspect", "nowhere"],
        ["plan", "--hf", "nowhere.json", "--ranks", "8"],
        ["ckpt", "diff", ".", "nowhere"],
    ],
    ids=" ".join,
)
def test_help_and_missing_files_import_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(zf.__file__).parents[1])},
    )
    assert found.stdout.splitlines()[-1] == f"imported: [] {2 if 'nowhere' in str(words) else 0}"
    assert ("files that exist" in found.stderr) is ("nowhere" in str(words))


# A command that writes more than a pipe holds.
LONG = """
import sys, zfun.cli
zfun.cli._commands._clean.__code__ = (lambda args: print("x" * 1_000_000) or 0).__code__
sys.exit(zfun.cli.main(["clean", "."]))
"""


def test_a_closed_pipe_ends_quietly() -> None:
    """As in ``zfun ckpt inspect PATH | head -0``."""
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-c", LONG],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(zf.__file__).parents[1])},
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, b"")


def test_an_interrupt_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zf.checkpoint, "inspect", interrupted)
    assert cli.main(["ckpt", "inspect", str(tmp_path)]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


def test_descriptions_fold_at_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (50, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit):
            cli.main(["ckpt", "verify", "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert width - 20 < max(map(len, lines)) <= width


def test_names_are_imported_at_their_first_use() -> None:
    assert set(zf.__all__) <= set(dir(zf))
    assert {"testing", "interop", "evaluation", "reductions"} <= set(dir(zf))
    assert zf.testing is sys.modules["zfun.testing"]
    for name in ("Zero", "_private", "nothing"):
        with pytest.raises(AttributeError, match=f"'zfun' has no attribute '{name}'"):
            getattr(zf, name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("AdamW", r"the rule is zf\.optim\.adamw\(\.\.\.\)"),
        ("SGD", r"the rule is zf\.optim\.sgd\("),
        ("RMSprop", r"zf\.optim\.from_torch\(torch\.optim\.RMSprop, lr="),
        ("nothing", "has no attribute 'nothing'$"),
    ],
)
def test_names_of_torch_optimizers_name_the_rule(name: str, remedy: str) -> None:
    with pytest.raises(AttributeError, match=remedy):
        getattr(zf.optim, name)
