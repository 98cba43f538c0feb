"""PostgreSQL runs functions in indexes, statistics and partition keys while it plans a query, with the rights
of whoever queries: the initial copy runs none of a role that the feed's role does not trust.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.errors import FeedUnavailableError
from penstock.feeds.postgres import snapshot
from tests.support.postgres_source import Source, everything, source_at
from tests.support.strangers import SharedDatabase, shared_database

TABLE = "create table theirs.t (id int primary key, n int)"
PARTITIONED = (
    "create table theirs.t (id int primary key, n int) partition by range (id)",
    "create table theirs.t_low partition of theirs.t for values from (minvalue) to (10)",
    "create table theirs.t_high partition of theirs.t for values from (10) to (maxvalue)",
)
EXPRESSION_KEY = (
    "create table theirs.t (id int not null, n int) partition by range ((id + theirs.spy(1)))",
    "create table theirs.t_all partition of theirs.t default",
    "alter table theirs.t replica identity full",
    "alter table theirs.t_all replica identity full",
)
LEVELS = (
    "create table theirs.top (id int not null, n int) partition by range ((id + theirs.spy(1)))",
    "create table theirs.t partition of theirs.top for values from (0) to (100) partition by list (n)",
    "create table theirs.t_all partition of theirs.t default",
    "alter table theirs.t replica identity full",
    "alter table theirs.t_all replica identity full",
)
OPERATOR = "create operator theirs.<<<< (leftarg = int, rightarg = int, function = theirs.spy)"
INDEX = "create index t_n on theirs.t (n) where theirs.spy(1) = 1"


@dataclass
class Spied:
    """A database in which a stranger owns the schema ``theirs``, with functions that note who runs them."""

    shared: SharedDatabase
    source: Source

    def stranger_runs(self, *statements: str) -> None:
        self.shared.run(*statements, role="stranger")

    def publish(self, table: str = "theirs.t") -> None:
        self.source.run(
            f"insert into {table} values (1, 1)", f"alter publication {self.source.name} add table {table}"
        )
        self.source.run(f"alter publication {self.source.name} set (publish_via_partition_root)")
        # The administrator's insert has run what the stranger attached.
        self.source.run("select setval('public.spied', 1, false)")

    def spied(self) -> bool:
        """Whether a function of the stranger ran as another role; a sequence keeps that after a rollback."""
        return bool(self.shared.run("select is_called from public.spied")[0][0])

    @contextmanager
    def refused(self, uses: str) -> Iterator[None]:
        with pytest.raises(FeedUnavailableError) as caught:
            yield
        assert caught.value.condition == "FEED_UNAVAILABLE.FUNCTION_OWNER"
        stranger = self.shared.role("stranger")
        assert f"{uses} of the role '{stranger}'" in caught.value.message
        assert f"trusted_owners=['{stranger}']" in caught.value.message
        assert not self.spied()


@pytest.fixture
def spied(pg_url: str) -> Iterator[Spied]:
    with shared_database(pg_url, "stranger") as shared, source_at(shared.url) as source:
        shared.run("create sequence public.spied", "grant all on sequence public.spied to public")
        shared.run("create schema theirs", role="stranger")
        for arguments in ("int", "int, int"):
            body = "if current_user <> '{}' then perform nextval('public.spied'); end if; return 1;"
            shared.run(
                f"create function theirs.spy({arguments}) returns int language plpgsql immutable as "
                f"$$ begin {body.format(shared.role('stranger'))} end $$",
                role="stranger",
            )
        yield Spied(shared, source)


ATTACHED = {
    "index predicate": ((TABLE, INDEX), "the index theirs.t_n uses the function theirs.spy(integer)"),
    "index expression": (
        (TABLE, "create index t_n on theirs.t ((n + theirs.spy(1)))"),
        "the index theirs.t_n uses the function theirs.spy(integer)",
    ),
    "constraint": (
        (TABLE, "alter table theirs.t add constraint t_n exclude (n with =) where (theirs.spy(1) = 1)"),
        "the index theirs.t_n uses the function theirs.spy(integer)",
    ),
    "statistics": (
        (TABLE, "create statistics theirs.s on (n + theirs.spy(1)) from theirs.t"),
        "the statistics object theirs.s uses the function theirs.spy(integer)",
    ),
    "partition's index": (
        (*PARTITIONED, "create index t_n on theirs.t_high (n) where theirs.spy(1) = 1"),
        "the index theirs.t_n uses the function theirs.spy(integer)",
    ),
    "partition key": (EXPRESSION_KEY, "the table theirs.t uses the function theirs.spy(integer)"),
    "partition key above": (LEVELS, "the table theirs.top uses the function theirs.spy(integer)"),
    "operator": (
        (TABLE, OPERATOR, "create index t_n on theirs.t (n) where (1 operator(theirs.<<<<) 1) = 1"),
        "the index theirs.t_n uses the function theirs.spy(integer,integer)",
    ),
    "operator of a built-in function": (
        (
            TABLE,
            "create operator theirs.<<<< (leftarg = int, rightarg = int, function = int4lt)",
            "create index t_n on theirs.t (n) where 1 operator(theirs.<<<<) 2",
        ),
        "the index theirs.t_n uses the operator theirs.<<<<(integer,integer)",
    ),
    "domain": (
        (
            TABLE,
            "create domain theirs.d as int check (theirs.spy(value) > 0)",
            "create index t_n on theirs.t (n) where 1::theirs.d = 1",
        ),
        "the index theirs.t_n uses the type theirs.d",
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("attached", ATTACHED)
def test_what_a_stranger_has_attached_to_a_table_is_not_run_and_is_named(spied: Spied, attached: str) -> None:
    statements, uses = ATTACHED[attached]
    spied.stranger_runs(*statements)
    spied.publish()
    with spied.refused(uses):
        spied.source.open(snapshot="initial").prepare()
    assert spied.source.slots() == 0
    ours = spied.source.table("id int primary key, n int")
    spied.source.run(f"insert into {ours} values (2, 2)")
    assert [row["id"] for row in everything(spied.source.open(snapshot="initial", tables=[ours]))] == [2]
    assert not spied.spied()


def test_an_index_that_is_added_while_tables_are_copied_is_not_run(
    spied: Spied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog in the copy's transaction does not have it yet, and planning uses it already."""

    class Overtaken(snapshot.Session):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            spied.stranger_runs(INDEX)

    monkeypatch.setattr(snapshot, "Session", Overtaken)
    spied.stranger_runs(TABLE)
    spied.publish()
    with spied.refused("the index theirs.t_n uses the function theirs.spy(integer)"):
        spied.source.open(snapshot="initial").prepare()


def test_a_function_of_a_role_that_the_user_trusts_may_run(spied: Spied) -> None:
    spied.stranger_runs(TABLE, INDEX)
    spied.publish()
    owners = ["another", spied.shared.role("stranger")]
    with spied.refused("theirs.spy(integer)"):
        spied.source.open(snapshot="initial", trusted_owners=owners[:1]).prepare()
    feed = spied.source.open(snapshot="initial", trusted_owners=owners)
    assert [row["id"] for row in everything(feed)] == [1]
    # The function does run, so that the other tests would notice it.
    assert spied.spied()


def test_functions_of_a_superuser_and_enums_may_be_used_in_indexes(spied: Spied) -> None:
    spied.source.run(
        "create function public.double(int) returns int language sql immutable as 'select 2 * $1'",
        "create operator public.@@@@ (rightarg = int, function = public.double)",
    )
    spied.stranger_runs(
        TABLE,
        "create type theirs.state as enum ('open', 'held', 'done')",
        "alter table theirs.t add state theirs.state default 'open'",
        "create index on theirs.t (public.double(n)) where (operator(public.@@@@) 2) = 4",
        "create index on theirs.t (lower(n::text)) where state in ('open', 'held') or state = 'done'",
    )
    spied.publish()
    assert [row["id"] for row in everything(spied.source.open(snapshot="initial"))] == [1]


def test_checks_of_partitions_are_not_run(spied: Spied) -> None:
    spied.stranger_runs(*PARTITIONED, "alter table theirs.t_low add check (n <> theirs.spy(1) + 1)")
    spied.publish()
    name = spied.source.name
    spied.source.run(f"alter publication {name} set table theirs.t where (id > 0)")
    spied.shared.run(f"alter database {spied.shared.name} set constraint_exclusion = on")
    assert [row["id"] for row in everything(spied.source.open(snapshot="initial"))] == [1]
    assert not spied.spied()
