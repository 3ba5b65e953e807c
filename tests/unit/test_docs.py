"""The documentation: code runs, every public name has an entry, and links point to files."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("[!_]*/*.md"))]
PUBLIC = [
    "zfun",
    "zfun.errors",
    "zfun.optim",
    "zfun.policies",
    "zfun.stores",
    "zfun.collectives",
    "zfun.compression",
    "zfun.testing",
]
# Functions without an example in the docstring, because an example would be too long. A page of
# docs/ or a test has one.
WITHOUT_EXAMPLE = {"zfun.collectives.spawn", "zfun.stores.fetch", "zfun.stores.resident"}


def public_names(module: str) -> dict[str, Any]:
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name in vars(found) if not name.startswith("_")
    ]
    return {
        name: value
        for name in names
        if not isinstance(value := getattr(found, name), types.ModuleType)
    }


def documented() -> tuple[set[str], set[int]]:
    """Return the names in the API pages, and the ids of the named objects."""
    names: set[str] = set()
    for page in (DOCS / "api").glob("*.rst"):
        text = page.read_text(encoding="utf-8")
        names.update(
            re.findall(
                r"^\.\. (?:auto(?:function|class|exception)|py:data)::\s+(\S+)", text, re.MULTILINE
            )
        )
        for module in re.findall(r"^\.\. automodule::\s+(\S+)", text, re.MULTILINE):
            names.update(f"{module}.{name}" for name in public_names(module))
    objects = set()
    for name in names:
        module, _, attribute = name.rpartition(".")
        objects.add(id(getattr(importlib.import_module(module), attribute)))
    return names, objects


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module: str) -> None:
    names, objects = documented()
    missing = [
        name
        for name, value in public_names(module).items()
        if f"{module}.{name}" not in names and id(value) not in objects
    ]
    assert not missing, f"add {missing} of {module} to a page of docs/api"


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_function_and_class_has_a_docstring_and_every_function_an_example(
    module: str,
) -> None:
    for name, value in public_names(module).items():
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        text = value.__doc__ or ""
        assert len(text) > 20, f"{module}.{name} has no docstring"
        twin = name.removeprefix("start_")  # the blocking form documents the started form
        if (
            inspect.isfunction(value)
            and f"{module}.{name}" not in WITHOUT_EXAMPLE
            and f"zfun.{name}" not in WITHOUT_EXAMPLE
        ):
            assert "Example:" in text or (twin != name and f":func:`{twin}`" in text), (
                f"{module}.{name} has no example"
            )


def test_every_error_has_a_remedy_on_its_page() -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    errors = [name for name in public_names("zfun.errors") if name != "ZfunError"]
    assert [name for name in errors if f"{{class}}`zfun.errors.{name}`" not in page] == []


def test_every_dependency_has_a_reason() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = config["project"]["optional-dependencies"].values()
    wanted = [*config["build-system"]["requires"], *config["project"]["dependencies"]]
    for packages in [*extras, *config["dependency-groups"].values()]:
        wanted += [package for package in packages if isinstance(package, str)]
    page = (DOCS / "dependencies.md").read_text(encoding="utf-8")
    names = {re.split(r"[<>=!~ \[;]", package)[0] for package in wanted}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


# torch.compile triggers this warning while tracing.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_the_page_runs(page: Path) -> None:
    """Run python blocks one after the other in one namespace, and pycon blocks as doctests."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(python|pycon)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        kind, code = match.groups()
        line = text.count("\n", 0, match.start(2))
        if kind == "python":
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
            continue
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        runner.run(
            doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line),
            clear_globs=False,
        )
        assert runner.failures == 0, f"{page.name}, line {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if not link.startswith("http"):
            # The build of the site copies the notebooks into docs/.
            beside = page.parent / link
            assert beside.exists() or (ROOT / link).exists(), f"{page.name} links to {link}"


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MPLCONFIGDIR": str(tmp_path),
    }
    command = [sys.executable, str(ROOT / "notebooks" / "01_stages.py")]
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "16 compositions on 8 ranks" in done.stdout
    assert "all equal to the last bit" in done.stdout


def test_notebook_and_its_script_are_a_pair() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        script = path.with_suffix(".py").read_text(encoding="utf-8")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert script.count("\n# %%") == len(cells), (
            f"run: jupytext --to ipynb --update {path.with_suffix('.py').name}"
        )
        for cell in cells:
            source = "".join(cell["source"])
            lines = [f"# {line}".rstrip() for line in source.splitlines()]
            expected = "\n".join(lines) if cell["cell_type"] == "markdown" else source
            assert expected in script, (
                f"{path.name} differs from its script in the cell that begins {source[:60]!r}"
            )
            assert not cell.get("outputs"), f"{path.name} is kept without outputs; the site runs it"


def test_pictures_are_drawn_and_used(tmp_path: Path) -> None:
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "config")}
    subprocess.run(
        [sys.executable, str(DOCS / "figures.py"), str(tmp_path / "out")],
        env=environment,
        check=True,
        capture_output=True,
    )
    drawn = sorted(path.name for path in (tmp_path / "out").glob("*.svg"))
    assert drawn == sorted(path.name for path in (DOCS / "_static").glob("*.svg"))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in drawn if f"_static/{name}" not in text] == []
