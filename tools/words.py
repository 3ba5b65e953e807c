"""Count the words that make prose hard to follow, in comments, docstrings, Markdown and notebooks.

    python tools/words.py                     # counts by folder; fails above a limit
    python tools/words.py zfun/flat.py        # one file or folder
    python tools/words.py docs --list         # every sentence with such a word, as file:line

A pronoun sends the reader back to look for its noun, and `what` stands where a noun should. Code,
doctests and inline code do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Occurrences per 1,000 words.
LIMITS = {"what": 2, "it/its/they/them": 12}
LIMIT_OF = {word: words for words in LIMITS for word in words.split("/")}
SUFFIXES = {".ipynb", ".md", ".py"}
BUILT = {"_build", "build", "dist", "jupyter_execute"}
WORD = re.compile(r"[A-Za-z']+")
DOCTEST = re.compile(r"\s*(>>>|\.\.\.)(\s|$)")
FENCE = re.compile(r"\s*(```|~~~)")
INLINE_CODE = re.compile(r"``.+?``|`[^`]+`|<[^<>\s]+>|\]\([^)\s]*\)|https?://\S+")
SENTENCE = re.compile(r".+?(?:[.!?](?=\s|$)|$)", re.DOTALL)

Lines = list[tuple[int, str]]


class Found(NamedTuple):
    """The words of one file, and the sentences that hold counted ones."""

    words: int
    counts: Counter[str]
    sentences: Lines


def files_of(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            parts = file.relative_to(path).parts
            hidden = any(part.startswith(".") or part in BUILT for part in parts)
            # The notebooks' folder in docs is a copy that the site's build makes; a script paired
            # with a notebook has the same text.
            copied = "docs/notebooks/" in file.as_posix() or (
                file.suffix == ".py" and file.with_suffix(".ipynb").exists()
            )
            if file.suffix in SUFFIXES and not hidden and (not copied or file == path):
                yield file


def prose_of(path: Path) -> Iterator[Lines]:
    """The paragraphs of a file, each as numbered lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from comments(text)
        yield from docstrings(text)
    elif path.suffix == ".md":
        yield from markdown(list(enumerate(text.splitlines(), 1)))
    else:
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield from markdown([(0, line) for line in "".join(cell["source"]).splitlines()])
            else:
                yield from comments("".join(cell["source"]))


def comments(text: str) -> Iterator[Lines]:
    """Comments; those on successive lines are one paragraph."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [(t.start[0], t.string.lstrip("#:! ")) for t in tokens if t.type == tokenize.COMMENT]
    for _, group in groupby(enumerate(found), key=lambda item: item[1][0] - item[0]):
        yield [line for _, line in group]


def docstrings(text: str) -> Iterator[Lines]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, owners) or ast.get_docstring(node) is None:
            continue
        first = node.body[0]
        assert isinstance(first, ast.Expr)
        assert isinstance(first.value, ast.Constant)
        lines = list(without_doctests(enumerate(str(first.value.value).splitlines(), first.lineno)))
        if isinstance(node, ast.Module):  # without sections, so that indented lines are commands
            lines = [(number, "" if line.startswith("    ") else line) for number, line in lines]
        yield from paragraphs(lines)


def without_doctests(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Leave out examples with their output, and blocks of code after a paragraph that ends in
    ``::``.
    """
    inside, indent, block = False, 0, False
    for number, line in lines:
        blank, depth = not line.strip(), len(line) - len(line.lstrip())
        inside = bool(DOCTEST.match(line)) or (inside and not blank)
        block = block and (blank or depth > indent)
        yield number, "" if inside or block else line
        if not blank and not block and line.rstrip().endswith("::"):
            block, indent = True, depth


def markdown(lines: Lines) -> Iterator[Lines]:
    fenced, kept = False, Lines()
    for number, line in lines:
        fence = bool(FENCE.match(line))
        kept.append((number, "" if fenced or fence else line))
        fenced ^= fence
    yield from paragraphs(kept)


def paragraphs(lines: Lines) -> Iterator[Lines]:
    for filled, group in groupby(lines, key=lambda line: bool(line[1].strip())):
        if filled:
            yield list(group)


def count(path: Path) -> Found:
    words, counts, sentences = 0, Counter[str](), Lines()
    for lines in prose_of(path):
        starts = [0]
        for _, line in lines:
            starts.append(starts[-1] + len(line) + 1)
        # Blanks of the same length keep the positions of all lines.
        prose = INLINE_CODE.sub(
            lambda found: re.sub(r"\S", " ", found[0]), "\n".join(line for _, line in lines)
        )
        for sentence in SENTENCE.finditer(prose):
            found = WORD.findall(sentence[0].lower())
            words += len(found)
            hits = [LIMIT_OF[word] for word in found if word in LIMIT_OF]
            counts.update(hits)
            if hits:
                skipped = len(sentence[0]) - len(sentence[0].lstrip())
                place = next(
                    i for i, start in enumerate(starts[1:]) if sentence.start() + skipped < start
                )
                whole = "\n".join(line for _, line in lines)[sentence.start() : sentence.end()]
                sentences.append((lines[place][0], " ".join(whole.split())))
    return Found(words, counts, sentences)


def total(found: list[Found]) -> Found:
    return Found(sum(f.words for f in found), sum((f.counts for f in found), Counter[str]()), [])


def row(name: str, found: Found) -> str:
    rates = "".join(
        f"{found.counts[key]:8}{1000 * found.counts[key] / max(found.words, 1):7.1f}"
        for key in LIMITS
    )
    return f"{name:44}{found.words:8}{rates}"


def too_many(found: Found) -> bool:
    """Whether a limit is passed; a short text may hold one word of each kind."""
    return any(
        found.counts[key] > ceil(limit * found.words / 1000) for key, limit in LIMITS.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files and folders; by default the whole project"
    )
    parser.add_argument(
        "--list", action="store_true", help="print each sentence with a counted word"
    )
    parser.add_argument("--worst", type=int, default=15, help="how many files to name")
    args = parser.parse_args()
    files = {
        path: count(path) for path in files_of([path.resolve() for path in args.paths] or [ROOT])
    }
    names = {
        path: str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        for path in files
    }
    if args.list:
        for path, found in files.items():
            for line, sentence in found.sentences:
                print(f"{names[path]}:{line}: {sentence}")
    folders: dict[str, list[Found]] = {}
    for path, found in files.items():
        folders.setdefault(names[path].split("/")[0] if "/" in names[path] else ".", []).append(
            found
        )
    rows = {name: total(found) for name, found in folders.items()} | {
        "all": total(list(files.values()))
    }
    print(
        f"{'per 1,000 words':44}{'words':>8}"
        + "".join(f"{key if len(key) < 9 else 'it, ...':>15}" for key in LIMITS)
    )
    for name, found in rows.items():
        print(row(name, found))
    excess = lambda found: max(
        found.counts[key] - limit * found.words / 1000 for key, limit in LIMITS.items()
    )
    worst = sorted(
        (path for path in files if too_many(files[path])), key=lambda path: -excess(files[path])
    )
    if worst:
        print("\nthe files furthest above a limit")
    for path in worst[: args.worst]:
        print(row(names[path], files[path]))
    above = [name for name, found in rows.items() if too_many(found)]
    if above:
        limits = ", ".join(f"{key} at most {limit}" for key, limit in LIMITS.items())
        print(
            f"\ntoo many in {', '.join(above)}: {limits} per 1,000 words; `tools/words.py --list "
            "FILE` shows the sentences",
            file=sys.stderr,
        )
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
