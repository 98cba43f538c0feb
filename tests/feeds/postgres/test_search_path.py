"""Functions, operators and tables that a stranger creates in a shared schema are never used by a feed, even
where the role's search path has that schema first.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.feeds.postgres.stops import keys, started
from tests.support.planted import plant
from tests.support.postgres_source import Source, source_at

TRAPS = """
    create table public.pg_settings (name text, setting text);
    create table public.pg_publication (oid oid, pubname name);
    create function public.trap(text, text) returns boolean language plpgsql as
        $$ begin raise exception 'the planted operator = was called'; end $$;
    create operator public.= (leftarg = text, rightarg = text, function = public.trap);
"""


@pytest.fixture
def planted(logical_pg_url: str) -> Iterator[Source]:
    name = f"planted_{uuid.uuid4().hex[:8]}"
    url = urlsplit(logical_pg_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(logical_pg_url, autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
        try:
            plant(url, "public")
            with psycopg.connect(url, autocommit=True) as own:
                own.execute(TRAPS.encode())
            connection.execute(f"alter database {name} set search_path = public, pg_catalog".encode())
            with source_at(f"{url}?options=-csearch_path%3Dpg_catalog") as source:
                yield replace(source, url=url)
        finally:
            connection.execute(f"drop database {name} with (force)".encode())


def test_a_feed_uses_nothing_that_was_planted_first_on_its_search_path(planted: Source) -> None:
    table = planted.table("id int primary key, v text")
    with (
        psycopg.connect(planted.url) as connection,
        pytest.raises(psycopg.errors.RaiseException, match="the planted operator"),
    ):
        connection.execute("select 'a'::text = 'b'::text")
    planted.run(f"INSERT INTO {table} VALUES (1, 'a')")
    stream = started(planted)
    planted.run(f"UPDATE {table} SET v = 'b'")
    stream.drain()
    assert keys(stream.rows, "id", "v") == [("insert", 1, "a"), ("update_postimage", 1, "b")]
