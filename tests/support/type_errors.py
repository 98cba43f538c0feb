"""What mypy says of the files in ``tests/typing``."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

FILES = [Path(__file__).parents[1] / "typing" / name for name in ("right.py", "wrong.py")]
_ERROR = re.compile(r"^(?:.*/)?(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", re.MULTILINE)
_EXPECTED = re.compile(r"# E: ([\w, -]+)$")
Found = set[tuple[str, int, str]]
"""File, line and the error's code."""


def errors_of(mypy: Sequence[str], files: Sequence[Path], folder: Path) -> Found:
    """The errors that mypy finds.

    Parameters
    ----------
    mypy
        The command, with its options.
    folder
        The working directory.
    """
    command = [*mypy, "--show-error-codes", "--no-error-summary", *map(str, files)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = _ERROR.findall(done.stdout)
    assert len(found) == done.stdout.count(": error: "), done.stdout
    return {(file, int(line), code) for file, line, code in found}


def expected_errors(files: Sequence[Path]) -> Found:
    """The errors that the files say they have."""
    return {
        (file.name, number, code)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (mark := _EXPECTED.search(line))
        for code in mark[1].split(", ")
    }
