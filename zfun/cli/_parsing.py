"""Add a command or an argument to a parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    words: str,
    description: str | None = None,
    *,
    epilog: str | None = None,
    path: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command, with the argument PATH if ``path`` says what the path is."""
    made = commands.add_parser(name, help=words, description=description, epilog=epilog)
    made.set_defaults(run=run)
    if path is not None:
        made.add_argument("path", type=address, metavar="PATH", help=path)
    return made


def address(text: str) -> str | Path:
    """Return the address of a store as it is, because a path has no two slashes."""
    return text if "://" in text else Path(text)


def add_count(parser: argparse.ArgumentParser, name: str, default: int, words: str) -> None:
    """Add an option with a number of at least 1."""
    words += " (default: %(default)s)"
    parser.add_argument(name, type=positive, default=default, metavar="N", help=words)


def add_folder(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option that names the folder of the picture."""
    words = "folder of the picture (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path(default), metavar="DIR", help=words)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {value}")
    return value


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", text, re.IGNORECASE)
    if match is None or float(match[1]) * _UNITS[match[2].upper()] < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB or 5GB; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def mesh_sizes(text: str) -> dict[str, int]:
    """Return the size of each axis of a mesh; none for ``auto``.

    Example:
        >>> mesh_sizes("pp=2, dp=-1"), mesh_sizes("auto")
        ({'pp': 2, 'dp': -1}, {})
    """
    found: dict[str, int] = {}
    if text == "auto":
        return found
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name in found or re.fullmatch(r"-1|[1-9]\d*", number) is None:
            raise argparse.ArgumentTypeError(
                f"must be sizes of axes such as pp=8,dp=16,tp=8, each axis once; got {text!r}"
            )
        found[name] = int(number)
    return found
