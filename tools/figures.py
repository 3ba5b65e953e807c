"""Print what a reader of zfun meets: lines, files, imports, parameters, names and folders."""

from __future__ import annotations

import argparse
import ast
import collections
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent / "zfun"
EXTRAS = ("planner", "interop", "testing", "demo", "cli", "checkpoint", "sources")
LONG_FILE, MANY_PARAMETERS = 400, 8


class Module(NamedTuple):
    """A parsed file; ``name`` is its path from the package on."""

    path: Path
    name: str
    lines: list[str]
    tree: ast.Module


def modules() -> list[Module]:
    """Parse the package."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    name = lambda path: path.relative_to(ROOT.parent).as_posix()
    return [Module(x, name(x), text.splitlines(), ast.parse(text)) for x, text in texts.items()]


def _docstrings(tree: ast.Module) -> Iterator[int]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            yield from range(text.lineno, (text.end_lineno or text.lineno) + 1)


def code_lines(module: Module) -> int:
    """Count lines that are neither empty, nor comments, nor docstrings."""
    text = set(_docstrings(module.tree))
    return sum(
        1
        for number, line in enumerate(module.lines, 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in text
    )


def import_lines(module: Module) -> int:
    """Count lines of imports at the top of a module, and of ``__all__``."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in module.tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__")
    )


def with_many_parameters(found: list[Module]) -> list[str]:
    """Name the functions with more parameters than a reader keeps in mind."""
    out = []
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(x.arg not in ("self", "cls", "ctx") for x in given)
                if count > MANY_PARAMETERS:
                    out.append(f"{module.name}:{node.lineno} {node.name} ({count})")
    return out


def with_two_meanings(found: list[Module]) -> list[str]:
    """Name the classes that two modules define."""
    places = collections.defaultdict(set)
    for module in found:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(module.name)
    return [f"{name}: {', '.join(sorted(at))}" for name, at in places.items() if len(at) > 1]


def _imports(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zfun"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                yield str(node.module)


def folder_circles(found: list[Module]) -> list[str]:
    """Name pairs of folders inside one folder that import each other."""
    known = {m.path.parent for m in found}
    arrows = set()
    for module in found:
        here = module.path.parent
        for name in _imports(module):
            target = ROOT.parent.joinpath(*name.split("."))
            folder = target if target in known else target.parent
            if folder not in known or folder == here:
                continue
            common = next(p for p in [here, *here.parents] if p in [folder, *folder.parents])
            ends = [x.relative_to(common).parts[:1] for x in (here, folder)]
            if all(ends):
                arrows.add((common, ends[0][0], ends[1][0]))
    both = [(c, x, y) for c, x, y in sorted(arrows) if x < y and (c, y, x) in arrows]
    return [f"{common.relative_to(ROOT.parent)}: {x} and {y}" for common, x, y in both]


def lines_by_folder(found: list[Module]) -> collections.Counter[str]:
    """Count the lines of each folder, and of each file beside the folders."""
    return collections.Counter(module.name.split("/")[1] for module in found for _ in module.lines)


def main(argv: list[str] | None = None) -> None:
    """Print the figures."""
    lists: dict[str, Callable[[list[Module]], list[str]]] = {
        "long": lambda all_: [f"{m.name} {len(m.lines)}" for m in all_ if len(m.lines) > LONG_FILE],
        "parameters": with_many_parameters,
        "names": with_two_meanings,
        "circles": folder_circles,
    }
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", choices=lists, help="show the places behind a figure")
    chosen = parser.parse_args(argv).list
    found = modules()
    lines, code = sum(len(m.lines) for m in found), sum(map(code_lines, found))
    core = sum(len(m.lines) for m in found if m.name.split("/")[1] not in EXTRAS)
    rows = {
        "lines in all / of code": f"{lines:,} / {code:,}",
        f"lines without {', '.join(EXTRAS)}": f"{core:,}",
        "imports and __all__, share of code": f"{sum(map(import_lines, found)) / code:.1%}",
        f"files over {LONG_FILE} lines": len(lists["long"](found)),
        "lines of the largest file": max(len(module.lines) for module in found),
        f"functions of more than {MANY_PARAMETERS} parameters": len(with_many_parameters(found)),
        "class names with two meanings": len(with_two_meanings(found)),
        "pairs of folders that import each other": len(folder_circles(found)),
        **{f"  {name}": f"{count:,}" for name, count in lines_by_folder(found).most_common()},
    }
    for label, value in rows.items():
        sys.stdout.write(f"{label:<82}{value}\n")
    for place in lists[chosen](found) if chosen else ():
        sys.stdout.write(f"{place}\n")


if __name__ == "__main__":
    main()
