"""The blocks of the documentation's pages, as programs.

    python -m tools.pages programs FOLDER           # writes the whole ones, for type checkers
    python -m tools.pages paste --rounds 5 --busy 2 # runs each page beside two busy processes
    python -m tools.pages paste docs/start.md       # runs one page

``paste`` runs the blocks of a page in order in a fresh interpreter, as a user pastes them.
"""

from __future__ import annotations

import argparse
import builtins
import doctest
import os
import re
import subprocess
import symtable
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("[!_]*/*.md"))]
RANKS = {"from-fsdp.md": 2}  # pages whose blocks are a program for several processes
CELL = "{code-cell} ipython3"
DEEPSPEED = "import deepspeed"  # the first line of the block that needs DeepSpeed


class Block(NamedTuple):
    """A block of a page.

    Attributes:
        kind: ``python``, ``pycon`` or ``{code-cell} ipython3``.
        code: without the fences.
        line: number of lines above ``code``.
    """

    kind: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the blocks that run wherever zfun does."""
    text = page.read_text(encoding="utf-8")
    fences = r"^```(python|pycon|\{code-cell\} ipython3)\n(.*?)^```"
    found = re.finditer(fences, text, re.MULTILINE | re.DOTALL)
    every = [Block(m[1], m[2], text.count("\n", 0, m.start(2))) for m in found]
    return [block for block in every if not block.code.startswith(f"{DEEPSPEED}\n")]


def is_whole(code: str) -> bool:
    """Whether a block imports zfun, and uses no name of another block."""
    if not re.search(r"^(import|from) zfun", code, re.MULTILINE):
        return False
    module = symtable.symtable(code, "block", "exec")
    names = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    return names.union(dir(builtins)).issuperset(_global_names(module))


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def write_programs(folder: Path) -> None:
    """Write each whole program to a file of its own, whose line numbers are those of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "python" and is_whole(block.code):
                name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
                text = "\n" * block.line + block.code
                (folder / f"{name}_{block.line}.py").write_text(text, encoding="utf-8")


def paste(page: Path, namespace: dict[str, Any], *, cells: bool = True) -> None:
    """Run the blocks of a page in one namespace, and pycon blocks as doctests.

    Args:
        page: the Markdown file.
        namespace: of the blocks.
        cells: whether to run cells too, which the build of the site runs by themselves.

    Raises:
        AssertionError: a doctest failed.
    """
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for block in blocks(page):
        if block.kind == CELL and not cells:
            continue
        if block.kind != "pycon":
            # As a user pastes it, without this file's annotations in the future.
            text = "\n" * block.line + block.code
            exec(compile(text, str(page), "exec", dont_inherit=True), namespace)
            continue
        case = doctest.DocTestParser().get_doctest(
            block.code, namespace, page.name, str(page), block.line
        )
        failures, _ = doctest.DocTestRunner(optionflags=flags).run(case, clear_globs=False)
        assert failures == 0, f"{page.name}, line {block.line}"


def command(page: Path, folder: Path) -> list[str]:
    """Return the command that runs the blocks of a page in a fresh interpreter."""
    if page.name in RANKS:
        program = folder / "page.py"
        program.write_text("\n".join(block.code for block in blocks(page)), encoding="utf-8")
        ranks = ["--standalone", "--nproc-per-node", str(RANKS[page.name])]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, str(program)]
    lines = [
        "from pathlib import Path",
        "from tools.pages import paste",
        f"paste(Path({str(page)!r}), globals())",
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def paste_all(pages: list[Path], rounds: int, busy: int) -> list[str]:
    """Run pages beside ``busy`` processes that compute, and return a line for each failure."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    failures = []
    try:
        for number in range(rounds):
            for page in pages:
                name, start = page.relative_to(ROOT), time.perf_counter()
                with tempfile.TemporaryDirectory() as folder:
                    found = subprocess.run(
                        command(page, Path(folder)),
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                word = "failed" if found.returncode else "passed"
                print(f"{number} {name} {word} {time.perf_counter() - start:.0f} s", flush=True)
                if found.returncode:
                    failures.append(f"round {number}, {name}")
                    print((found.stdout + found.stderr)[-3000:], flush=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("programs").add_argument("folder", type=Path)
    pasting = commands.add_parser("paste")
    pasting.add_argument("pages", nargs="*", type=Path)
    pasting.add_argument("--rounds", type=int, default=1)
    pasting.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    if options.command == "programs":
        write_programs(options.folder)
        return
    pages = [page.resolve() for page in options.pages] or [p for p in PAGES if blocks(p)]
    failures = paste_all(pages, options.rounds, options.busy)
    print(f"{options.rounds} rounds of {len(pages)} pages, {len(failures)} failures")
    print(*failures, sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
