"""Iceberg tables in the catalogs that users have: REST catalogs and AWS Glue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tables.delta.driver import FIRST, FOLDS, SECOND
from tests.tables.iceberg.catalogs import CATALOGS, ServedCatalog
from tests.tables.iceberg.changes_driver import ChangesDriver
from tests.tables.iceberg.driver import Driver


@pytest.fixture(params=CATALOGS)
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServedCatalog]:
    with CATALOGS[request.param](tmp_path) as served:
        yield served


def test_rows(catalog: ServedCatalog, tmp_path: Path) -> None:
    expected = {
        "append": [(1, "a"), (2, "b"), (2, "c"), (3, "d")],
        "update": [(1, "a"), (2, "c"), (3, "d")],
        "complete": [(2, "c"), (3, "d")],
    }
    for mode, rows in expected.items():
        keys = ["k"] if mode == "update" else []
        driver = Driver(tmp_path, mode, *keys, name=mode, catalog=catalog.properties)
        driver.write(0, [(1, "a"), (2, "b")])
        catalog.lose_reply()
        driver.write(1, [(2, "c"), (3, "d")])
        again = Driver(tmp_path, mode, *keys, name=mode, catalog=catalog.properties)
        again.write(1, [(2, "c"), (3, "d")])
        assert driver.rows() == rows
        assert driver.orphans == []


@pytest.mark.parametrize("scd_type", [1, 2])
def test_changes(catalog: ServedCatalog, tmp_path: Path, scd_type: int) -> None:
    driver = ChangesDriver(tmp_path, scd_type, catalog=catalog.properties)
    driver.apply(0, FIRST)
    catalog.lose_reply()
    driver.apply(1, SECOND)
    again = ChangesDriver(tmp_path, scd_type, catalog=catalog.properties)
    again.apply(1, SECOND)
    assert driver.rows() == FOLDS[scd_type]([*FIRST, *SECOND])
    assert driver.orphans == []
