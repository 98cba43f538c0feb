"""Runs the notebooks under examples from top to bottom, without writing their outputs.

With --strip, it removes their outputs instead.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples/notebooks").glob("*.ipynb"))
CELL_TIMEOUT_SECONDS = 180


def main() -> None:
    """Run or strip all notebooks. Running stops at the first error of a cell."""
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        if "--strip" in sys.argv:
            nbformat.write(strip_outputs(notebook), path)
            continue
        run(notebook)
        pictures = sum(
            "image/png" in output.get("data", {})
            for cell in notebook.cells
            for output in cell.get("outputs", ())
        )
        print(f"{path.name}: {len(notebook.cells)} cells, {pictures} picture(s)")


def run(notebook: Any) -> None:
    """Run a notebook in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-notebooks-") as folder:
        NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        ).execute()


def strip_outputs(notebook: Any) -> Any:
    """Remove the outputs of a notebook."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


if __name__ == "__main__":
    main()
