"""``zfun demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zfun.cli._parsing import add_command, add_count, add_folder

if TYPE_CHECKING:
    import argparse

_DEMO = """\
Trains a byte-level GPT on the source text of Python's own standard library, on local processes of
the CPU, under DDP, ZeRO-1, ZeRO-2, ZeRO-3, and ZeRO-3 with optimizer state, parameters and
gradients offloaded to host memory. Each composition runs in fresh processes. Then prints the cost
of each one (memory, time, bytes sent), checks that all compositions gave the same losses and the
same parameters to the last bit, and draws the tradeoff."""

_DEMO_EXIT = """\
exit status: 0 if all compositions agree to the last bit, 1 if two differ, 2 if the demo could not
run."""


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    words = "train a small GPT under every composition and compare the results"
    demo = add_command(commands, "demo", _demo, words, _DEMO, epilog=_DEMO_EXIT)
    add_count(demo, "--ranks", 2, "local processes to train on")
    add_count(demo, "--steps", 60, "training steps of each composition")
    demo.add_argument(
        "--preset",
        default="demo",
        help="size of the model, a preset of examples/gpt.py (default: %(default)s)",
    )
    add_folder(demo, "zfun-demo")


def _demo(args: argparse.Namespace) -> int:
    from zfun import demo

    return demo.run(ranks=args.ranks, steps=args.steps, preset=args.preset, out=args.out)
