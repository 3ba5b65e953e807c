"""``zfun ckpt``: look at checkpoints."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zfun.cli._parsing import add_command, address, positive, size

if TYPE_CHECKING:
    from zfun import sources

_VERIFY = """\
Compares every byte of a checkpoint with its hash, and prints each part that differs, with the file,
the offset and the leaves there. No process group is needed."""

_VERIFY_EXIT = "exit status: 0 if every byte is right, 1 if not, 2 if there is no checkpoint."

_EXPORT = """\
Writes the parameters of a checkpoint into a folder of safetensors files that from_pretrained of
Hugging Face reads, with the module's own names, one leaf in memory at a time. Master weights are
taken where the checkpoint has them. Copy config.json of the model into the folder."""

_DIFF = """\
Compares two checkpoints leaf by leaf and prints the leaves that only one of them has, those of
different shape or dtype, and the largest absolute difference of those with different values."""

_DIFF_EXIT = "exit status: 0 if the leaves are equal to the last bit, 1 if not, 2 on an error."

_PRUNE = """\
Lists the checkpoints that are neither among the newest N nor at every K-th step, and removes them
with --yes. The last good checkpoint always stays."""

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_KINDS = ("zfun", "deepspeed", "dcp", "huggingface", "state_dict")


def add_to(commands: Any) -> None:
    """Add the commands to a parser."""
    words = "look at checkpoints: inspect, verify, export, diff, prune"
    ckpt = commands.add_parser("ckpt", help=words, description=f"{words.capitalize()}.")
    ckpt.set_defaults(parser=ckpt)
    inner = ckpt.add_subparsers(title="commands", metavar="COMMAND")
    path = "a directory of checkpoints, or of one; or an address, such as s3://bucket/run"

    inspect = add_command(inner, "inspect", _inspect, "print what a checkpoint holds", path=path)
    _add_step(inspect, "describe this step; by default all steps are listed")

    words = "compare every byte with its hash"
    verify = add_command(inner, "verify", _verify, words, _VERIFY, epilog=_VERIFY_EXIT, path=path)
    _add_step(verify)
    verify.add_argument("--all", action="store_true", help="verify every checkpoint of PATH")

    words = "write the parameters as safetensors for Hugging Face"
    export = add_command(inner, "export", _export, words, _EXPORT, path=path)
    export.add_argument("out", type=address, metavar="OUT", help="the folder to write")
    _add_step(export)
    words = "the library that wrote PATH (default: %(default)s)"
    export.add_argument("--from", dest="kind", choices=_KINDS, default="zfun", help=words)
    words = (
        "the path of the parameters in the saved state (default: params), or for dcp the beginning "
        "of their names (default: model.)"
    )
    export.add_argument("--params", metavar="NAME", help=words)
    words = "the dtype of floating leaves (default: their own)"
    export.add_argument("--dtype", choices=_DTYPES, help=words)
    words = "take the rounded parameters where there are master weights"
    export.add_argument("--rounded", action="store_true", help=words)
    words = "split the files above this size, such as 500MB (default: %(default)s)"
    export.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE", help=words)

    words = "compare two checkpoints leaf by leaf"
    diff = add_command(inner, "diff", _diff, words, _DIFF, epilog=_DIFF_EXIT, path=path)
    diff.add_argument("other", type=address, metavar="OTHER", help="the other checkpoint")
    words = "compare the parameters at this path only, master weights where there are any"
    diff.add_argument("--params", metavar="NAME", help=words)

    words = "remove old checkpoints"
    path = "a directory of checkpoints, or an address"
    prune = add_command(inner, "prune", _prune, words, _PRUNE, path=path)
    prune.set_defaults(may_be_missing=True)
    prune.add_argument("--keep", type=positive, metavar="N", help="keep the newest N")
    prune.add_argument("--every", type=positive, metavar="K", help="keep every K-th step too")
    prune.add_argument("--yes", action="store_true", help="remove, in place of a list only")


def _add_step(parser: argparse.ArgumentParser, words: str = "the step (default: newest)") -> None:
    parser.add_argument("--step", type=int, metavar="N", help=words)


def _inspect(args: argparse.Namespace) -> int:
    from zfun import checkpoint

    print(checkpoint.inspect(args.path, args.step))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from zfun import checkpoint

    paths = [one.path for one in checkpoint.steps(args.path)] if args.all else [args.path]
    is_bad = False
    for path in paths or [args.path]:
        found = checkpoint.verify(path, args.step)
        for problem in found.problems:
            print(problem)
        is_bad = is_bad or bool(found.problems)
        verdict = f"{len(found.problems)} problems" if found.problems else "good"
        print(f"{found.path}: {verdict}, {found.num_bytes / 1e6:.1f} MB verified")
    return int(is_bad)


def _export(args: argparse.Namespace) -> int:
    import torch

    from zfun import checkpoint, sources

    dtype = getattr(torch, _DTYPES[args.dtype]) if args.dtype else None
    if args.kind == "zfun":
        written = checkpoint.export(
            args.path,
            args.out,
            args.step,
            params=args.params or "params",
            dtype=dtype,
            masters=not args.rounded,
            max_shard_bytes=args.max_shard_size,
        )
    else:
        written = sources.write_safetensors(
            args.out, _leaves_of(args), dtype=dtype, max_shard_bytes=args.max_shard_size
        )
    for file in written.files:
        print(file)
    print(f"wrote {written.num_leaves} leaves, {written.num_bytes / 1e6:.1f} MB")
    return 0


def _leaves_of(args: argparse.Namespace) -> sources.Source:
    """Return the leaves of a checkpoint of another library."""
    from zfun import sources

    if args.kind == "deepspeed":
        tag = None if args.step is None else f"global_step{args.step}"
        found = sources.deepspeed(args.path, tag=tag)
        return sources.joined(found.params, found.buffers)
    if args.kind == "dcp":
        return sources.dcp(args.path, params=args.params or "model.").params
    return getattr(sources, args.kind)(args.path)


def _diff(args: argparse.Namespace) -> int:
    from zfun import checkpoint, sources

    if args.params:
        first, second = (
            checkpoint.training_state(path, params=args.params).params
            for path in (args.path, args.other)
        )
    else:
        first, second = checkpoint.leaves(args.path), checkpoint.leaves(args.other)
    found = sources.compare(first, second)
    for words, names in (
        (f"only in {first.origin}", found.only_first),
        (f"only in {second.origin}", found.only_second),
    ):
        for name in names:
            print(f"{name}: {words}")
    for name, (one, two) in {**found.reshaped, **found.retyped}.items():
        print(f"{name}: {one} and {two}")
    for name, largest in found.changed.items():
        print(f"{name}: differs by at most {largest:g}")
    values = _other_values(args) if args.params is None else []
    print(*values, sep="\n", end="\n" if values else "")
    print(f"{found.equal} leaves are equal to the last bit, {len(found.changed)} have other values")
    return int(bool(values) or not found.is_same)


def _other_values(args: argparse.Namespace) -> list[str]:
    from zfun import checkpoint

    one, two = (checkpoint.manifest_at(path)[1].values for path in (args.path, args.other))
    return [
        f"{key}: {one.get(key)!r} and {two.get(key)!r}"
        for key in dict.fromkeys([*one, *two])
        if one.get(key) != two.get(key)
    ]


def _prune(args: argparse.Namespace) -> int:
    from zfun import checkpoint

    found = checkpoint.prune(args.path, keep=args.keep, every=args.every, dry_run=not args.yes)
    for one in found.removed:
        print(f"{one.path}: {'removed' if args.yes else 'would be removed'}")
    for one in found.kept:
        print(f"{one.path}: stays")
    if not found.removed + found.kept:
        print(f"{args.path}: no checkpoints")
    if found.removed and not args.yes:
        print(f"--yes removes {len(found.removed)}, {found.num_bytes / 1e6:.1f} MB")
    return 0
