"""One DeepSpeed script, with ``import deepspeed`` and with ``zfun.interop.deepspeed``.

    make bench-facade
    make bench-facade BENCH_FLAGS="--stages 3 --steps 50 --write"

``examples/from_deepspeed.py`` runs twice at each stage, on gloo ranks of this machine in float32:
as it stands, and with the import that the script had before. The script prints the largest
difference of a loss, a learning rate and a gradient norm, and fails if losses differ by more than
``--tolerance``. DeepSpeed reports no norm at stage 0, so the table has ``nan`` there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import pages

EXAMPLES = pages.ROOT / "examples"
AFTER = "import zfun.interop.deepspeed as deepspeed"
BEFORE = "import deepspeed"
TIMEOUT_S = 600


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/facade.md")
    return parser.parse_args()


def run(script: Path, args: argparse.Namespace, stage: int, losses: Path) -> list[dict[str, Any]]:
    """Run a script on local ranks, and return what rank 0 wrote."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(pages.ROOT), str(EXAMPLES)]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.ranks), str(script)]
    command += ["--stage", str(stage), "--steps", str(args.steps), "--losses", str(losses)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found: list[dict[str, Any]] = json.loads(losses.read_text(encoding="utf-8"))
    return found


def compared(folder: Path, args: argparse.Namespace, stage: int) -> dict[str, float]:
    """Return the largest difference of each number, and the fall of the loss."""
    text = (EXAMPLES / "from_deepspeed.py").read_text(encoding="utf-8")
    if text.count(f"{AFTER}\n") != 1:
        raise SystemExit(f"the script has one line {AFTER!r}")
    before = folder / "before.py"
    before.write_text(text.replace(f"{AFTER}\n", f"{BEFORE}\n"), encoding="utf-8")
    old = run(before, args, stage, folder / f"before{stage}.json")
    new = run(EXAMPLES / "from_deepspeed.py", args, stage, folder / f"after{stage}.json")
    assert len(old) == len(new) >= 2 * args.steps
    differences = {
        name: max(
            (
                abs(a[name] - b[name])
                for a, b in zip(old, new, strict=True)
                if a[name] is not None and b[name] is not None
            ),
            default=math.nan,
        )
        for name in ("loss", "lr", "norm")
    }
    return {**differences, "first": old[0]["loss"], "last": old[-1]["loss"]}


def main() -> None:
    args = parse_args()
    lines = ["stage   loss from -> to        difference of loss        lr      norm"]
    print(lines[0], flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for stage in args.stages:
            found = compared(Path(folder), args, stage)
            worst = max(worst, found["loss"])
            lines.append(
                f"{stage:5d}   {found['first']:.4f} -> {found['last']:.4f}"
                f"{found['loss']:27.1e}{found['lr']:10.1e}{found['norm']:10.1e}"
            )
            print(lines[-1], flush=True)
    if args.write:
        version = metadata.version("deepspeed")
        head = f"DeepSpeed {version}; {args.ranks} gloo ranks, {args.steps} steps"
        pages.write_table("facade.md", f"{args.ranks} ranks, float32", head, lines)
    if worst > args.tolerance:
        raise SystemExit(f"losses differ by {worst:.1e}, more than {args.tolerance:.1e}")


if __name__ == "__main__":
    main()
