"""Type checkers see the public names with their types, and find wrong uses.

For the installed package, see tests/packaging.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.type_errors import FILES, errors_of, expected_errors

ROOT = Path(__file__).resolve().parents[2]


def test_correct_uses_pass_and_wrong_ones_are_reported() -> None:
    # With the project's own settings, so that what `make lint` has found out is used again.
    found = errors_of([sys.executable, "-m", "mypy"], FILES, ROOT)
    assert found == expected_errors(FILES)
    assert len(found) > 25
