"""Tables that are published while a pump runs, with changes that are aimed at what is backfilled."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.feeds.postgres.mended_tables import MendedTables
from tests.feeds.postgres.pump_control import PumpControl

FORMS = (
    "id int not null, code int not null, v int, w text, PRIMARY KEY (id)",
    "id text not null, code int not null, v int, w text, PRIMARY KEY (id)",
    "id uuid not null, code bigint not null, v int, w text, PRIMARY KEY (code, id)",
    "id {schema}.size not null, code text not null, v int, w text, PRIMARY KEY (id, code)",
    "id numeric not null, code varchar(20) not null, v int, w text, PRIMARY KEY (id)",
    "id timestamp not null, code smallint not null, v int, w text, PRIMARY KEY (code)",
)
"""Tables with keys of several types."""
OTHERS = ("u", "a", "b", "c", "d")


@dataclass
class AimedTables(MendedTables):
    """The tables of one history, and which of them most changes are of."""

    control: PumpControl = field(default_factory=PumpControl)
    aim: str | None = None
    """The table that most changes are of."""
    changes: set[str] = field(default_factory=set)
    """The changes of definitions since the queues were created."""

    def create_table(self, chance: Random, *, is_published: bool = False) -> str | None:
        """Create a table with rows; return its name."""
        free = [name for name in self.others if not self.columns(f"{self.source.name}.{name}")]
        if not free:
            return None
        table = f"{self.source.name}.{chance.choice(free)}"
        create = f"CREATE TABLE {table} ({chance.choice(FORMS).replace('{schema}', self.source.name)})"
        publish = f"ALTER PUBLICATION {self.source.name} ADD TABLE {table}"
        if not self.run(create, *([publish] if is_published else [])):
            return None
        columns = self.columns(table)
        rows = [self._row(columns, chance) for _ in range(chance.randint(0, 40))]
        if rows:
            values = ", ".join(f"({row})" for row in rows)
            self.run(f"INSERT INTO {table} ({', '.join(columns)}) VALUES {values} ON CONFLICT DO NOTHING")
        return table

    def publish(self, table: str) -> None:
        self.run(f"ALTER PUBLICATION {self.source.name} ADD TABLE {table}")
        self.changes.add("add_table")

    def change_of_most_rows(self, table: str, chance: Random) -> str:
        first = next(iter(self.columns(table)))
        most = f"WHERE {first} > (SELECT {first} FROM {table} LIMIT 1)"
        return chance.choice((f"UPDATE {table} SET v = -1 {most}", f"DELETE FROM {table} {most}"))

    def any_table(self, chance: Random) -> str:
        if self.aim is not None and chance.random() < 0.8 and self.columns(self.aim):
            return self.aim
        return super().any_table(chance)

    def some_rows(self, table: str, first: str, most: int, chance: Random) -> str:
        """A condition for some rows, in many cases for those of a chunk that is held up."""
        chunk = self.control.chunk
        if chunk is None or table != chunk.table.name or not chunk.count or chance.random() < 0.4:
            return super().some_rows(table, first, most, chance)
        if first not in chunk.table.key:
            return super().some_rows(table, first, most, chance)
        keys = chunk.keys[chunk.table.key.index(first)].slice(0, chunk.count).to_pylist()
        chosen = ", ".join(f"'{chance.choice(keys)}'" for _ in range(chance.randint(1, most)))
        return f"{first}::text IN ({chosen})"

    def _row(self, columns: dict[str, str], chance: Random) -> str:
        values = [self.value(kind) for kind in columns.values()]
        return ", ".join([*values[:-1], self.long_text()] if chance.random() < 0.3 else values)
