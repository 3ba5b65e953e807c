"""``zfun io-bench`` and ``zfun clean``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zfun as zf
from zfun import cli
from zfun.demo import _io_bench
from zfun.demo._io_bench import Rate, Setting, best, draw_rates, rates_table
from zfun.errors import OptionError

MIB = 2**20
RATES = [
    Rate(Setting(MIB, 1, 1), 1.0, 2.0),
    Rate(Setting(MIB, 8, 2), 2.5, 2.0),
    Rate(Setting(MIB, 8, 8), 2.52, 2.05),
]


def test_the_fastest_setting_has_the_fewest_threads_of_those_as_fast() -> None:
    assert best(RATES) is RATES[1]
    lines = rates_table(RATES).splitlines()
    assert [line.endswith("<- best") for line in lines] == [False, False, False, True, False]
    assert lines[3].split()[:5] == ["1048576", "8", "2", "2.50", "2.00"]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw_rates(RATES, tmp_path / "new" / "io.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_prints_settings_that_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = (Setting(4096, 1, 1), Setting(4096, 2, 2))
    monkeypatch.setattr(_io_bench, "GRID", grid)
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    arguments = ["io-bench", str(disk), "--mib", "1", "--rounds", "2", "--out", str(out)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "4/4" in printed.err  # the progress bar
    assert (out / "io.png").read_bytes().startswith(b"\x89PNG")
    line = printed.out.splitlines()[-1].strip()
    assert line.startswith(f"zf.stores.nvme({str(disk)!r}, block_size=4096, ")
    store = eval(line, {"zf": zf})
    assert store.put(torch.ones(3), "state").get(torch.device("cpu")).wait().sum() == 3
    store.close()
    assert list(disk.iterdir()) == []


def test_a_sweep_without_the_extra_or_the_directory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["io-bench", str(tmp_path / "missing")]) == 2
    assert "reads files that exist" in capsys.readouterr().err
    monkeypatch.setattr(_io_bench, "sweep", lambda *args, **options: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    assert cli.main(["io-bench", str(tmp_path), "--out", str(tmp_path / "file")]) == 2
    assert "where no file can be written" in capsys.readouterr().err
    monkeypatch.setattr(_io_bench, "NEEDED", ("matplotlib", "surely_not_installed"))
    with pytest.raises(OptionError, match=r"surely_not_installed cannot .*install zfun\[demo\]"):
        zf.demo.io_bench(tmp_path)


def test_clean_prints_what_was_removed_and_what_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import os, sys, torch, zfun as zf;"
        "store = zf.stores.nvme(sys.argv[1]); store.put(torch.ones(5000), 'state').flush();"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=True)
    (dead,) = os.listdir(tmp_path)  # noqa: PTH208
    store = zf.stores.nvme(tmp_path)
    handle = store.put(torch.ones(3), "state")
    assert cli.main(["clean", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path / dead}: removed" in printed
    assert f"{Path(store.file or '').parent}: in use" in printed
    assert "removed 1, 0.0 MB" in printed
    assert handle.get(torch.device("cpu")).wait().sum() == 3
    assert cli.main(["clean", str(tmp_path / "missing")]) == 2
