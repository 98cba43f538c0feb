"""The data files of a Delta table, as an attempt to commit has loaded it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from penstock.lake.storage import DeltaPlace
from penstock.tables.delta import stored_files, vectors
from penstock.tables.delta.applied_table import AppliedTable
from tests.tables.delta.driver import FIRST, FOLDS, SECOND, Driver


class Reads:
    """The logs that are read, by the name of the table's folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        adds_in_log = stored_files.adds_in_log

        def reading(place: DeltaPlace, version: int, paths: Collection[str]) -> Any:
            self.read.append("t" if place.path.endswith("/t") else "record")
            return adds_in_log(place, version, paths)

        monkeypatch.setattr(stored_files, "adds_in_log", reading)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_an_attempt_reads_each_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scd_type: int
) -> None:
    monkeypatch.setattr(Driver, "by_vectors", True)
    monkeypatch.setattr(vectors, "_LEAST_BYTES", 0)
    driver, reads = Driver(tmp_path, scd_type), Reads(monkeypatch)
    driver.apply(0, FIRST)
    for number, events in enumerate((SECOND, [("a", 9, 9, 1), ("b", 9, 9, 0)]), 1):
        reads.read.clear()
        driver.apply(number, events)
        assert sorted(reads.read) == ["record", "t"]
    assert driver.rows() == FOLDS[scd_type]([*FIRST, *SECOND, ("a", 9, 9, 1), ("b", 9, 9, 0)])


def test_another_attempt_reads_the_log_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "by_vectors", True)
    monkeypatch.setattr(vectors, "_LEAST_BYTES", 0)
    one, other = Driver(tmp_path, 1, "one"), Driver(tmp_path, 1, "other")
    one.apply(0, FIRST)
    hooks: list[Callable[[], None]] = [lambda: other.apply(0, SECOND)]
    record = AppliedTable.record

    def recording(applied: AppliedTable, *arguments: Any) -> int:
        if hooks:
            hooks.pop()()
        return record(applied, *arguments)

    monkeypatch.setattr(AppliedTable, "record", recording)
    reads = Reads(monkeypatch)
    last = [("a", 9, 9, 1), ("d", 9, 9, 0)]
    one.apply(1, last)
    assert one.rows() == FOLDS[1]([*FIRST, *SECOND, *last])
    assert reads.read.count("t") == 3, "of this one, of the other one, which commits first, of this one again"
