"""Tables that change at random, and what an operator does so that they can be read again."""

from __future__ import annotations

from dataclasses import dataclass

from tests.feeds.postgres.changing_tables import ChangingTables


@dataclass
class MendedTables(ChangingTables):
    """The tables of one history, with what readers of them may need."""

    def touch(self) -> None:
        """Have the source log all rows as they are."""
        for table in self.tables():
            first = next(iter(self.columns(table)), None)
            if first is None or self.run(f"UPDATE {table} SET {first} = {first}"):
                continue
            if self.kind == "filtered":
                # PostgreSQL refuses updates while the filter's column is not part of the key.
                self.unlogged = len(self.moments)
                name = self.source.name
                self.run(f"ALTER PUBLICATION {name} DROP TABLE {table}")
                self.run(f"ALTER PUBLICATION {name} ADD TABLE {table}")

    def mend(self) -> None:
        """Give the source what a stream needs: a key, and its place in the publication."""
        self.resolve()
        name = self.source.name
        self.give_key()
        for table in self.tables():
            self.run(f"ALTER PUBLICATION {name} ADD TABLE {table}")
            self.run(f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT")
        self.run(f"ALTER TABLE {name}.t1 REPLICA IDENTITY DEFAULT")
        if self.kind == "leaves" and not self.held():
            self.run(f"CREATE TABLE {name}.t0_{len(self.log)} PARTITION OF {self.table} DEFAULT")
        self.publish_everything()

    def publish_everything(self) -> None:
        name = self.source.name
        everything = "pubinsert AND pubupdate AND pubdelete AND pubtruncate"
        if self.source.rows(f"SELECT 1 FROM pg_publication WHERE pubname = '{name}' AND NOT ({everything})"):
            self.run(f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')")

    def clear_nan(self) -> None:
        """Replace values that a reader's types cannot hold."""
        for table in self.tables():
            for column, kind in self.columns(table).items():
                if kind.startswith("numeric("):
                    self.run(f"UPDATE {table} SET {column} = NULL WHERE {column} = 'NaN'")
