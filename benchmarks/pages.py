"""The pages of benchmarks/results: one for each benchmark, one section for each kind of run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def output_of(*command: str) -> str:
    """The output of a command; empty where the command fails."""
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    head = output_of("git", "rev-parse", "--short", "HEAD") or "an unknown commit"
    return (
        f"{head}, with changes"
        if output_of("git", "status", "--porcelain", "--untracked-files=no")
        else head
    )


def processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return (
        f"{os.cpu_count()} cores "
        f"{found[1] if found else platform.processor() or platform.machine()}"
    )


def environment(hardware: str | None = None) -> str:
    """Hardware, versions and commit, for the head of a section."""
    return (
        f"{hardware or processor()}; Python {platform.python_version()}, torch "
        f"{torch.__version__}; commit {commit()}."
    )


def write_section(page: str, title: str, *paragraphs: str) -> Path:
    """Put a section in the place of the one with the same title, or at the end of the page."""
    path = RESULTS / page
    old = (
        path.read_text(encoding="utf-8")
        if path.exists()
        else f"# {page.removesuffix('.md').capitalize()}\n"
    )
    head, *sections = re.split(r"^(?=## )", old, flags=re.MULTILINE)
    new = "\n\n".join([f"## {title}", *paragraphs])
    places = [
        index for index, section in enumerate(sections) if section.splitlines()[0] == f"## {title}"
    ]
    for index in places:
        sections[index] = new
    if not places:
        sections.append(new)
    path.write_text(
        "\n\n".join(part.strip() for part in (head, *sections)) + "\n", encoding="utf-8"
    )
    return path


def write_table(page: str, title: str, head: str, lines: list[str]) -> Path:
    """Put a printed table into a section, below the environment."""
    return write_section(
        page, title, f"{environment()} {head}.", "\n".join(["```text", *lines, "```"])
    )
