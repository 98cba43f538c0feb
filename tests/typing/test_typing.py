"""Type checkers see the public names with their types, and find wrong uses.

For the installed package, see tests/packaging.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.typing.checking import FILES, meant, told

ROOT = Path(__file__).resolve().parents[2]


def test_correct_uses_pass_and_wrong_ones_are_reported() -> None:
    # With the project's own settings, so that what `make lint` has found out is used again.
    found = told([sys.executable, "-m", "mypy"], FILES, ROOT)
    assert found == meant(FILES)
    assert len(found) > 25
