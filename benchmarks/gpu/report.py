"""Everything that needs a GPU, in at most 8 minutes, and one page of results: tests, kernels,
steps, waits for the device.

    make gpu                       # makes an environment, unless there is one with all it needs
    python benchmarks/gpu/report.py --only kernels waits
    python benchmarks/gpu/report.py --device cpu --dry-run    # the same in small, on the CPU

Each part is a process with a time limit, so that a part which fails or hangs is reported, and the
others are not lost. The page is benchmarks/results/gpu.md; the exit status is 1
if a part failed, and 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "results" / "gpu.md"
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        title: heads the section of the page.
        command: the arguments of Python; ``{json}`` stands for the file that gets the figures.
        small: more arguments in a dry run.
        seconds: the time limit; all limits together stay below 8 minutes.
        section: makes the text from the figures and the output.
    """

    title: str
    command: list[str]
    small: list[str]
    seconds: int
    section: Callable[[Any, str], str]


def tests_section(figures: Any, output: str) -> str:
    del figures
    lines = [
        line
        for line in output.splitlines()
        if line.startswith(("FAILED", "ERROR")) or re.search(r" in [0-9.]+s", line)
    ]
    return "\n".join(f"* {line.strip('= ')}" for line in lines) or "* no summary"


def kernels_section(figures: Any, output: str) -> str:
    del output
    from benchmarks.gpu.kernels import line_of

    lines = [
        "`of limit`: a copy of as many bytes, by the kernel; 1 is the memory's speed.",
        "",
        "| kernel | us | GB/s | of limit | torch, us |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(line_of(row) for row in figures or [])])


def step_section(figures: Any, output: str) -> str:
    del output
    if not figures:
        return "No figures."
    base = figures["rows"]["ddp"]["us"]
    lines = [
        f"Loss curves differ by at most {figures['spread']:.1e}.",
        "",
        "| | us | host busy, us | own, us | own by tensor, us | peak MB | / DDP |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["rows"].items():
        own = f"{row['own_us']:.0f} | {row['own_us_per_tensor']:.2f} | {row['peak_mb']:.0f}"
        lines.append(
            f"| {name} | {row['us']:.0f} | {row['issue_us']:.0f} | {own} | {row['us'] / base:.2f} |"
        )
    return "\n".join(lines)


def waits_section(figures: Any, output: str) -> str:
    del output
    from benchmarks.gpu.waits import table

    return (
        "Waits of the host in one step, by torch's debug mode / by the profile. `turn` is "
        f"between forward and backward, `norm` between backward and update.\n\n{table(figures)}"
        if figures
        else "No figures."
    )


def tests_command() -> list[str]:
    # Without pytest-timeout the ``timeout`` setting of pyproject.toml is unknown, and strict pytest
    # would end the run.
    lenient = (
        []
        if importlib.util.find_spec("pytest_timeout")
        else ["-o", "addopts=", "-o", "filterwarnings=default"]
    )
    return ["-m", "pytest", "-m", "cuda", "-q", "-p", "no:cacheprovider", *lenient, "tests/gpu"]


STEP, CPU = ["benchmarks/gpu/step.py", "--json", "{json}"], ["--device", "cpu"]
TINY = [*CPU, "--preset", "tiny", "--rounds", "1", "--steps", "1", "--warm-steps", "1"]
# One part of a dry run has all contenders, and the others show that their options are right.
FEW = [*TINY, "--only", "ddp", "zfun-3"]
KERNELS = ["benchmarks/gpu/kernels.py", "--json", "{json}"]
WAITS = ["benchmarks/gpu/waits.py", "--json", "{json}"]
PARTS = {
    "tests": Part("Tests marked `cuda`", tests_command(), ["--collect-only"], 120, tests_section),
    "kernels": Part(
        "Kernels, 32M elements",
        KERNELS,
        [*CPU, "--numel", "20000", "--rounds", "2"],
        100,
        kernels_section,
    ),
    "step-fp32": Part("A step: small (25.5M, GPT), float32", STEP, TINY, 70, step_section),
    "step-bf16": Part("A step: small, bfloat16", [*STEP, "--dtype", "bf16"], FEW, 70, step_section),
    "many": Part(
        "A step: many (502 tiny tensors), float32",
        [*STEP, "--preset", "many", "--rounds", "4"],
        FEW,
        50,
        step_section,
    ),
    "waits": Part(
        "Waits for the device: small, float32", WAITS, [*CPU, "--preset", "tiny"], 60, waits_section
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The result of a part: the failure if any, the time taken, and the text for the page."""

    failure: str | None
    seconds: float
    section: str


def run(part: Part, folder: Path, *, dry_run: bool) -> Outcome:
    folder.mkdir(exist_ok=True)
    figures = folder / "figures.json"
    command = [
        sys.executable,
        *(str(figures) if word == "{json}" else word for word in part.command),
        *(part.small if dry_run else []),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "ZFUN_TESTS": "all",
        # The parts of a dry run run side by side, and threads that wait for each other take time.
        **({"OMP_NUM_THREADS": "1"} if dry_run else {}),
    }
    began = time.monotonic()
    # In a new session, so that the processes which a part starts end with that part.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    failure = None
    try:
        output, _ = process.communicate(timeout=part.seconds)
        if process.returncode:
            failure = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        failure = f"not done after {part.seconds} s"
    print(f"# {part.title}\n{output}", flush=True)
    if failure:
        last = "\n".join(output.strip().splitlines()[-12:])
        failure = f"{failure}:\n\n```\n{last}\n```"
    try:
        section = part.section(
            json.loads(figures.read_text()) if figures.exists() else None, output
        )
    except (KeyError, TypeError, ValueError) as error:
        section, failure = "No figures.", failure or f"figures that cannot be read: {error!r}"
    return Outcome(failure, time.monotonic() - began, section)


def environment(device: str) -> str:
    from benchmarks.pages import commit, output_of

    if device == "cpu":
        hardware = f"a dry run on the CPU ({platform.machine()}): no figure below means anything"
    else:
        gpu = torch.cuda.get_device_properties(0)
        driver = output_of(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).splitlines()
        hardware = (
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} "
            f"SMs, sm_{gpu.major}{gpu.minor}"
        )
        hardware += f", driver {driver[0]}" if driver else ""
    triton = importlib.util.find_spec("triton")
    versions = [
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
    ]
    if triton is not None:
        import triton as compiler

        versions.append(f"Triton {compiler.__version__}")
    return f"{hardware}; {', '.join(versions)}; commit {commit()}. One rank. Written by `make gpu`."


def page(device: str, outcomes: dict[str, Outcome]) -> str:
    parts = [f"# On a GPU\n\n{environment(device)}"]
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.failure}
    parts.append(
        "No part failed."
        if not failed
        else "\n\n".join(f"**Failed: {PARTS[n].title}**, {o.failure}" for n, o in failed.items())
    )
    parts += [
        f"## {PARTS[name].title}\n\n{outcome.section}\n\n{outcome.seconds:.0f} s."
        for name, outcome in outcomes.items()
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="small sizes on the CPU; the page is printed, not kept",
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=list(PARTS),
        choices=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    parser.add_argument(
        "--write",
        type=Path,
        help=f"where the page goes; by default {PAGE.relative_to(ROOT)}, in a dry run nowhere",
    )
    args = parser.parse_args()
    dry_run = args.dry_run or args.device == "cpu"
    if not dry_run and not torch.cuda.is_available():
        print(
            f"make gpu needs a CUDA device; torch {torch.__version__} finds none here. If it is a "
            "torch for the CPU, name an environment with one for CUDA, numba, optree, xxhash, "
            "pytest and hypothesis: make gpu PYTHON=/path/to/python",
            file=sys.stderr,
        )
        return 2
    outcomes = {}
    to = args.write or (None if dry_run else PAGE)
    # Parts share a GPU one after the other; a dry run measures nothing.
    workers = os.cpu_count() if dry_run else 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        under_way = {
            name: pool.submit(run, PARTS[name], Path(folder) / name, dry_run=dry_run)
            for name in args.only
        }
        for name, outcome in under_way.items():
            outcomes[name] = outcome.result()
            if to:  # after each part, so that a run which is cut short leaves a page
                to.write_text(page("cpu" if dry_run else "cuda", outcomes), encoding="utf-8")
    if to:
        print(f"written: {to}")
    else:
        print(page("cpu", outcomes))
    return int(any(outcome.failure for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
