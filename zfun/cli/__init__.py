"""The command ``zfun``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from zfun import __version__
from zfun.cli import _ckpt, _commands
from zfun.errors import ZfunError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``zfun``.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit status.

    Example:
        >>> main([])  # doctest: +ELLIPSIS
        usage: zfun [-h] [--version] ...
        2
    """
    try:
        try:
            args = _parser().parse_args(argv)
            if not hasattr(args, "run"):
                args.parser.print_help()
                return 2
            _check_file(args)
            return args.run(args)
        finally:
            # Here, and not at exit, because the reader may have left.
            sys.stdout.flush()
    except ZfunError as error:
        print(f"zfun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has left, so the rest of the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _check_file(args: argparse.Namespace) -> None:
    """Refuse a file or directory that does not exist, before torch is imported to read it."""
    names = {"path": "PATH", "other": "OTHER", "hf": "config.json", "hardware": "--hardware"}
    for key, name in names.items():
        path = getattr(args, key, None)
        if isinstance(path, Path) and not (hasattr(args, "may_be_missing") or _exists(path)):
            raise ZfunError(
                f"the command reads files that exist; got {str(path)!r} for {name}; check the "
                f"path, which is relative to {str(Path.cwd())!r}"
            )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long a name, or a folder that may not be read
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zfun", description="Functional sharding of training state for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"zfun {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for family in (_commands, _ckpt):
        family.add_to(commands)
    return parser
