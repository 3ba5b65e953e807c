"""``zfun io-bench`` and ``zfun clean``: the disk under ``stores.nvme()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zfun.cli._parsing import add_command, add_count, add_folder

if TYPE_CHECKING:
    import argparse

_IO_BENCH = """\
Writes and reads tensors through stores.nvme() with a range of settings, prints the bytes per second
of each setting, and the settings to paste, and draws a picture. Needs the extra zfun[demo]."""

_CLEAN = """\
Removes the directories that stores.nvme() made under PATH and whose processes are gone. Directories
of processes that live stay, and so does everything that zfun did not make."""


def add_to(commands: Any) -> None:
    """Add the commands to a parser."""
    words = "measure which settings of stores.nvme() are fastest on a disk"
    path = "a directory on the disk"
    bench = add_command(commands, "io-bench", _io_bench, words, _IO_BENCH, path=path)
    add_count(bench, "--mib", 1024, "MiB that each measurement writes and reads")
    add_count(bench, "--rounds", 3, "measurements of each setting")
    add_folder(bench, "zfun-io")

    words = "remove the files that crashed processes left on a disk"
    path = "the path given to stores.nvme()"
    add_command(commands, "clean", _clean, words, _CLEAN, path=path)


def _io_bench(args: argparse.Namespace) -> int:
    from zfun import demo

    return demo.io_bench(args.path, num_bytes=args.mib * 2**20, rounds=args.rounds, out=args.out)


def _clean(args: argparse.Namespace) -> int:
    from zfun import stores

    cleaned = stores.clean(args.path)
    for verdict, paths in (
        ("removed", cleaned.removed),
        ("in use", cleaned.in_use),
        ("stays: of another host, or not only of zfun, or without locks", cleaned.unknown),
    ):
        for path in paths:
            print(f"{path}: {verdict}")
    print(f"removed {len(cleaned.removed)}, {cleaned.num_bytes / 1e6:.1f} MB")
    return 0
