"""A table that is added to a publication while several sessions change it, and whether a queue equals it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg

from penstock.errors import (
    QueueNotFoundError,
    StoreNotFoundError,
)
from tests.support.postgres_source import Row, Source, apply
from tests.support.pumped import change_rows, sort_by_commit
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Kind:
    """A table, and how random changes of it are made."""

    columns: str
    key: tuple[str, ...]
    names: tuple[str, ...]
    value: str
    """The key of the number n, as SQL."""
    full: bool = False
    """Whether its replica identity is full."""


KINDS = {
    "number": Kind("id int PRIMARY KEY, v int, big text", ("id",), ("id", "v", "big"), "{n}"),
    "text": Kind(
        "id text PRIMARY KEY, v int, big text",
        ("id",),
        ("id", "v", "big"),
        "(ARRAY['a', 'B', 'ä', 'Z', 'ß'])[{n} % 5 + 1] || '%s'' ' || {n}",
    ),
    "two columns": Kind(
        "id uuid, part numeric, v int, big text, PRIMARY KEY (part, id)",
        ("id", "part"),
        ("id", "part", "v", "big"),
        "md5(({n} / 3)::text)::uuid, {n} % 3 + 0.5",
    ),
    # The order of an enum is not that of its text.
    "enum": Kind(
        "size {schema}.size, id int, v int, big text, PRIMARY KEY (size, id)",
        ("size", "id"),
        ("size", "id", "v", "big"),
        "(ARRAY['small', 'large', 'huge'])[{n} % 3 + 1]::{schema}.size, {n}",
    ),
    "full": Kind("id int PRIMARY KEY, v int, big text", ("id",), ("id", "v", "big"), "{n}", full=True),
}


def change(connection: psycopg.Connection, source: Source, kind: Kind, chance: random.Random) -> None:
    """Commit, or roll back, a transaction of some changes."""
    name, key = f"{source.name}.added", ", ".join(kind.key)
    columns = ", ".join(f"{kind.key[place]}" for place in range(len(kind.key)))
    with connection.transaction(force_rollback=chance.random() < 0.1):
        for _ in range(chance.randint(1, 5)):
            n, m = chance.randint(1, 2100), chance.randint(1, 2100)
            mine, other = kind.value.format(n=n), kind.value.format(n=m)
            is_free = f"NOT EXISTS (SELECT FROM {name} WHERE ({key}) = ({other}))"
            statement = chance.choice(
                [
                    f"INSERT INTO {name} ({columns}, v) VALUES ({mine}, {m}) ON CONFLICT DO NOTHING",
                    f"UPDATE {name} SET v = v + 1 WHERE ({key}) = ({mine})",
                    f"UPDATE {name} SET big = repeat('y', 3000) WHERE ({key}) = ({mine})",
                    f"UPDATE {name} SET ({columns}) = ROW ({other}) WHERE ({key}) = ({mine}) AND {is_free}",
                    f"DELETE FROM {name} WHERE ({key}) = ({mine})",
                ]
            )
            connection.execute(statement.encode())


@contextmanager
def changing(source: Source, kind: Kind, writers: int = 3) -> Iterator[None]:
    """Change a table from several sessions meanwhile."""
    end = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with psycopg.connect(source.url, autocommit=True) as connection:
            while not end.is_set():
                with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
                    change(connection, source, kind, chance)
                # A pump that falls behind appends no chunks.
                time.sleep(0.003)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()


def source_rows(source: Source, kind: Kind) -> dict[object, Row]:
    rows = source.rows(f"SELECT {', '.join(kind.names)} FROM {source.name}.added")
    found = {}
    for row in rows:
        values = dict(zip(kind.names, row, strict=True))
        if "part" in values:
            values |= {"id": str(values["id"]), "part": str(values["part"])}
        found[tuple(values[name] for name in kind.key)] = values
    return found


def queue_rows(source: Source, store_url: str, kind: Kind) -> dict[object, Row]:
    """What the changes in the queue make, each of which has to fit the ones before it."""
    state: dict[object, Row] = {}
    apply(sort_by_commit(change_rows(store_url, f"{source.name}.added")), kind.key, kind.names, state)
    return state


def is_equal(source: Source, store_url: str, kind: Kind) -> bool:
    try:
        return queue_rows(source, store_url, kind) == source_rows(source, kind)
    except (StoreNotFoundError, QueueNotFoundError):
        return False


def await_rows(source: Source, store_url: str, kind: Kind, failures: Sequence[BaseException]) -> None:
    # Each look reads the whole queue.
    wait_until(
        lambda: failures or is_equal(source, store_url, kind), 60, "the queue to have all rows", interval=0.5
    )
    assert not failures
