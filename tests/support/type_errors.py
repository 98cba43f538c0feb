"""Errors that mypy reports, and those that are expected, in the files of ``tests/typing``."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

FILES = [Path(__file__).parents[1] / "typing" / name for name in ("right.py", "wrong.py")]
_ERROR = re.compile(r"^(?:.*/)?(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", re.MULTILINE)
_EXPECTED = re.compile(r"# E: ([\w, -]+)$")
TypeErrors = set[tuple[str, int, str]]
"""The file, line and code of each error."""


def errors_of(mypy: Sequence[str], files: Sequence[Path], folder: Path) -> TypeErrors:
    """Return the errors that mypy reports.

    Parameters
    ----------
    mypy
        The command, with its options.
    folder
        The working directory.
    """
    command = [*mypy, "--show-error-codes", "--no-error-summary", *map(str, files)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    reported = _ERROR.findall(result.stdout)
    assert len(reported) == result.stdout.count(": error: "), result.stdout
    return {(file, int(line), code) for file, line, code in reported}


def expected_errors(files: Sequence[Path]) -> TypeErrors:
    """Return the errors that the comments of the files expect."""
    return {
        (file.name, number, code)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (mark := _EXPECTED.search(line))
        for code in mark[1].split(", ")
    }
