"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import subprocess
import sys

import nbformat
import pytest

from scripts.run_notebooks import NOTEBOOKS
from tests.support.pages import ROOT


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(path: object) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "run `python scripts/run_notebooks.py --strip`"
        assert cell.get("execution_count") is None


@pytest.mark.soak
def test_each_notebook_ends_with_a_picture() -> None:
    """What `make notebooks` does."""
    done = subprocess.run(
        [sys.executable, "scripts/run_notebooks.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("1 picture(s)") == len(NOTEBOOKS) == 2
