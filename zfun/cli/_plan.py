"""``zfun plan``: a step before the step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zfun.cli._parsing import add_command, add_count, add_folder, positive, size

if TYPE_CHECKING:
    import argparse

_PLAN = """\
Plans a training step of a causal language model of Hugging Face, described by its config.json:
prints the memory, the bytes sent and the operations of each composition on one rank, with
--device-memory the fastest composition that fits, and draws a picture. Nothing is allocated. Needs
transformers, and matplotlib for the picture."""

_PLAN_EXIT = "exit status: 0 if a composition fits, 1 if none does, 2 on an error."


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    words = "plan a step of a model of Hugging Face: memory, messages, times"
    made = add_command(commands, "plan", _plan, words, _PLAN, epilog=_PLAN_EXIT)
    made.add_argument("--hf", type=Path, required=True, metavar="FILE", help="the config.json")
    made.add_argument("--ranks", type=positive, required=True, metavar="N", help="ranks")
    add_count(made, "--rows", 1, "sequences in the batch of a rank")
    add_count(made, "--length", 1024, "tokens in a sequence")
    made.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="bf16",
        help="bf16 for mixed precision (default: %(default)s)",
    )
    made.add_argument("--device-memory", type=size, metavar="SIZE", help="of a rank, such as 80GB")
    made.add_argument("--host-memory", type=size, metavar="SIZE", help="of a rank, such as 200GB")
    made.add_argument(
        "--hardware", type=Path, metavar="FILE", help="a file of zfun hw-bench, for times"
    )
    add_folder(made, "zfun-plan")


def _plan(args: argparse.Namespace) -> int:
    from zfun import demo

    limits = {"device_bytes": args.device_memory, "host_bytes": args.host_memory}
    return demo.plan(
        args.hf,
        ranks=args.ranks,
        rows=args.rows,
        length=args.length,
        dtype=args.dtype,
        hardware=args.hardware,
        out=args.out,
        **{name: float(size) for name, size in limits.items() if size is not None},
    )
