"""The loader of the named SQL statements."""

from __future__ import annotations

import re

import pytest

from penstock.store.statements import bind, parse, qualify, read_resource, statements


def test_a_file_is_split_by_statement_name_and_comments_are_removed() -> None:
    text = (
        "-- about it all\n\n-- why\n-- name: one\nselect 1;\n\n-- name: two\n-- why not\nselect 2\nfrom x;\n"
    )
    assert parse(text) == {"one": "select 1", "two": "select 2\nfrom x"}


def test_parameters_are_converted_to_the_drivers_form_and_casts_are_kept() -> None:
    assert bind("a = :a and b::bigint = 5 % 2", "postgres") == "a = %(a)s and b::bigint = 5 %% 2"
    assert bind("a = :a", "sqlite") == "a = :a"


@pytest.mark.parametrize("schema", ['"a""b"', '"it\'s"', '"penstock.x"', '"%s :x"'])
def test_any_schema_name_can_replace_penstock(schema: str) -> None:
    quoted = schema.replace("'", "''")
    text = "select nextval('penstock.s') from penstock.queue"
    assert qualify(text, "postgres", schema) == f"select nextval('{quoted}.s') from {schema}.queue"


def test_the_tables_of_a_sqlite_store_have_a_prefix_next_to_other_tables() -> None:
    text = "select * from penstock.queue join penstock.sqlite_schema"
    assert qualify(text, "sqlite", '"x"') == 'select * from "x".penstock_queue join "x".sqlite_schema'


def test_both_databases_have_the_same_statements_except_the_known_ones() -> None:
    ours, theirs = (set(statements(dialect, "s")) for dialect in ("sqlite", "postgres"))
    assert ours - theirs == {"advance_partition"}
    assert theirs - ours == {
        "allocate_block_all",
        "append_segment",
        "advance_mark_all",
        "advance_position_all",
        "delete_payload_all",
        "delete_segment_all",
        "insert_mark_all",
        "insert_partition_all",
        "insert_object_all",
        "insert_payload_all",
        "insert_staged_object_all",
        "insert_position_all",
        "insert_feed_commit_all",
        "lock_holders",
        "publish_segments",
        "raise_safe_all",
        "set_position_all",
        "advisory_holders",
        "foreign_owner",
        "clock",
        "may_identify_system",
        "identify_system",
        "identify_table",
        "schema_exists",
        "list_relations",
        "watch_channel",
        "hold_watch",
        "newest_transaction",
        "oldest_transaction",
    }


@pytest.mark.parametrize("dialect", ["sqlite", "postgres"])
def test_statement_names_are_unique_in_a_file(dialect: str) -> None:
    for file in ("common.sql", f"{dialect}.sql"):
        names = re.findall(r"^-- name: (\w+)$", read_resource("sql", file), re.MULTILINE)
        assert sorted(names) == sorted(set(names))
