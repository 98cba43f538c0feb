"""Random histories of tables that change while pumps bring their changes into queues: rows, definitions,
tables that are added, restarts, deaths, takeovers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from random import Random

from penstock.testing import temporary_store_url
from tests.feeds.postgres.aimed_tables import FORMS, OTHERS
from tests.feeds.postgres.backfill_actions import BACKFILL_ACTIONS
from tests.feeds.postgres.changing_tables import DEFINITIONS, KINDS, LARGE_ROWS, ROWS
from tests.feeds.postgres.pump_history import (
    NEW_TABLES,
    POLICIES,
    PUMP_ACTIONS,
    PumpHistory,
)
from tests.support.postgres_source import Source, source_at
from tests.support.quiet_logs import only

Step = tuple[str, int]
_MOST_STEPS = 30
_HARMLESS = ("add", "add_default")
"""Half of the histories have only changes that end no pump, and come further."""


def play(source: Source, store_url: str, kind: str, steps: Sequence[Step], chance: Random) -> PumpHistory:
    """Play a history to its end."""
    source.connection.prepare_threshold = None
    source.run(f"CREATE TYPE {source.name}.size AS ENUM ('small', 'large', 'huge')")
    form = chance.choice(FORMS) if kind in ("one", "chosen", "several", "schema") else FORMS[0]
    history = PumpHistory(
        source,
        kind,
        form=form.replace("{schema}", source.name),
        others=OTHERS,
        store_url=store_url,
        policy=chance.choice(POLICIES),
        partitions=chance.choice((1, 1, 3)),
    )
    try:
        with history.control.applied(confirms_seldom=chance.random() < 0.4):
            _play(history, steps)
    except BaseException as error:
        error.add_note("\n".join([kind, history.policy, repr(steps), *history.log[-80:]]))
        raise
    finally:
        history.resolve("ROLLBACK")
    return history


def _play(history: PumpHistory, steps: Sequence[Step]) -> None:
    history.make()
    history.note()
    try:
        history.begin()
        for what, number in steps:
            chance = Random(number)
            if what in (*PUMP_ACTIONS, *BACKFILL_ACTIONS, "change_unseen"):
                history.act(what, chance)
            elif what in DEFINITIONS or what in NEW_TABLES:
                history.define(what, chance)
            else:
                history.rows(what, chance)
        history.end()
    finally:
        history.control.resume()
        history.control.release()
        if history.running is not None:
            history.running.stop()


def steps_of(chance: Random, definitions: Sequence[str], most: int = _MOST_STEPS) -> list[Step]:
    """What happens to the tables, and to the pumps that read them."""
    definitions = chance.choice((definitions, _HARMLESS))
    pools = [ROWS] * 3 + [LARGE_ROWS] + [tuple(definitions)] * 3 + [NEW_TABLES] + [PUMP_ACTIONS] * 4
    pools += [tuple(BACKFILL_ACTIONS)] * 3 + [("change_unseen",)] * (definitions != _HARMLESS)
    count = chance.randint(5, most)
    return [(chance.choice(chance.choice(pools)), chance.getrandbits(16)) for _ in range(count)]


def play_on(
    url: str, number: int, definitions: Sequence[str], kinds: Sequence[str], longest: int = _MOST_STEPS
) -> list[str]:
    """Play the history of a number in a schema and a store of its own: by what its pumps were ended."""
    chance = Random(number)
    kind, steps = chance.choice(kinds), steps_of(chance, definitions, longest)
    in_postgres = chance.random() < 0.1
    with source_at(url) as source, temporary_store_url(url if in_postgres else None) as store_url:
        try:
            return play(source, store_url, kind, steps, chance).stops
        except BaseException as error:
            error.add_note(f"history {number}")
            raise


def play_pumps(
    url: str,
    most: int,
    definitions: Sequence[str] = DEFINITIONS,
    kinds: Sequence[str] = KINDS,
    *,
    first: int = 0,
    longest: int = _MOST_STEPS,
    played: Callable[[list[str]], None] = lambda stops: None,
) -> None:
    """Play so many histories of pumps, from a number on, and raise the error of the first that fails.

    What happens is the same for each number; when it happens to a pump, which runs beside it, is not.
    ``longest`` is the largest number of their steps.
    """
    with only(logging.CRITICAL, "penstock"):
        for number in range(first, first + most):
            played(play_on(url, number, definitions, kinds, longest))
