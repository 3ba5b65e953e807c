"""Run the demo from beginning to end."""

from __future__ import annotations

from pathlib import Path

import zfun as zf
from zfun.demo._examples import load_example
from zfun.demo._picture import check_folder, check_installed, draw
from zfun.demo._table import DemoResult, differences, headline, table, verdict
from zfun.demo._train import COMPOSITIONS, DemoJob, train
from zfun.errors import OptionError
from zfun.options import PATH, integer, takes

NEEDED = ("matplotlib", "tqdm")
LEGEND = """\
params, grads, optimizer: kept on each rank{offloaded}. peak: largest growth of a rank's resident
set in training, including activations and shared memory, which counts on every rank. sent:
parameters and gradients sent by each rank in a step. theory: 2 Ψ (N-1)/N, and 3 Ψ (N-1)/N for
ZeRO-3, where Ψ is the bytes of all parameters and N the number of ranks."""


@takes(ranks=integer(1), steps=integer(1), out=PATH)
def run(
    ranks: int = 2, steps: int = 60, preset: str = "demo", out: str | Path = "zfun-demo"
) -> int:
    """Train under every composition, print the table and the verdict, and draw the tradeoff.

    Args:
        ranks: local processes to train on.
        steps: training steps of each composition.
        preset: size of the model, a key of ``PRESETS`` in ``examples/gpt.py``.
        out: folder for the picture.

    Returns:
        The exit status: 0 if all compositions agree to the last bit, 1 if not.

    Raises:
        OptionError: a number below 1, no such preset, a folder that cannot be written, or a package
            of the extra ``demo`` is missing.
    """
    check_installed("the demo", NEEDED)
    presets = load_example("gpt").PRESETS
    if preset not in presets:
        raise OptionError(
            f"the preset must be one of {', '.join(presets)}; got {preset!r}; choose one of them"
        )
    config = presets[preset]
    out = check_folder(out)
    print(
        f"A byte-level GPT ({config.num_blocks} blocks of width {config.width}) on the source "
        f"text of Python's standard library:\n{steps} steps of {config.batch_size} x "
        f"{config.length} bytes a rank, on {ranks} local process{'' if ranks == 1 else 'es'}, "
        "new ones for each composition.\n",
        flush=True,
    )
    job = DemoJob(preset, steps)
    limits = {"timeout_s": 300.0 + 60.0 * steps, "collective_timeout_s": 120.0}
    results = [
        DemoResult(
            composition, tuple(zf.collectives.spawn(ranks, train, job, composition, **limits))
        )
        for composition in COMPOSITIONS
    ]
    found = differences(results)
    picture = draw(results, out / "tradeoff.png", equal=not found)

    print(f"\n{table(results)}\n\n{LEGEND.format(offloaded=', * in host memory')}\n")
    print(f"{verdict(results, found)}\n{headline(results)}.\nPicture: {picture}")
    return 1 if found else 0
