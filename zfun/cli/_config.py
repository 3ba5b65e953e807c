"""``zfun explain-config``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zfun.cli._parsing import add_command

if TYPE_CHECKING:
    import argparse

_EXPLAIN_CONFIG = """\
Prints for each key of a configuration of DeepSpeed the option of zfun, or the reason why the key is
ignored; or all mistakes."""

_EXPLAIN_CONFIG_EXIT = """\
exit status: 0 if the configuration loads, 1 if it has mistakes, 2 if the file cannot be read."""


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    words = "show what becomes of each key of a DeepSpeed configuration"
    explain = add_command(
        commands,
        "explain-config",
        _explain_config,
        words,
        _EXPLAIN_CONFIG,
        epilog=_EXPLAIN_CONFIG_EXIT,
        path="the JSON file",
    )
    explain.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value of the run that fills auto, such as hidden_size=768; may be repeated",
    )


def _explain_config(args: argparse.Namespace) -> int:
    from zfun.errors import ConfigError
    from zfun.interop import from_ds_config, parse_auto_values

    try:
        print(from_ds_config(args.path, auto=parse_auto_values(args.set)))
    except ConfigError as error:
        print(f"zfun: {error}", file=sys.stderr)
        return 1
    return 0
