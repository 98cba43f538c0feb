"""Random histories of tables that change while a stream reads them: rows, definitions, publications,
partitions, restarts, kills.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

import psycopg
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from penstock.feeds.postgres.server import Server, statements
from tests.feeds.postgres.changing_tables import (
    DEFINITIONS,
    KINDS,
    ROWS,
)
from tests.feeds.postgres.history import READS, History
from tests.feeds.postgres.pump_histories import play_pumps
from tests.support.postgres_source import Source, source_at
from tests.support.quiet_logs import only

Step = tuple[str, int]
_SHOWN_EACH = 50


def play(source: Source, kind: str, steps: Sequence[Step]) -> History:
    """Play a history to its end."""
    source.connection.prepare_threshold = None
    history = History(source, kind)
    history.make()
    history.note()
    try:
        history.start()
        for what, seed in steps:
            chance = Random(seed)
            if what in READS:
                history.read(what)
            elif what in DEFINITIONS:
                history.define(what, chance)
            else:
                history.rows(what, chance)
        history.end()
    except Exception as error:
        error.add_note("\n".join([kind, repr(list(steps)), *history.log[-60:]]))
        raise
    finally:
        history.resolve("ROLLBACK")
        history.stream.end()
    return history


@st.composite
def histories(
    draw: st.DrawFn, definitions: Sequence[str] = DEFINITIONS, kinds: Sequence[str] = KINDS
) -> tuple[str, list[Step]]:
    """What happens to the tables of one kind, and to the stream that reads them."""
    pool = st.sampled_from([ROWS] * 5 + [tuple(definitions)] * 3 + [READS] * 3)
    step = st.tuples(pool.flatmap(st.sampled_from), st.integers(0, (1 << 16) - 1))
    count = draw(st.integers(5, 30))
    return draw(st.sampled_from(kinds)), draw(st.lists(step, min_size=count, max_size=count))


@contextmanager
def kept_connections() -> Iterator[None]:
    """Give connections that were closed to the next reader: most of the time of a history would go into new
    ones."""
    idle: list[psycopg.Connection] = []
    connect = Server.connect

    def reuse(server: Server, **options: object) -> psycopg.Connection:
        if options:
            return connect(server, **options)
        connection = idle.pop() if idle else connect(server)
        close = type(connection).close

        def give_back() -> None:
            try:
                connection.rollback()
                connection.autocommit = True
                connection.execute("DISCARD ALL")
                connection.execute(statements()["settings"].replace("%%", "%").encode())
            except psycopg.Error:
                close(connection)
            else:
                idle.append(connection)

        connection.close = give_back  # type: ignore[method-assign] # of this one
        return connection

    with patch.object(Server, "connect", reuse):
        yield
    for connection in idle:
        type(connection).close(connection)


def play_on(url: str, history: tuple[str, list[Step]]) -> list[str]:
    """Play a history in a schema of its own: by what the stream was ended."""
    with source_at(url) as source:
        return play(source, *history).stops


def play_many(
    url: str,
    most: int,
    definitions: Sequence[str] = DEFINITIONS,
    kinds: Sequence[str] = KINDS,
    *,
    first: int | None = None,
    shrink: bool = True,
    played: Callable[[list[str]], None] = lambda stops: None,
) -> None:
    """Play so many histories, and raise the error of the first that fails.

    Parameters
    ----------
    first
        A seed, for the same histories as before.
    shrink
        Whether that history is made as short as it can be.
    """

    @settings(
        max_examples=most,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
    )
    @given(histories(definitions, kinds))
    def plays(history: tuple[str, list[Step]]) -> None:
        played(play_on(url, history))

    with kept_connections(), only(logging.ERROR, "penstock.feeds"):
        (plays if first is None else seed(first)(plays))()


def main(words: Sequence[str]) -> int:
    """Play histories: ``--histories N``, ``--first SEED``, ``--only add,rename`` for some changes of
    definitions, ``--kinds leaves,filtered`` for some kinds of tables; those of a pump with ``--pump``."""
    from tests.support.postgres import start_postgres

    plays = play_pumps if "--pump" in words else play_many
    words = [word for word in words if word != "--pump"]
    given_words = dict(zip(words[::2], words[1::2], strict=True))
    most, first = int(given_words.get("--histories", "1000")), int(given_words.get("--first", "0"))
    definitions = given_words.get("--only", ",".join(DEFINITIONS)).split(",")
    kinds = given_words.get("--kinds", ",".join(KINDS)).split(",")
    counted, began = Counter[str](), time.monotonic()
    histories_played = 0

    def played(stops: list[str]) -> None:
        nonlocal histories_played
        counted.update(stops)
        histories_played += 1
        if histories_played % _SHOWN_EACH == 0:
            told = f"{histories_played} histories in {time.monotonic() - began:.0f} s"
            print(f"{told}; ended by {dict(sorted(counted.items()))}", flush=True)

    server = start_postgres()
    try:
        plays(server.url, most, definitions, kinds, first=first, played=played)
    except BaseException:
        print(f"a history failed, the first time after {histories_played} that did not", flush=True)
        raise
    finally:
        server.stop()
        print(f"{histories_played} histories; ended by {dict(sorted(counted.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
