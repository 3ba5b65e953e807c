"""The command ``zfun``."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zfun.errors import ZfunError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_DEMO = """\
Trains a byte-level GPT on the source text of Python's own standard library, on local processes of
the CPU, under DDP, ZeRO-1, ZeRO-2, ZeRO-3, and ZeRO-3 with optimizer state, parameters and
gradients offloaded to host memory. Each composition runs in fresh processes. Then prints the cost
of each one (memory, time, bytes sent), checks that all compositions gave the same losses and the
same parameters to the last bit, and draws the tradeoff."""

_DEMO_EXIT = """\
exit status: 0 if all compositions agree to the last bit, 1 if two differ, 2 if the demo could not
run."""


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
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return _demo(args)
    except ZfunError as error:
        print(f"zfun: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zfun", description="Functional sharding of training state for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"zfun {_version()}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small GPT under every composition and compare the results",
        description=_DEMO,
        epilog=_DEMO_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--ranks",
        type=_positive,
        default=2,
        metavar="N",
        help="local processes to train on (default: %(default)s)",
    )
    demo.add_argument(
        "--steps",
        type=_positive,
        default=60,
        metavar="N",
        help="training steps of each composition (default: %(default)s)",
    )
    demo.add_argument(
        "--preset",
        default="demo",
        help="size of the model, a preset of examples/gpt.py (default: %(default)s)",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("zfun-demo"),
        metavar="DIR",
        help="folder of the picture (default: %(default)s)",
    )
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("zfun")
    except importlib.metadata.PackageNotFoundError:  # zfun is not installed
        return "0+unknown"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {value}")
    return value


def _demo(args: argparse.Namespace) -> int:
    from zfun import demo

    return demo.run(ranks=args.ranks, steps=args.steps, preset=args.preset, out=args.out)
