"""A comparison runs no code of roles that the user does not trust, on either side."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import FeedUnavailableError, StoreUnsafeError
from tests.support.postgres_source import source_at
from tests.support.reconciled import CopiedTable, copied_table
from tests.support.strangers import shared_database

SPY = (
    "create function theirs.spy(int) returns int language plpgsql immutable as $$ begin "
    "if current_user not like '%stranger%' then raise exception 'spied'; end if; return 1; end $$"
)
INDEX = "create index t_n on theirs.t (n) where theirs.spy(1) = 1"


def test_an_index_with_a_strangers_function_is_refused_also_if_it_is_added_later(
    logical_pg_url: str, tmp_path: Path
) -> None:
    with shared_database(logical_pg_url, "stranger") as shared, source_at(shared.url) as source:
        shared.run(
            "create schema theirs", SPY, "create table theirs.t (id int primary key, n int)", role="stranger"
        )
        source.run(
            "insert into theirs.t select n, n from generate_series(1, 500) as n",
            f"alter publication {source.name} add table theirs.t",
        )
        with copied_table(source, "theirs.t", "sqlite", tmp_path) as made:
            assert made.compare(range_rows=50).equal
            made.delete("id = 7")
            shared.run(INDEX, role="stranger")
            with pytest.raises(FeedUnavailableError) as refused:
                made.compare(range_rows=50)
            assert refused.value.condition == "FEED_UNAVAILABLE.FUNCTION_OWNER"
            shared.run("drop index theirs.t_n", role="stranger")
            assert _found_to_refuse(made, lambda: shared.run(INDEX, role="stranger"))


def _found_to_refuse(made: CopiedTable, attach: object) -> bool:
    from penstock.reconciliation.source import SourceTable

    original = SourceTable.pages

    def pages(self: SourceTable, rows: int):  # type: ignore[no-untyped-def]
        for number, page in enumerate(original(self, rows)):
            yield page
            if number == 0:
                attach()  # type: ignore[operator]

    SourceTable.pages = pages  # type: ignore[method-assign]
    try:
        with pytest.raises(FeedUnavailableError) as refused:
            made.compare(range_rows=50)
    finally:
        SourceTable.pages = original  # type: ignore[method-assign]
    return refused.value.condition == "FEED_UNAVAILABLE.FUNCTION_OWNER"


def test_a_view_in_the_place_of_the_table_is_not_read(logical_pg_url: str, tmp_path: Path) -> None:
    from penstock.reconciliation.source import SourceTable

    with source_at(logical_pg_url) as source:
        table = source.table("id int PRIMARY KEY, n int", "t", f"INSERT INTO {source.name}.t VALUES (1, 1)")
        opened = SourceTable(source.feed(tables=[table]), None)
        assert opened.rows(None, None).num_rows == 1
        source.run(f"DROP TABLE {table}", f"CREATE VIEW {table} AS SELECT 1 AS id, 1 AS n")
        with pytest.raises(FeedUnavailableError) as refused:
            opened.rows(None, None)
        assert refused.value.condition == "FEED_UNAVAILABLE.TABLE_RECREATED"
        opened.close()
        source.run(f"DROP VIEW {table}")


def test_a_copy_of_a_stranger_is_refused(logical_pg_url: str, tmp_path: Path) -> None:
    with shared_database(logical_pg_url, "stranger") as shared, source_at(shared.url) as source:
        table = source.table("id int PRIMARY KEY, n int", "t")
        with copied_table(source, table, "postgresql", tmp_path) as made:
            assert made.compare().equal
            stranger = shared.role("stranger")
            source.run(f'ALTER TABLE {made.sql} OWNER TO "{stranger}"')
            with pytest.raises(StoreUnsafeError) as refused:
                made.compare()
            assert refused.value.condition == "STORE_UNSAFE.TABLE_OWNER"
