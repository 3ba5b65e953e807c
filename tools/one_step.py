"""Write the classes and calls of one stage-3 step into the docs: ``python -m tools.one_step``."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import zfun as zf

PACKAGE = Path(zf.__file__).parent
PAGE = PACKAGE.parent / "docs" / "how" / "parameter.md"
START, END = "<!-- one step -->\n", "<!-- end of one step -->\n"
IDEA = ("transforms", "collectives")


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of two layers."""
    for name in ("a", "b"):
        x = torch.tanh(x @ params[name])
    return x.square().mean()


@functools.cache
def _classes_of(file: str) -> dict[str, str]:
    """Return the class of each method in a file, by the method's first line and name."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    methods: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    first = min([part.lineno, *(d.lineno for d in part.decorator_list)])
                    methods[f"{first} {part.name}"] = node.name
    return methods


def one_step() -> tuple[dict[str, str], list[str]]:
    """Run one step of stage 3 on two simulated ranks, and look at rank 0.

    Returns:
        The classes of transforms and collectives of which a method ran, with their files; and the
        calls from ``step`` to the start of the first gather.
    """
    classes: dict[str, str] = {}
    calls: list[str] = []

    def name_of(frame: FrameType) -> str:
        code = frame.f_code
        owner = _classes_of(code.co_filename).get(f"{code.co_firstlineno} {code.co_name}", "")
        return f"{owner}.{code.co_name}" if owner else code.co_name

    def look(frame: FrameType, event: str, arg: Any) -> None:
        del arg
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(PACKAGE):
            return
        place, name = file.relative_to(PACKAGE).as_posix(), name_of(frame)
        if "." in name and place.split("/")[0] in IDEA:
            classes.setdefault(name.split(".")[0], place)
        is_start = frame.f_code.co_name == "start" and place.startswith("collectives/backends")
        if is_start and not calls:
            here: FrameType | None = frame
            while here is not None and here.f_code.co_name != "main":
                if Path(here.f_code.co_filename).is_relative_to(PACKAGE):
                    inside = Path(here.f_code.co_filename).relative_to(PACKAGE).as_posix()
                    calls.append(f"{name_of(here)} ({inside})")
                here = here.f_back
            calls.reverse()

    def main(group: zf.Group) -> None:
        zero = zf.zero(3, loss_fn, zf.optim.adamw(1e-3), group, bucket_bytes=1)
        params = {name: torch.eye(8) for name in ("a", "b")}
        state, batch = zero.init(params), torch.ones(2, 8)
        # The second step follows the schedule that the first one taught.
        state, _ = zero.step(state, batch)
        before = sys.getprofile()
        if group.rank == 0:
            sys.setprofile(look)
        try:
            zero.step(state, batch)
        finally:
            sys.setprofile(before)

    zf.simulate(2, main)
    return classes, calls


def section() -> str:
    """Return the part of the page."""
    classes, calls = one_step()
    rows = "".join(f"| `{name}` | `{place}` |\n" for name, place in sorted(classes.items()))
    steps = "".join(f"{number}. `{call}`\n" for number, call in enumerate(calls, 1))
    return (
        f"{START}\nFrom `step` to the first gather there are {len(calls)} calls:\n\n{steps}\n"
        f"A whole step runs methods of {len(classes)} classes of transforms and collectives:\n\n"
        f"| class | file |\n|---|---|\n{rows}\n{END}"
    )


def with_section(page: str) -> str:
    """Return the page with the list of today."""
    before, _, rest = page.partition(START)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
