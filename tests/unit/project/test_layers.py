"""The layers of the package: a module imports only modules above, and an import has no side
effects.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import zfun
from tests.bad_values import public_names

ROOT = Path(zfun.__file__).parent
ORDER = [
    "errors",
    "files",
    "objects",
    "options",
    "typing",
    "tables",
    "drawing",
    "policies",
    "ops",
    "tree",
    "placement",
    "sources",
    "layout",
    "collectives",
    "flat",
    "stores",
    "reductions",
    "compression",
    "optim",
    "transforms",
    "parallel",
    "checkpoint",
    "modules",
    "recipes",
    "evaluation",
    "planner",
    "interop",
    "testing",
    "demo",
    "cli",
    "__main__",
]
MODULES = sorted(ROOT.rglob("*.py"))
NAMES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in MODULES
}


# The package itself, whose names _names.py imports at their first use.
PACKAGE = ("__init__", "_names")


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Parse a file once for all tests."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, at any place in the file."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if node.module == "zfun" or inner in NAMES else node.module or ""


def test_every_module_is_in_the_import_order() -> None:
    assert {layer(path) for path in MODULES} - set(PACKAGE) == set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_modules_above_it(path: Path) -> None:
    here = layer(path)
    if here in PACKAGE:
        return
    for name in imports(path):
        if not name.startswith("zfun"):
            continue
        parts = name.split(".")
        there = parts[1] if len(parts) > 1 else ""
        if there not in ORDER:  # the package itself, which users import
            assert here in ("demo", "cli", "__main__"), f"{path} imports the package"
            continue
        assert ORDER.index(there) <= ORDER.index(here), (
            f"{here} imports {there}, which stands below it"
        )
        if here != there and len(parts) > 2 and there != "ops":
            assert not parts[2].startswith("_"), (
                f"{path} reaches into {name}; import it from zfun.{there}"
            )


def test_imports_form_no_cycle() -> None:
    """The rule covers modules of one folder, and imports inside functions."""
    graph = {
        name: {found for found in imports(path) if found in NAMES} for name, path in NAMES.items()
    }
    circles = set()
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            # Each module of the cycle is imported by the next.
            imported, importer = error.args[1][:2]
            circles.add(" <- ".join(error.args[1]))
            graph[importer].discard(imported)
        else:
            break
    assert not circles, f"modules import each other: {sorted(circles)}"


# A reader can survey this number of files in a folder.
MAX_FILES = 16


def test_folders_have_few_files() -> None:
    checkout = ROOT.parent
    places = [ROOT, *(checkout / name for name in ("benchmarks", "examples", "tests", "tools"))]
    large = {
        str(folder.relative_to(checkout))
        for place in places
        for folder in {path.parent for path in place.rglob("*.py")}
        if len(list(folder.glob("*.py"))) > MAX_FILES
    }
    assert not large, f"split folders of more than {MAX_FILES} files: {sorted(large)}"


def test_one_module_imports_optree() -> None:
    found = {
        layer(path) for path in MODULES for name in imports(path) if name.split(".")[0] == "optree"
    }
    assert found == {"tree"}


def test_only_testing_imports_hypothesis() -> None:
    found = {
        layer(path)
        for path in MODULES
        for name in imports(path)
        if name.split(".")[0] == "hypothesis"
    }
    assert found == {"testing"}


def test_optimizers_know_nothing_of_ranks() -> None:
    for path in (ROOT / "optim").rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(("zfun.collectives", "zfun.transforms", "torch.distributed"))


def test_kernels_know_tensors_and_integers_only() -> None:
    for path in (ROOT / "ops").rglob("*.py"):
        for name in imports(path):
            assert not name.startswith("zfun") or name.startswith("zfun.ops"), (
                f"{path} imports {name}"
            )


def test_no_globals_and_no_prints() -> None:
    for path in MODULES:
        for node in nodes(path):
            assert not isinstance(node, ast.Global), f"{path}:{node.lineno} has a global"
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and layer(path) not in ("demo", "cli")
            ):
                assert node.func.id != "print", f"{path}:{node.lineno} prints"


def test_the_import_prints_nothing_and_changes_no_setting_of_torch() -> None:
    program = (
        "import torch, warnings; warnings.simplefilter('error');before = "
        "(torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), "
        "torch.initial_seed());import zfun, sys;zfun.zero;"
        "assert before == (torch.get_num_threads(), "
        "torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed());assert not "
        "torch.distributed.is_initialized();assert 'hypothesis' not in sys.modules and "
        "'transformers' not in sys.modules and 'lightning' not in sys.modules and "
        "'matplotlib' not in sys.modules and 'zfun.interop' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


PUBLIC = [
    "zfun",
    "zfun.tree",
    "zfun.optim",
    "zfun.policies",
    "zfun.stores",
    "zfun.sources",
    "zfun.collectives",
    "zfun.compression",
    "zfun.transforms",
    "zfun.checkpoint",
    "zfun.modules",
    "zfun.planner",
    "zfun.planner.formulae",
    "zfun.interop",
    "zfun.testing",
    "zfun.errors",
    "zfun.flat",
    "zfun.layout",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(importlib.import_module(name))
    assert public_names(name)
    for key, value in public_names(name).items():
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name}.{key} has no docstring"


# An example needs a transform around these functions; the docstring of offload() has one.
WITHOUT_EXAMPLE = {
    "check_agreement",
    "kind_of_state",
    "offload_grads",
    "offload_loss",
    "offload_optimizer",
}


def test_every_transform_has_an_example() -> None:
    for key, value in public_names("zfun.transforms").items():
        if inspect.isfunction(value) and key not in WITHOUT_EXAMPLE:
            assert "Example:" in (inspect.getdoc(value) or ""), (
                f"zfun.transforms.{key} has no example"
            )


def test_the_top_level_has_few_public_names() -> None:
    # One for each kind of model axis beside the others.
    assert len(zfun.__all__) <= 43
    assert len(inspect.signature(zfun.zero).parameters) <= 17


def test_signatures_are_annotated() -> None:
    for name in PUBLIC:
        for key, value in public_names(name).items():
            if inspect.isfunction(value):
                signature = inspect.signature(value)
                missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
                assert not missing, f"{name}.{key}: {missing} have no type"
                assert signature.return_annotation is not signature.empty, (
                    f"{name}.{key} has no type of result"
                )
