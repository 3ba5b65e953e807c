"""The command ``zfun plan``."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import torch

from zfun.demo._picture import check_folder
from zfun.options import PATH, instance, integer, number, one_of, takes
from zfun.planner import Candidate, Hardware, PlanComparison, advise, compare, from_huggingface
from zfun.recipes import Precision

_SIZE = number(above=0, infinite=True, example="80e9")


@takes(hardware=PATH | None, device_bytes=_SIZE, host_bytes=_SIZE)
def machine_of(
    hardware: str | Path | None,
    *,
    device_bytes: float = float("inf"),
    host_bytes: float = float("inf"),
) -> Hardware:
    """Return the machine of a plan: without a file, one whose rates are not known.

    Args:
        hardware: a file of ``zfun hw-bench``, for times.
        device_bytes: the memory of the device of a rank.
        host_bytes: the host memory for one rank.
    """
    # A machine without rates is planned without times.
    machine = Hardware.load(hardware) if hardware else Hardware(flops_per_s=float("inf"))
    return dataclasses.replace(
        machine,
        device_bytes=min(device_bytes, machine.device_bytes),
        host_bytes=min(host_bytes, machine.host_bytes),
    )


@takes(
    path=PATH,
    machine=instance(Hardware, "the rates and sizes of a machine", "demo.machine_of(None)"),
    ranks=integer(1),
    rows=integer(1),
    length=integer(2),
    dtype=one_of("fp32", "bf16"),
    out=PATH,
)
def plan(
    path: str | Path,
    machine: Hardware,
    *,
    ranks: int,
    rows: int = 1,
    length: int = 1024,
    dtype: str = "fp32",
    out: str | Path = "zfun-plan",
) -> int:
    """Print plans of a model of Hugging Face and the advice, and draw a picture.

    Args:
        path: ``config.json``.
        machine: from :func:`machine_of`.
        ranks: the number of ranks.
        rows: sequences in the batch of a rank.
        length: tokens in a sequence.
        dtype: ``"bf16"`` for mixed precision.
        out: folder for the picture.

    Returns:
        The exit status: 0 if a composition fits, else 1.

    Raises:
        OptionError: a package is missing, a file cannot be read, or ``out`` cannot be written.
    """
    model = from_huggingface(path, rows, length)
    model = dataclasses.replace(model, precision=torch.bfloat16 if dtype == "bf16" else None)
    found = compare(
        {str(one): lambda group, one=one: one.of(model, group) for one in _shown(model.precision)},
        model.params,
        model.batch,
        ranks,
        device="meta",
        hardware=machine if machine.flops_per_s < float("inf") else None,
    )
    print(f"{path}: {ranks} ranks, {rows} x {length} tokens on each\n\n{found}")
    is_good = True
    if min(machine.device_bytes, machine.host_bytes) < float("inf"):
        advice = advise(model, machine, ranks)
        is_good = advice.best is not None
        print(f"\n{advice}")
        if importlib.util.find_spec("matplotlib") is not None:
            front = check_folder(Path(out)) / "frontier.png"
            advice.draw().savefig(front, dpi=150)
            print(f"\nFrontier: {front}")
    if importlib.util.find_spec("matplotlib") is not None:
        print(f"\nPicture: {_draw(found, machine, Path(out))}")
    return 0 if is_good else 1


def _shown(precision: torch.dtype | Precision | None) -> list[Candidate]:
    kept = [Candidate(stage, precision=precision) for stage in (0, 1, 2, 3)]
    return [
        *kept,
        kept[3]._replace(recomputed=True),
        kept[2]._replace(recomputed=True, offloaded=("optimizer",)),
        kept[3]._replace(recomputed=True, offloaded=("params", "optimizer")),
    ]


def _draw(found: PlanComparison, machine: Hardware, out: Path) -> Path:
    picture = check_folder(out) / "plan.png"
    found.draw(device_bytes=machine.device_bytes).savefig(picture, dpi=150)
    return picture
