"""The state of a publication as one snapshot of the catalog shows it."""

from __future__ import annotations

import pytest

from penstock.feeds.postgres.publication import PublicationState, state_of
from penstock.feeds.postgres.server import Session
from tests.support.postgres_source import Source

CHANGES = {
    "a table is added": "ALTER PUBLICATION {name} ADD TABLE {name}.other",
    "its schema is added": "ALTER PUBLICATION {name} ADD TABLES IN SCHEMA {name}",
    "it becomes a partition": (
        "ALTER TABLE {name}.root ATTACH PARTITION {name}.other FOR VALUES FROM (0) TO (9)"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_joins_while_the_state_is_read_is_not_part_of_it_yet(
    source: Source, change: str
) -> None:
    name = source.name
    source.run(
        f"CREATE TABLE {name}.other (id int primary key)",
        f"CREATE TABLE {name}.root (id int primary key) PARTITION BY RANGE (id)",
        f"CREATE TABLE {name}.leaf PARTITION OF {name}.root FOR VALUES FROM (10) TO (20)",
        f"ALTER PUBLICATION {name} ADD TABLE {name}.root",
    )
    feed = source.open()

    def state(session: Session) -> PublicationState:
        return state_of(session, name, feed.known_tables())

    connection = feed.server.connect()
    with connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        session = Session(feed.server, connection)
        before = state(session)
        # Functions of the server see the latest catalog, whatever the transaction's snapshot shows.
        source.run(CHANGES[change].format(name=name))
        assert state(session).definitions() == before.definitions()
    assert before.tables.keys() == {f"{name}.leaf"}
    now = state_of(feed.server, name, feed.known_tables())
    assert f"{name}.other" in now.tables
