"""Timelines of a server's log. A promoted standby, or a restored server, begins a new timeline.

Before the start of the new timeline, its log is equal to that of the earlier one. If a reader is past this
position, the server lacks commits that were read, and has other commits at the same positions.
"""

from __future__ import annotations

from penstock.errors import DataLostError
from penstock.feeds.postgres.server import START_OVER, Server


def timeline_left_at(server: Server, before: int, now: int) -> int | None:
    """Return the position at which a timeline branched off from an earlier one.

    The result is None if both are the same or one is unknown, and 0 if the earlier timeline is not part of
    the history of the other.

    Parameters
    ----------
    before, now
        The earlier and the current timeline; 0 if unknown.
    """
    if not before or not now or before == now:
        return None
    for timeline, position in _history(server, now):
        if timeline == before:
            return position
    return 0


def require_same_history(server: Server, before: int, now: int, version: int) -> None:
    """Refuse a server whose log differs from the log that was read.

    Parameters
    ----------
    before, now
        The timeline of the commits that were read, and that of the server; 0 if unknown.
    version
        The last commit that was read.

    Raises
    ------
    DataLostError
    """
    position = timeline_left_at(server, before, now)
    if position is not None and position <= version:
        raise other_history(server, now, position, version)


def other_history(server: Server, timeline: int, position: int, version: int) -> DataLostError:
    """Return the error for a server that lacks commits which were read."""
    return DataLostError(
        f"{server.name}: a standby was promoted, or the server was restored, without all commits that were "
        f"read. Its timeline {timeline} has other commits from {position} on; commits up to {version} were "
        f"read. {START_OVER.capitalize()}. "
        "With synchronized_standby_slots a server sends only commits that its standbys have",
        condition="DATA_LOST.HISTORY_CHANGED",
        version=version,
        newest=position,
    )


def _history(server: Server, timeline: int) -> list[tuple[int, int]]:
    """Return the earlier timelines of a timeline, each with the position at which it ended."""
    connection = server.with_retries(lambda: server.connect(replication="database"))
    try:
        with server.translating():
            result = connection.pgconn.exec_(f"TIMELINE_HISTORY {timeline}".encode())
            if result.status != server.psycopg.pq.ExecStatus.TUPLES_OK:
                raise server.psycopg.errors.error_from_result(result)
        text = (result.get_value(0, 1) or b"").decode()
    finally:
        connection.close()
    timelines = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].isdigit():
            high, _, low = words[1].partition("/")
            timelines.append((int(words[0]), (int(high, 16) << 32) + int(low, 16)))
    return timelines
