"""What cannot be compared is refused with a condition of its own, and no message has a password."""

from __future__ import annotations

import logging
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import penstock
from penstock.errors import (
    FeedUnavailableError,
    InvalidInputError,
    PenstockError,
    SchemaMismatchError,
    StoreNotFoundError,
    TableRefusedError,
)
from penstock.reconciliation.reconcile import reconcile
from tests.support.postgres_source import Source
from tests.support.reconciled import CopiedTable, copied_table


def refused(made: CopiedTable, kind: type[PenstockError], **options: Any) -> PenstockError:
    with pytest.raises(kind) as error:
        made.compare(**options)
    password = urlsplit(made.source.url).password
    assert password
    assert password not in f"{error.value} {error.value!r} {error.value.parameters}"
    return error.value


def test_several_tables_are_refused(orders: CopiedTable) -> None:
    orders.source.table("id int PRIMARY KEY", "another")
    error = refused(orders, InvalidInputError, source=orders.source.feed())
    assert error.condition == "INVALID_INPUT.SEVERAL_TABLES"


def test_a_table_that_is_not_published_is_refused(orders: CopiedTable) -> None:
    error = refused(orders, FeedUnavailableError, source=orders.source.feed(tables=["nothing"]))
    assert error.condition == "FEED_UNAVAILABLE.TABLE_NOT_PUBLISHED"


def test_a_table_without_a_key_is_refused(orders: CopiedTable) -> None:
    name = orders.source.table(
        "id int, v text", "keyless", f"ALTER TABLE {orders.source.name}.keyless REPLICA IDENTITY FULL"
    )
    error = refused(orders, TableRefusedError, source=orders.source.feed(tables=[name]))
    assert error.condition == "TABLE_REFUSED.NO_KEY"


def test_a_key_of_floats_is_refused_unless_it_is_read_as_text(source: Source, tmp_path: Path) -> None:
    table = source.table(
        "id float8 PRIMARY KEY, v int", "floats", f"INSERT INTO {source.name}.floats VALUES (0.5, 1)"
    )
    with copied_table(source, table, "sqlite", tmp_path) as made:
        assert refused(made, TableRefusedError).condition == "TABLE_REFUSED.INEXACT_KEY"


def test_an_infinite_key_is_refused(source: Source, kind: str, tmp_path: Path) -> None:
    table = source.table("day date PRIMARY KEY, v int", "days")
    with copied_table(source, table, kind, tmp_path) as made:
        source.run(f"INSERT INTO {table} VALUES ('infinity', 1), ('2026-01-01', 1)")
        assert refused(made, TableRefusedError).condition == "TABLE_REFUSED.INFINITE_KEY"


def test_a_value_that_its_type_cannot_hold_is_refused_or_null(
    source: Source, kind: str, tmp_path: Path
) -> None:
    table = source.table(
        "id int PRIMARY KEY, v numeric(10, 2)", "numbers", f"INSERT INTO {source.name}.numbers VALUES (1, 1)"
    )
    with copied_table(source, table, kind, tmp_path) as made:
        source.run(f"INSERT INTO {table} VALUES (2, 'NaN')")
        assert refused(made, FeedUnavailableError).condition == "FEED_UNAVAILABLE.VALUE"
        made.insert([{"id": 2, "v": None}])
        assert made.compare(source=source.feed(tables=[table], invalid_values="null")).equal


def test_a_copy_without_a_column_is_refused_unless_others_are_named(orders: CopiedTable) -> None:
    orders.source.run(f"ALTER TABLE {orders.table} ADD more text DEFAULT 'x'")
    error = refused(orders, SchemaMismatchError)
    assert error.condition == "SCHEMA_MISMATCH.COPY_LACKS_COLUMNS"
    assert error.parameters["columns"] == ["more"]
    orders.update("price", "NULL", "id = 3")
    assert orders.compare(columns=["item"]).equal
    assert orders.compare(columns=["item", "price"]).different == 1
    assert refused(orders, InvalidInputError, columns=["itme"]).condition == "INVALID_INPUT.UNKNOWN_COLUMN"


def test_a_copy_that_is_not_there_is_refused(orders: CopiedTable) -> None:
    missing = CopiedTable(orders.source, orders.table, orders.url, "missing")
    assert refused(missing, TableRefusedError).condition == "TABLE_REFUSED.NOT_FOUND"


@pytest.mark.parametrize("kind", ["sqlite"])
def test_a_store_that_is_not_there_is_refused(orders: CopiedTable, tmp_path: Path) -> None:
    missing = CopiedTable(orders.source, orders.table, f"sqlite:///{tmp_path}/nothing.db", "copy")
    refused(missing, StoreNotFoundError)
    assert not (tmp_path / "nothing.db").exists()


@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_a_copy_without_an_index_on_the_key_is_refused(orders: CopiedTable) -> None:
    orders.run(
        "ALTER TABLE COPY RENAME TO indexed",
        f"CREATE TABLE COPY AS SELECT * FROM {orders.sql.replace('copy', 'indexed')}",
    )
    assert refused(orders, TableRefusedError, repair=True).condition == "TABLE_REFUSED.NO_UNIQUE_INDEX"


@pytest.mark.parametrize("kind", ["delta"])
def test_a_row_without_a_key_and_a_row_that_is_there_twice(orders: CopiedTable) -> None:
    orders.insert([{"id": 7, "item": "item 0", "price": None}])
    orders.insert([{"id": 8, "item": "item 1", "price": Decimal("2.00")}])
    found = orders.compare()
    assert {(row.key["id"], row.kind) for row in found.differing_rows} == {(7, "different"), (8, "different")}
    orders.delete("id IN (7, 8)")
    orders.compare(repair=True)
    assert orders.compare().equal
    orders.update("id", "NULL", "id = 9")
    assert refused(orders, TableRefusedError).condition == "TABLE_REFUSED.KEY_NOT_COMPARABLE"


def test_wrong_arguments_are_refused(orders: CopiedTable) -> None:
    error = refused(orders, InvalidInputError, columns=["item"], repair=True)
    assert error.condition == "INVALID_OPTION.CONFLICT"
    for options in (
        {"range_rows": 0},
        {"settle": -1.0},
        {"timeout": "x"},
        {"most_rows": -1},
        {"columns": [1]},
    ):
        refused(orders, InvalidInputError, **options)
    with pytest.raises(InvalidInputError):
        reconcile(orders.feed, "copy")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError) as error:
        reconcile(orders.feed, penstock.TableSink("copy"))
    assert error.value.condition == "INVALID_OPTION.MISSING"


def test_a_wrong_password_is_not_shown(orders: CopiedTable) -> None:
    url = orders.feed.url.replace(str(urlsplit(orders.source.url).password), "s3cret-word")
    with pytest.raises(FeedUnavailableError) as error:
        orders.compare(source=penstock.PostgresFeed(url))
    assert error.value.condition == "FEED_UNAVAILABLE.LOGIN"
    assert "s3cret-word" not in f"{error.value} {error.value!r}"


def test_the_log_has_no_password(orders: CopiedTable, caplog: pytest.LogCaptureFixture) -> None:
    orders.delete("id = 7")
    with caplog.at_level(logging.DEBUG, logger="penstock"):
        orders.compare(repair=True)
    actions = {getattr(record, "action", None) for record in caplog.records}
    assert {"rows_read_again", "rows_repaired"} <= actions
    assert str(urlsplit(orders.source.url).password) not in caplog.text
