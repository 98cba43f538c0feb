"""Completeness of a stream of changes: the time before which it has all commits.

Each micro-batch notes it in its offset, so that a repeated micro-batch has the same one.
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
"""Key of an offset: the time, in ISO 8601."""


class Query(Protocol):
    """A streaming query of Spark's, or of Penstock's."""

    @property
    def lastProgress(self) -> Any: ...


def finalized_until(query: Query, feed: Feed | str | None = None) -> datetime | None:
    """Return the time before which a streaming query has processed all commits of its change feeds.

    The time is that of the query's last finished micro-batch, so it stands still while there is nothing to
    read. With ``feed``, the source is asked as well, with a connection of its own: if the query has processed
    everything in it, the time advances.

    Parameters
    ----------
    query
        A streaming query that reads one or more change feeds; the earliest time counts.
    feed
        The only feed that it reads, or its URL; another one has no effect.

    Returns
    -------
    datetime or None
        A time in UTC; commits at exactly that time may still follow. None if the query has not finished a
        micro-batch since it was started, reads no change feed, or if the time is not known of one of them.

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
        ends = [end for end in _ends(sources) if _is_of_feed(end)]
        with closing(feed.open()) as opened:
            now = _now(opened, ends[0]) if len(ends) == 1 else None
        micros = latest(micros, now)
    return _moment(micros)


def _now(feed: OpenFeed, end: Json) -> int | None:
    """Return the time of a feed that a query has processed up to the end of its last micro-batch."""
    if end["feed"] != feed.describe().identity:
        return None
    upto = int(end["to"])
    # The second call confirms that nothing was committed up to the end that the first one saw.
    reached = all(feed.newest(upto) == upto for _ in range(2))
    return feed.finalized_until(upto) if reached else None


def latest(*times: int | None) -> int | None:
    """Return the latest of the times that are known; None if none is."""
    return max((time for time in times if time is not None), default=None)


def micros_in(offset: object) -> int | None:
    """Return the time in an offset, in microseconds since 1970; None if it has none."""
    text = offset.get(FINALIZED) if isinstance(offset, Mapping) else None
    try:
        return micros_of(datetime.fromisoformat(text)) if isinstance(text, str) else None
    except ValueError:
        return None


def noted(offset: Json, micros: int | None) -> Json:
    """Return an offset with the time, if it is known."""
    moment = _moment(micros)
    return offset if moment is None else offset | {FINALIZED: moment_text(moment)}


def _moment(micros: int | None) -> datetime | None:
    try:
        return None if micros is None else moment_of(micros)
    except OverflowError:
        # A store may have any number.
        return None


def refuse_column(names: Iterable[str]) -> None:
    """Refuse a feed that has a column of that name itself."""
    if COLUMN in {name.lower() for name in names}:
        raise InvalidChangeOptionError(
            f"finalized_until adds a column {COLUMN!r}, which the feed has already: leave the option out, or "
            "rename the column",
            option="finalizedUntil",
        )


def finalized_of(progress: Json) -> int | None:
    """Return the time before which a query has all commits of its feeds, in microseconds since 1970.

    ``progress`` is Spark's, as JSON. None if the query reads no feed, or if that is not known of one.
    """
    times = [micros_in(end) for end in _ends(progress) if _is_of_feed(end)]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def _ends(progress: Json) -> list[Any]:
    return [source.get("endOffset") for source in progress.get("sources") or []]


def _is_of_feed(offset: object) -> bool:
    return isinstance(offset, Mapping) and {"feed", "from", "to"} <= offset.keys()
