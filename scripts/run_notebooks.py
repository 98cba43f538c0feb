"""Runs the notebooks under examples from top to bottom, and writes nothing.

With --strip it takes their outputs out instead.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples/notebooks").glob("*.ipynb"))
SECONDS = 180


def main() -> None:
    """One notebook after the other; an error of a cell ends it."""
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        if "--strip" in sys.argv:
            nbformat.write(stripped(notebook), path)
            continue
        run(notebook)
        pictures = sum(
            "image/png" in output.get("data", {})
            for cell in notebook.cells
            for output in cell.get("outputs", ())
        )
        print(f"{path.name}: {len(notebook.cells)} cells, {pictures} picture(s)")


def run(notebook: Any) -> None:
    """Run it in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-notebooks-") as folder:
        NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()


def stripped(notebook: Any) -> Any:
    """The notebook without what running it has left."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


if __name__ == "__main__":
    main()
