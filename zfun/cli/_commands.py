"""The commands that are not of the family ``zfun ckpt``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zfun.cli import _parsing
from zfun.errors import ZfunError

_DEMO = """\
Trains a byte-level GPT on the source text of Python's own standard library, on local processes of
the CPU, under DDP, ZeRO-1, ZeRO-2, ZeRO-3, and ZeRO-3 with optimizer state, parameters and
gradients offloaded to host memory. Each composition runs in fresh processes. Then prints the cost
of each one (memory, time, bytes sent), checks that all compositions gave the same losses and the
same parameters to the last bit, and draws the tradeoff."""

_DEMO_EXIT = """\
exit status: 0 if all compositions agree to the last bit, 1 if two differ, 2 if the demo could not
run."""

_IO_BENCH = """\
Writes and reads tensors through stores.nvme() with a range of settings, prints the bytes per second
of each setting, and the settings to paste, and draws a picture. Needs the extra zfun[demo]."""

_PLAN = """\
Plans a training step of a causal language model of Hugging Face, described by its config.json:
prints the memory, the bytes sent and the operations of each composition on one rank, with
--device-memory the fastest composition that fits, and draws a picture. Nothing is allocated. Needs
transformers, and matplotlib for the picture."""

_PLAN_EXIT = "exit status: 0 if a composition fits, 1 if none does, 2 on an error."

_HW_BENCH = """\
Measures the rates of this machine that a plan needs for times: matrix products, updates, messages
between local processes, copies to a device, and the disk of PATH. Writes a JSON file for
zfun plan --hardware. Needs the extra zfun[demo]."""

_CLEAN = """\
Removes the directories that stores.nvme() made under PATH and whose processes are gone. Directories
of processes that live stay, and so does everything that zfun did not make."""

_EXPLAIN_CONFIG = """\
Prints for each key of a configuration of DeepSpeed the option of zfun, or the reason why the key is
ignored; or all mistakes."""

_EXPLAIN_CONFIG_EXIT = """\
exit status: 0 if the configuration loads, 1 if it has mistakes, 2 if the file cannot be read."""


def add_to(commands: Any) -> None:
    """Add the commands to a parser."""
    words = "train a small GPT under every composition and compare the results"
    demo = _parsing.add_command(commands, "demo", _demo, words, _DEMO, epilog=_DEMO_EXIT)
    _parsing.add_count(demo, "--ranks", 2, "local processes to train on")
    _parsing.add_count(demo, "--steps", 60, "training steps of each composition")
    words = "size of the model, a preset of examples/gpt.py (default: %(default)s)"
    demo.add_argument("--preset", default="demo", help=words)
    _parsing.add_folder(demo, "zfun-demo")

    words = "measure which settings of stores.nvme() are fastest on a disk"
    path = "a directory on the disk"
    bench = _parsing.add_command(commands, "io-bench", _io_bench, words, _IO_BENCH, path=path)
    _parsing.add_count(bench, "--mib", 1024, "MiB that each measurement writes and reads")
    _parsing.add_count(bench, "--rounds", 3, "measurements of each setting")
    _parsing.add_folder(bench, "zfun-io")

    words = "plan a step of a model of Hugging Face: memory, messages, times"
    plan = _parsing.add_command(commands, "plan", _plan, words, _PLAN, epilog=_PLAN_EXIT)
    plan.add_argument("--hf", type=Path, required=True, metavar="FILE", help="the config.json")
    plan.add_argument("--ranks", type=_parsing.positive, required=True, metavar="N", help="ranks")
    _parsing.add_count(plan, "--rows", 1, "sequences in the batch of a rank")
    _parsing.add_count(plan, "--length", 1024, "tokens in a sequence")
    words = "plan one composition over the axes of a mesh, such as pp=8,dp=16,tp=8: the last varies"
    words += " fastest; of pp, dp, sp and tp, of which one may be -1; auto plans every mesh, with"
    words += " ROWS sequences of each rank, and takes the fastest that fits"
    plan.add_argument("--mesh", type=_parsing.mesh_sizes, metavar="SIZES", help=words)
    words = "with --mesh: micro-batches of a step (default: one for each row in a pipeline, else 1)"
    plan.add_argument("--micro-batches", type=_parsing.positive, metavar="N", help=words)
    words = "with --mesh: the stage of ZeRO (default: 1)"
    plan.add_argument("--stage", type=int, choices=range(4), help=words)
    words = "with --mesh: recompute layers in backward"
    plan.add_argument("--recomputed", action="store_true", help=words)
    plan.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="bf16",
        help="bf16 for mixed precision (default: %(default)s)",
    )
    plan.add_argument(
        "--device-memory", type=_parsing.size, metavar="SIZE", help="of a rank, such as 80GB"
    )
    plan.add_argument(
        "--host-memory", type=_parsing.size, metavar="SIZE", help="of a rank, such as 200GB"
    )
    plan.add_argument(
        "--hardware", type=Path, metavar="FILE", help="a file of zfun hw-bench, for times"
    )
    _parsing.add_folder(plan, "zfun-plan")

    words = "measure the rates of this machine, for times of plans"
    bench = _parsing.add_command(commands, "hw-bench", _hw_bench, words, _HW_BENCH, path=path)
    _parsing.add_count(bench, "--ranks", 2, "local processes that exchange messages")
    _parsing.add_count(bench, "--mib", 256, "MiB of the largest buffer")
    words, file = "the file (default: %(default)s)", Path("hardware.json")
    bench.add_argument("--out", type=Path, default=file, metavar="FILE", help=words)

    words = "remove the files that crashed processes left on a disk"
    _parsing.add_command(
        commands, "clean", _clean, words, _CLEAN, path="the path given to stores.nvme()"
    )

    words = "show what becomes of each key of a DeepSpeed configuration"
    explain = _parsing.add_command(
        commands,
        "explain-config",
        _explain_config,
        words,
        _EXPLAIN_CONFIG,
        epilog=_EXPLAIN_CONFIG_EXIT,
        path="the JSON file",
    )
    words = "a value of the run that fills auto, such as hidden_size=768; may be repeated"
    explain.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=words)


def _demo(args: argparse.Namespace) -> int:
    from zfun import demo

    return demo.run(ranks=args.ranks, steps=args.steps, preset=args.preset, out=args.out)


def _io_bench(args: argparse.Namespace) -> int:
    from zfun import demo

    return demo.io_bench(args.path, num_bytes=args.mib * 2**20, rounds=args.rounds, out=args.out)


def _plan(args: argparse.Namespace) -> int:
    alone = {
        "--stage": args.stage is not None,
        "--micro-batches": args.micro_batches is not None,
        "--recomputed": args.recomputed,
    }
    if args.mesh is None and (given := [name for name in alone if alone[name]]):
        raise ZfunError(
            f"{' and '.join(given)} belong to a mesh, because without one all stages are planned; "
            "got no --mesh; add one, such as --mesh dp=-1"
        )
    from zfun import demo

    limits = {"device_bytes": args.device_memory, "host_bytes": args.host_memory}
    machine = demo.machine_of(
        args.hardware, **{k: float(x) for k, x in limits.items() if x is not None}
    )
    if args.mesh is None:
        return demo.plan(
            args.hf,
            machine,
            ranks=args.ranks,
            rows=args.rows,
            length=args.length,
            dtype=args.dtype,
            out=args.out,
        )
    import torch

    from zfun.planner import MeshCandidate

    precision = torch.bfloat16 if args.dtype == "bf16" else None
    if not args.mesh:
        return demo.mesh_search(
            args.hf,
            machine,
            ranks=args.ranks,
            stage=args.stage,
            micro_batches=args.micro_batches,
            precision=precision,
            rows=args.rows,
            length=args.length,
        )
    return demo.mesh_plan(
        args.hf,
        machine,
        ranks=args.ranks,
        choice=MeshCandidate(
            tuple(args.mesh.items()),
            1 if args.stage is None else args.stage,
            args.recomputed,
            precision,
        ),
        micro_batches=args.micro_batches,
        rows=args.rows,
        length=args.length,
    )


def _hw_bench(args: argparse.Namespace) -> int:
    from zfun import demo

    return demo.hw_bench(args.path, ranks=args.ranks, mib=args.mib, out=args.out)


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


def _explain_config(args: argparse.Namespace) -> int:
    from zfun.errors import ConfigError
    from zfun.interop import from_ds_config, parse_auto_values

    try:
        print(from_ds_config(args.path, auto=parse_auto_values(args.set)))
    except ConfigError as error:
        print(f"zfun: {error}", file=sys.stderr)
        return 1
    return 0
