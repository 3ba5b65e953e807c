"""The command ``zfun``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zfun import __version__
from zfun.cli import _ckpt, _commands
from zfun.errors import ZfunError

__all__ = ["main"]


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
    parser = _parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        args.parser.print_help()
        return 2
    try:
        return args.run(args)
    except ZfunError as error:
        print(f"zfun: {error}", file=sys.stderr)
        return 2


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
