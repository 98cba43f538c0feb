"""Finality of a stream of changes: the time before which the stream has all commits.

Each micro-batch stores this time in its offset, so that a replay of the micro-batch has the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa

from penstock.arguments import require
from penstock.errors import InvalidChangeOptionError
from penstock.feeds.protocol import INSTANT, Feed, OpenFeed
from penstock.feeds.urls import parse
from penstock.instants import micros_of, moment_of, moment_text
from penstock.json_text import Json

COLUMN = "_finalized_until"
FIELD = pa.field(COLUMN, INSTANT)
FINALIZED = "finalizedUntil"
"""Offset key: the time, in ISO 8601."""


class Query(Protocol):
    """A streaming query of Spark or of Penstock."""

    @property
    def lastProgress(self) -> Any: ...


def finalized_until(query: Query, feed: Feed | str | None = None) -> datetime | None:
    """Return the time before which a streaming query has processed all commits of its change feeds.

    The time is that of the query's last finished micro-batch, so it does not advance while there is nothing
    to read. With ``feed``, this function also queries the source, over its own connection: if the query has
    processed all of its commits, the time advances.

    Parameters
    ----------
    query
        A streaming query. If it reads several change feeds, the result is the earliest of their times.
    feed
        The only feed that the query reads, or its URL. Another feed has no effect.

    Returns
    -------
    datetime or None
        A time in UTC; commits at exactly that time may still follow. None if the query has not finished a
        micro-batch since it was started, if it reads no change feed, or if the time of a feed is unknown.

    Raises
    ------
    FeedUnavailableError
        When the feed's system does not answer.
    """
    progress = query.lastProgress
    sources: Json = json.loads(progress.json) if progress is not None else {}
    micros = finalized_of(sources)
    if feed is not None:
        feed = parse(feed) if isinstance(feed, str) else feed
        require("feed", feed, Feed, "a change feed, such as penstock.DeltaFeed('/data/orders'), or its URL")
        ends = [end for end in _ends(sources) if _is_feed_offset(end)]
        with closing(feed.open()) as opened:
            current = _current_time(opened, ends[0]) if len(ends) == 1 else None
        micros = latest(micros, current)
    return _moment(micros)


def _current_time(feed: OpenFeed, end: Json) -> int | None:
    """Return the current time of a feed; None if the query has not processed all of its commits."""
    if end["feed"] != feed.describe().identity:
        return None
    upto = int(end["to"])
    # The second call shows that there were no new commits up to the end of the log at the first call.
    is_caught_up = all(feed.newest(upto) == upto for _ in range(2))
    return feed.finalized_until(upto) if is_caught_up else None


def latest(*times: int | None) -> int | None:
    """Return the latest known time; None if no time is known."""
    return max((time for time in times if time is not None), default=None)


def micros_in(offset: object) -> int | None:
    """Return the time in an offset, in microseconds since 1970; None if it has none."""
    text = offset.get(FINALIZED) if isinstance(offset, Mapping) else None
    try:
        return micros_of(datetime.fromisoformat(text)) if isinstance(text, str) else None
    except ValueError:
        return None


def with_time(offset: Json, micros: int | None) -> Json:
    """Add the time to an offset, if the time is known."""
    moment = _moment(micros)
    return offset if moment is None else offset | {FINALIZED: moment_text(moment)}


def _moment(micros: int | None) -> datetime | None:
    try:
        return None if micros is None else moment_of(micros)
    except OverflowError:
        # A store may contain any number.
        return None


def refuse_column(names: Iterable[str]) -> None:
    """Refuse a feed that already has a column with this name."""
    if COLUMN in {name.lower() for name in names}:
        raise InvalidChangeOptionError(
            f"finalized_until adds a column {COLUMN!r}, but the feed already has one: leave the option out, "
            "or rename the column",
            option="finalizedUntil",
        )


def finalized_of(progress: Json) -> int | None:
    """Return the time before which a query has all commits of its feeds, in microseconds since 1970.

    ``progress`` is Spark's progress as JSON. The result is None if the query reads no feed, or if the time of
    a feed is unknown.
    """
    times = [micros_in(end) for end in _ends(progress) if _is_feed_offset(end)]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def _ends(progress: Json) -> list[Any]:
    return [source.get("endOffset") for source in progress.get("sources") or []]


def _is_feed_offset(offset: object) -> bool:
    return isinstance(offset, Mapping) and {"feed", "from", "to"} <= offset.keys()
