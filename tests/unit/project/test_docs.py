"""The documentation: code runs, every public name has an entry, and links point to files."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zfun
from tests.bad_values import public_names
from tools import pages

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = pages.PAGES
PUBLIC = [
    "zfun",
    "zfun.errors",
    "zfun.optim",
    "zfun.policies",
    "zfun.stores",
    "zfun.sources",
    "zfun.collectives",
    "zfun.compression",
    "zfun.checkpoint",
    "zfun.parallel",
    "zfun.interop",
    "zfun.interop.ds_config",
    "zfun.interop.lightning",
    "zfun.interop.dtensor",
    "zfun.interop.loggers",
    "zfun.interop.transformers",
    "zfun.parallel.schedules",
    "zfun.testing",
]
# Pages that run as a program: the package that they need, and the number of ranks.
AS_PROGRAMS = {"from-fsdp.md": ("torch", 2), "lightning.md": ("lightning", 1)}
# The one line that differs in the scripts of from-deepspeed.md, before and after.
DEEPSPEED, FACADE = pages.DEEPSPEED, "import zfun.interop.deepspeed as deepspeed"
# Functions whose example would be too long for a docstring. A page of docs/ or a test has one.
WITHOUT_EXAMPLE = {"zfun.collectives.spawn", "zfun.stores.fetch", "zfun.stores.resident"}


@functools.cache
def documented() -> tuple[set[str], set[int]]:
    """Return the names in the API pages, and the ids of the named objects."""
    names: set[str] = set()
    for page in (DOCS / "api").glob("*.rst"):
        text = page.read_text(encoding="utf-8")
        names.update(
            re.findall(
                r"^\.\. (?:auto(?:function|class|exception)|py:data)::\s+([\w.]+)",
                text,
                re.MULTILINE,
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
        blocking = name.removeprefix("start_")  # the blocking form documents the started form
        if (
            inspect.isfunction(value)
            and f"{module}.{name}" not in WITHOUT_EXAMPLE
            and f"zfun.{name}" not in WITHOUT_EXAMPLE
        ):
            assert "Example:" in text or (blocking != name and f":func:`{blocking}`" in text), (
                f"{module}.{name} has no example"
            )


def test_every_error_has_a_remedy_in_the_docs() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    errors = [name for name in public_names("zfun.errors") if name != "ZfunError"]
    assert [name for name in errors if f"{{class}}`zfun.errors.{name}`" not in page] == []


def test_every_dependency_has_a_reason() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = config["project"]["optional-dependencies"].values()
    wanted = [*config["build-system"]["requires"], *config["project"]["dependencies"]]
    for packages in [*extras, *config["dependency-groups"].values()]:
        wanted += [package for package in packages if isinstance(package, str)]
    page = (DOCS / "reference" / "dependencies.md").read_text(encoding="utf-8")
    names = {re.split(r"[<>=!~ \[;]", package)[0] for package in wanted}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_every_extra_has_a_line_that_installs_it(page: str) -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = ["pip install .", "pip install torch"]
    lines += [f'pip install ".[{extra}]"' for extra in config["project"]["optional-dependencies"]]
    assert [line for line in lines if line not in text] == []


def test_the_version_is_written_once() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in config["project"]["dynamic"]
    assert ROOT / config["tool"]["hatch"]["version"]["path"] == ROOT / "zfun" / "__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", zfun.__version__)
    assert f"\nversion: {zfun.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert re.fullmatch(
        rf"\[{re.escape(zfun.__version__)}\] - (unreleased|\d{{4}}-\d\d-\d\d)", newest[1]
    )


def run_script(script: Path, num_ranks: int, *arguments: str, python: str = sys.executable) -> None:
    """Run a program on local ranks, in its folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [python, *(launcher if num_ranks > 1 else []), script.name, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            # DeepSpeed finds ninja beside python.
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        },
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=110 if python == sys.executable else 400,  # DeepSpeed compiles
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(AS_PROGRAMS))
def test_code_on_a_page_is_a_program(name: str, tmp_path: Path) -> None:
    """Run the blocks in a process, because the code changes settings of its process."""
    package, size = AS_PROGRAMS[name]
    pytest.importorskip(package)
    blocks = pages.blocks(DOCS / "migrate" / name)
    (tmp_path / "page.py").write_text("\n".join(b.code for b in blocks), encoding="utf-8")
    run_script(tmp_path / "page.py", size)


# torch.compile triggers this warning while tracing.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in AS_PROGRAMS],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_on_a_page_runs(page: Path) -> None:
    """``make docs`` runs the cells, and ``python -m tools.pages paste`` runs both."""
    pages.paste(page, {"__name__": page.stem}, cells=False)


def test_a_page_that_fails_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", encoding="utf-8")
    assert [block.line for block in pages.blocks(page)] == [1, 5]
    with pytest.raises(AssertionError) as found:
        pages.paste(page, {})
    assert str(found.traceback[-1].path) == str(page)
    assert found.traceback[-1].lineno == 5  # counted from 0


@pytest.mark.parametrize(
    ("code", "whole"),
    [
        ("import zfun as zf\nzf.shard(len([x for x in 'ab']))", True),
        ("from zfun import shard\ndef f(x): return shard(x)\nclass A: y = f", True),
        ("import zfun as zf\ndef f(): return zf.shard(params)", False),
        ("import zfun as zf\nstate", False),
        ("import torch\ntorch.ones(2)", False),
    ],
)
def test_a_whole_program_uses_no_name_of_another_block(code: str, whole: bool) -> None:
    assert pages.is_whole(code) is whole


def test_programs_have_the_lines_of_their_page(tmp_path: Path) -> None:
    pages.write_programs(tmp_path)
    first = (DOCS / "start.md").read_text(encoding="utf-8").split("\n")
    (program,) = tmp_path.glob("docs_start_*.py")
    lines = program.read_text(encoding="utf-8").rstrip().split("\n")
    assert lines[-1] == first[len(lines) - 1] != ""
    assert len(list(tmp_path.iterdir())) >= 50


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_of_deepspeed_trains_alike_before_and_after(tmp_path: Path) -> None:
    """``make test-all`` installs DeepSpeed, in an environment of its own, and names its python."""
    python = os.environ.get("ZFUN_DEEPSPEED_PYTHON")
    if not python:
        pytest.skip("ZFUN_DEEPSPEED_PYTHON must name a python that has DeepSpeed")
    if shutil.which("c++") is None:
        pytest.skip("DeepSpeed compiles C++ when it starts")
    text = (DOCS / "migrate" / "from-deepspeed.md").read_text(encoding="utf-8")
    common, before, after = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:3]
    assert before.replace(DEEPSPEED, FACADE, 1) == after
    found = []
    for name, interpreter, script in (("before", python, before), ("after", sys.executable, after)):
        losses = tmp_path / f"{name}.json"
        ends = [
            "if deepspeed.comm.get_rank() == 0:",
            "    Path(sys.argv[1]).write_text(str(losses))",
            "deepspeed.comm.barrier()",
            # DeepSpeed's own threads may still run at exit, and then abort the process.
            "os._exit(0)",
        ]
        lines = [common, script, "import os, sys", "from pathlib import Path", *ends]
        (tmp_path / f"{name}.py").write_text("\n".join(lines), encoding="utf-8")
        run_script(tmp_path / f"{name}.py", 2, str(losses), python=interpreter)
        found.append(json.loads(losses.read_text(encoding="utf-8")))
    assert len(found[0]) == 40
    assert found[1] == pytest.approx(found[0], rel=0, abs=1e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if not link.startswith("http"):
            target = (page.parent / link).resolve()
            # The build of the site copies the notebooks into docs/.
            if target.is_relative_to(DOCS / "notebooks"):
                target = ROOT / target.relative_to(DOCS)
            assert target.exists() or (ROOT / link).exists(), f"{page.name} links to {link}"


# The last words that each notebook prints, after its own checks.
NOTEBOOKS = {
    "01_stages": "all equal to the last bit",
    "02_tradeoffs": "network  25 GB/s, stage 3",
    "03_inside_a_step": "bytes as planned, parameters equal to the last bit",
    "04_tiers": "choices of tiers, all equal to the last bit",
    "05_compression": "stages 1, 2 and 3 with 8-bit gradients: parameters equal",
    "06_property_tests": "the repaired transform agrees with plain autograd",
    "07_loops": "EMA: stages 0 to 3 equal to the last bit",
    "08_fine_tune": "resumed at stage 3: 60 losses equal to the last bit",
    "09_own_strategy": "equal to plain autograd on 1, 2, 3 and 4 ranks",
    "10_axes": "six meshes, one loss",
}


@pytest.mark.parametrize("name", sorted(NOTEBOOKS))
def test_a_stored_notebook_ends_in_its_line(name: str) -> None:
    """``make docs`` runs the notebooks, and builds no site where a check of one fails."""
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert NOTEBOOKS[name] in "".join("".join(x.get("text", ())) for x in outputs)


def test_every_notebook_has_its_line() -> None:
    found = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert found == set(NOTEBOOKS)


def test_a_notebook_and_the_script_beside_it_are_equal() -> None:
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
        # Outputs are stored, because readers see a notebook before they run the notebook.
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        drawn = [text for text in sources if re.search(r"_ = figures\.|\.draw\(.*\)$", text)]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == len(drawn), (
            "run: python tools/notebooks.py"
        )
        assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize(
    ("word", "page"),
    [("inference", "guides/evaluate"), ("DataLoader", "start"), ("resume", "guides/evaluate")],
)
def test_the_search_finds_words_of_a_training_script(word: str, page: str) -> None:
    assert word in (DOCS / f"{page}.md").read_text(encoding="utf-8")


def test_the_first_page_shows_code_and_where_bits_are_equal() -> None:
    for page in (ROOT / "README.md", DOCS / "index.md"):
        text = page.read_text(encoding="utf-8")
        assert "pip install" in text
        assert "zf.zero(3, loss_fn" in text
        first = text[: text.index("last\nbit") if "last\nbit" in text else text.index("last bit")]
        assert "On CPUs" in first


def test_pictures_are_drawn_and_used(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "figures.py"))["draw"](tmp_path)
    drawn = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert drawn == sorted(path.name for path in (DOCS / "_static").glob("*.svg"))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = {name: name.replace("_narrow", "") for name in drawn}
    assert [name for name, wide in shown.items() if f"_static/{wide}" not in text] == []


def test_a_figure_exports_as_text_in_svg_and_pdf(tmp_path: Path) -> None:
    figures = runpy.run_path(str(ROOT / "notebooks" / "figures.py"))
    figure = figures["losses"]({"a run": [3.0, 2.0]})
    written = figures["export"](figure, tmp_path / "one")
    assert [path.name for path in written] == ["one.svg", "one.pdf"]
    assert ">a run</text>" in written[0].read_text(encoding="utf-8")
    pdf = written[1].read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf  # TrueType, whose letters a reader can find and copy


MEASURED = "benchmarks/results"


def test_every_page_of_results_is_on_the_site_with_pictures_that_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("benchmarks/*.md"))
    included = re.findall(rf"^```{{include}} \.\./\.\./{MEASURED}/(.*)$", text, re.MULTILINE)
    assert sorted(included) == sorted(path.name for path in (ROOT / MEASURED).glob("*.md"))
    pictures = runpy.run_path(str(DOCS / "measured.py"))["PICTURES"]
    assert sorted(re.findall(r"pictures/(\w+)\.svg", text)) == sorted(pictures)


def test_a_picture_of_a_benchmark_shows_the_numbers_of_its_table() -> None:
    measured = runpy.run_path(str(DOCS / "measured.py"))
    page = (ROOT / MEASURED / "step.md").read_text(encoding="utf-8")
    panels = measured["PICTURES"]["step"]().axes
    sizes = ("small, fp32, 2 ranks, shared memory", "small, fp32, 2 ranks, gloo")
    for panel, title in zip(panels, sizes, strict=False):
        section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| ([^|]*?) \| ([\d.]+) \|", section, re.MULTILINE)
        assert [label.get_text() for label in panel.get_yticklabels()] == [row[0] for row in rows]
        widths = [bar.get_width() for bar in panel.patches]
        assert widths == [float(row[1]) for row in rows]


def test_a_picture_names_the_machine_of_each_run() -> None:
    measured = runpy.run_path(str(DOCS / "measured.py"))
    drawn = itertools.product(measured["PICTURES"].values(), (False, True))
    for make, narrow in drawn:
        below = make(narrow=narrow).get_supxlabel()
        assert "cores" in below
        assert "torch 2." in " ".join(below.split())


def test_tables_of_results_are_read_in_both_forms() -> None:
    rows_of = runpy.run_path(str(DOCS / "measured.py"))["rows_of"]
    rows = [{"": "zfun-3", "ms": "1,573.2", "wire": "3.0 P"}, {"": "ddp", "ms": "–", "wire": "2"}]
    table = "| | ms | wire |\n|---|---|---|\n| zfun-3 | 1,573.2 | 3.0 P |\n| ddp | – | 2 |"
    assert rows_of(table) == rows
    text = "```text\n          ms     wire\nzfun-3   1,573.2   3.0 P\nddp  –    2\n```"
    assert rows_of(text) == rows


def test_the_gallery_has_every_picture_of_the_notebooks(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(DOCS / "conf.py"))["gather_pictures"](tmp_path)
    stored = sum(
        path.read_text(encoding="utf-8").count('"image/png"')
        for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    page = (tmp_path / "gallery.txt").read_text(encoding="utf-8")
    shown = re.findall(r"^:::\{figure\} pictures/(.*)\n:alt: (.+)$", page, re.MULTILINE)
    assert len(shown) == stored == len({name for name, _ in shown})
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name, _ in shown)


def test_the_bibliography_has_every_paper_that_a_docstring_names() -> None:
    lines = (DOCS / "bibliography.md").read_text(encoding="utf-8").splitlines()
    missing = set()
    for path in [*(ROOT / "zfun").rglob("*.py"), *DOCS.glob("guides/*.md")]:
        text = path.read_text(encoding="utf-8")
        for author, year in re.findall(
            r"([A-Z][a-z]+) et al\.,?[^.|]{0,120}?\(?((?:19|20)\d\d)", text, re.DOTALL
        ):
            if not any(f"{author} et al." in line and year in line for line in lines):
                missing.add((author, year, path.name))
    assert missing == set()


@pytest.mark.parametrize("shown", [True, False])
def test_the_site_is_not_built_without_an_expected_picture(shown: bool, monkeypatch) -> None:
    nodes = pytest.importorskip("docutils.nodes")
    error = pytest.importorskip("sphinx.errors").ExtensionError
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    conf = runpy.run_path(str(DOCS / "conf.py"))
    page = importlib.import_module("docutils.utils").new_document("page")
    cell = nodes.container(nb_element="cell_code")
    cell += nodes.literal_block("", "found = plan()\nfound.draw()")
    cell += nodes.image(uri="a.png") if shown else nodes.literal_block("", "<Figure size 10x4>")
    page += cell
    expected = contextlib.nullcontext() if shown else pytest.raises(error, match="shows none")
    with expected:
        conf["check_pictures"](None, page, "page")
