"""Spark puts archives in front of the path of its Python workers: its own code, which has no bytecode there."""

from __future__ import annotations

import sys


def prefer_installed() -> None:
    """Import the installed packages, which are the same code; compiling them anew takes each process most of a second."""
    sys.path[:] = [path for path in sys.path if not path.endswith((".zip", ".jar"))]
