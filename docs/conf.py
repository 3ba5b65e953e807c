"""The site: ``make docs`` builds it, with warnings as errors."""

from __future__ import annotations

import base64
import builtins
import functools
import importlib
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
# The notebook's kernel is a separate process and reads PYTHONPATH.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
)

project = "zfun"
author = "the zfun authors"
copyright = author
release = version = importlib.import_module("zfun").__version__

templates_path = ["_templates"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "jupyter_execute"]
nitpicky = True
# Types in signatures that have no page: the standard library's, and aliases of a few literals.
nitpick_ignore = [
    ("py:class", name)
    for name in (
        "Drawing",  # a figure of matplotlib
        "SpawnContext",
        "contextlib.AbstractContextManager",
        "argparse.ArgumentParser",
        "zfun.interop.deepspeed._settings.Settings",
        "ZeroOptions",
        "zfun.recipes._options.ZeroOptions",
        "ForkServerContext",
        "When",
        "Path",
        "np.ndarray",
        "Fraction",
        "fractions.Fraction",
        "PrepareFn",
        "UpdateKind",
        "Form",
        "zfun.interop.ds_config.table._keys.Form",
        "Verdict",
        "zfun.placement.LeafPlace",
        "zfun.checkpoint.format._order.StoredCut",
        "transformers.modeling_utils.PreTrainedModel",
        "zfun.planner.plans._flops.Touched",
        "zfun.planner.plans._bounds.Bound",
        "StepWork",
        "zfun.planner.plans._hardware.StepWork",
    )
]

html_theme = "furo"
html_title = "zfun"  # the sidebar names the version
html_static_path = ["_static"]
html_css_files = ["zfun.css"]
html_js_files = ["versions.js"]
html_sidebars = {
    "**": [
        f"sidebar/{name}.html"
        for name in (
            "brand",
            "versions",
            "search",
            "scroll-start",
            "navigation",
            "scroll-end",
        )
    ]
}
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0072B2",
        "color-brand-content": "#0072B2",
    }
}

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {"release": release}
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

python_maximum_signature_line_length = 60  # longer ones have one argument a line
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True


def copy_notebooks() -> None:
    """Copy the notebooks into the source folder, because Sphinx reads only that folder."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    for path in [
        *(ROOT / "notebooks").glob("*.ipynb"),
        ROOT / "notebooks" / "figures.py",
    ]:
        shutil.copyfile(path, target / path.name)


def first_words(cell: Any) -> str:
    """The heading of a cell of text, or its first sentence."""
    text = " ".join("".join(cell["source"]).partition("\n\n")[0].split())
    if text.startswith("#"):
        return text.lstrip("# ")
    return re.split(r"(?<=\.) |:$", text)[0]


def gather_pictures(target: Path) -> None:
    """Write the pictures that the notebooks store, and the Markdown that lays them out."""
    target.mkdir(exist_ok=True)
    page: list[str] = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title = first_words(cells[0])
        page += [f"## [{title}](notebooks/{path.name})", "", "::::{container} gallery"]
        caption, count = title, 0
        for cell in cells:
            if cell["cell_type"] == "markdown":
                caption = first_words(cell)
            for output in cell.get("outputs", ()):
                image = output.get("data", {}).get("image/png")
                if not image:
                    continue
                count += 1
                name = f"{path.stem}-{count}.png"
                (target / name).write_bytes(base64.b64decode(image))
                alt = caption.replace("`", "")
                page += [f":::{{figure}} pictures/{name}", f":alt: {alt}"]
                page += [":width: 100%", "", caption, ":::", ""]
        page += ["::::", ""]
    (target / "gallery.txt").write_text("\n".join(page), encoding="utf-8")


@functools.cache
def documented_names() -> dict[int, str]:
    """Map each object that an API page documents to the documented name."""
    names: dict[int, str] = {}
    for page in sorted((HERE / "api").glob("*.rst")):
        for name in re.findall(
            r"^\.\. auto(?:function|class|exception)::\s+([\w.]+)",
            page.read_text(),
            re.MULTILINE,
        ):
            module, _, attribute = name.rpartition(".")
            names.setdefault(
                id(getattr(importlib.import_module(module), attribute)), name
            )
    return names


def resolve(app: Any, env: Any, node: Any, contnode: nodes.Node) -> nodes.Node | None:
    """Resolve a short name in a docstring, or the private module path of an annotation.

    Names of other libraries, and names without a page, become plain text.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    short = target.rpartition(".")[2]
    domain = env.get_domain("py")
    for name in (
        _same_object(target),
        f"zfun.{short}",
        *(f"{module}.{short}" for module in MODULES),
        # A member of a class: Functional.params.
        *(name for name in domain.objects if name.endswith(f".{target}")),
    ):
        if name in domain.objects:
            found = domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", name, node, contnode
            )
            if found is not None:
                return found
    is_plain = short in PLAIN or short.startswith("_") or target.startswith(FOREIGN)
    return contnode if is_plain else None


def show_public_names(app: Any, doctree: nodes.document, docname: str) -> None:
    """Show the private module path of a type as the documented name, or as the name alone."""
    for text in list(doctree.findall(nodes.Text)):
        name = text.astext()
        if isinstance(text.parent, nodes.emphasis) and re.fullmatch(
            r"zfun(\.\w+)*\._[\w.]+", name
        ):
            shown = _same_object(name) or name.rpartition(".")[2]
            text.parent.replace(text, nodes.Text(shown))


def shorten_defaults(
    app: Any,
    what: str,
    name: str,
    found: object,
    options: Any,
    signature: str,
    result: str,
) -> tuple[str, str] | None:
    """Write a signature so that Sphinx can read it, or it would show private paths.

    A default that is an object is shown as dots, ``*args`` of a ParamSpec by its name, and the
    private fields of a dataclass not at all.
    """
    if not signature:
        return None
    signature = re.sub(r"<\w+(?: [^<>]*)?>", "...", signature)
    signature = re.sub(r"~typing\.~(?=_)", "", signature)
    return re.sub(r", _\w+: [^=]* = \.\.\.", "", signature), result


MODULES = [
    f"zfun.{name}"
    for name in (
        "collectives",
        "layout",
        "optim",
        "stores",
        "tree",
        "transforms",
        "testing",
        "typing",
        "compression",
        "evaluation",
        "reductions",
    )
]
FOREIGN = (
    "torch.",
    "lightning.",
    "datetime.",
    "optree.",
    "collections.",
    "typing.",
    "numpy.",
    "hypothesis.",
    "types.",
    "enum.",
    "abc.",
    "pathlib.",
)
# Short names of other libraries' types, then types that users never write.
PLAIN = frozenset(
    [
        *(
            "ABC",
            "Any",
            "Callable",
            "ClassVar",
            "Enum",
            "IntEnum",
            "Iterable",
            "Iterator",
            "Mapping",
            "NamedTuple",
            "None",
            "Protocol",
        ),
        *("Self", "Sequence", "TracebackType", "TypeAlias", *vars(builtins)),
        *("DeviceMesh", "Module", "ProcessGroup", "SearchStrategy", "Tensor"),
        *("ApplyFn", "Kind", "LabelFn", "Phase", "Row"),
        *("Aux", "CommHook", "Life", "Params"),
    ]
)


def _same_object(target: str) -> str:
    module, _, attribute = target.rpartition(".")
    if not module.startswith("zfun"):
        return ""
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return ""
    return documented_names().get(id(found), "")


def skip_aliases(
    app: Any, what: str, name: str, found: object, skip: bool, options: Any
) -> bool | None:
    """Skip generated docstrings of NamedTuple fields, because the class describes the fields."""
    return (
        True
        if (getattr(found, "__doc__", None) or "").startswith("Alias for field number")
        else None
    )


DRAWS = re.compile(r"\.draw\(.*\)$|^_ = figures\.", re.MULTILINE)


def check_pictures(app: Any, doctree: nodes.document, docname: str) -> None:
    """Stop the build at a cell that draws a picture and shows none.

    Raises:
        ExtensionError: the output of such a cell has no image.
    """
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") != "cell_code":
            continue
        source = next(
            (block.astext() for block in cell.findall(nodes.literal_block)), ""
        )
        if DRAWS.search(source) and not any(cell.findall(nodes.image)):
            raise ExtensionError(
                f"{docname}: a cell that draws must show a picture; this one shows "
                f"none:\n{source}"
            )


class ShowOnPhones(SphinxTransform):
    """Show a narrow screen the form of a picture for it, ``NAME_narrow``, where there is one."""

    default_priority = 400  # before sphinx collects the images

    def apply(self, **options: Any) -> None:
        page = Path(self.env.doc2path(self.env.docname))
        for image in list(self.document.findall(nodes.image)):
            path = Path(image["uri"])
            narrow = path.with_stem(f"{path.stem}_narrow")
            if not (page.parent / narrow).exists():
                continue
            other = image.deepcopy()
            other["uri"] = str(narrow)
            other["classes"].append("narrow")
            image["classes"].append("wide")
            image.parent.insert(image.parent.index(image) + 1, other)


def list_versions(app: Any, exception: Exception | None) -> None:
    """List the versions beside the folder of this one, and lead a visitor to the newest."""
    folder = Path(app.outdir).parent
    numbers = [
        re.fullmatch(r"v(\d+)\.(\d+)", path.name)
        for path in (*folder.iterdir(), Path(app.outdir))
        if path.is_dir()
    ]
    found = {(int(number[1]), int(number[2])) for number in numbers if number}
    names = [f"v{major}.{minor}" for major, minor in sorted(found, reverse=True)]
    if exception or Path(app.outdir).name not in names:
        return
    (folder / "versions.json").write_text(json.dumps(names), encoding="utf-8")
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={names[0]}/">'
    (folder / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    copy_notebooks()
    gather_pictures(HERE / "pictures")
    runpy.run_path(str(HERE / "measured.py"))["draw"](HERE / "pictures")
    app.add_transform(ShowOnPhones)
    app.connect("doctree-resolved", check_pictures)
    app.connect("doctree-resolved", show_public_names)
    app.connect("autodoc-skip-member", skip_aliases)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("missing-reference", resolve)
    app.connect("build-finished", list_versions)
