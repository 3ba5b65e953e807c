"""Run the notebooks and store their outputs: ``python tools/notebooks.py``.

Progress bars and warnings, which go to stderr, and the times of cells are left out, so that a new
run changes only outputs that changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).parents[1] / "notebooks"


def run(path: Path) -> None:
    notebook: Any = nbformat.read(path, 4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        run(path)
        print(path)
