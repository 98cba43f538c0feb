"""The public names are those in `__all__`, sorted, and type checkers see the same names."""

from __future__ import annotations

import re
from pathlib import Path

import penstock


def test_every_name_can_be_imported() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_public_names_are_sorted_and_listed_by_dir() -> None:
    assert list(penstock.__all__) == sorted(penstock.__all__)
    assert dir(penstock) == penstock.__all__


def test_type_checkers_see_the_same_names() -> None:
    text = Path(penstock.__file__).read_text()
    declared = set(re.findall(r"^    from penstock\S* import (\w+) as \1$", text, re.MULTILINE))
    assert declared == set(penstock.__all__) - {"__version__"}
