"""Timelines of a server's log: a standby that takes over, or a restored server, begins a new one.

Up to where the new timeline begins, its log is that of the earlier one. If a reader is further, the server
lacks commits that were read, and has others at the same positions.
"""

from __future__ import annotations

from penstock.errors import DataLostError
from penstock.feeds.postgres.server import START_OVER, Server


def left_at(server: Server, before: int, now: int) -> int | None:
    """Return the position at which the log of a timeline left an earlier one.

    None for the same timeline, or if one is not known; 0 if the earlier one is none of its own.

    Parameters
    ----------
    before, now
        The timelines; 0 for one that is not known.
    """
    if not before or not now or before == now:
        return None
    for timeline, position in _history(server, now):
        if timeline == before:
            return position
    return 0


def require_same_history(server: Server, before: int, now: int, version: int) -> None:
    """Refuse a server whose log is another one up to what was read.

    Parameters
    ----------
    before, now
        The timelines of what was read and of the server; 0 for one that is not known.
    version
        The last commit that was read.

    Raises
    ------
    DataLostError
    """
    position = left_at(server, before, now)
    if position is not None and position <= version:
        raise other_history(server, now, position, version)


def other_history(server: Server, timeline: int, position: int, version: int) -> DataLostError:
    """Return the error for a server that lacks commits that were read."""
    return DataLostError(
        f"{server.name}: a standby has taken over, or the server was restored, without all that was read. "
        f"Its timeline {timeline} has other commits from {position} on; those up to {version} were read. "
        f"{START_OVER.capitalize()}. "
        "With synchronized_standby_slots a server sends only what its standbys have",
        condition="DATA_LOST.HISTORY_CHANGED",
        version=version,
        newest=position,
    )


def _history(server: Server, timeline: int) -> list[tuple[int, int]]:
    """Return the earlier timelines of one, with the positions at which each was left."""
    connection = server.with_retries(lambda: server.connect(replication="database"))
    try:
        with server.translating():
            result = connection.pgconn.exec_(f"TIMELINE_HISTORY {timeline}".encode())
            if result.status != server.psycopg.pq.ExecStatus.TUPLES_OK:
                raise server.psycopg.errors.error_from_result(result)
        text = (result.get_value(0, 1) or b"").decode()
    finally:
        connection.close()
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0].isdigit():
            high, _, low = words[1].partition("/")
            found.append((int(words[0]), (int(high, 16) << 32) + int(low, 16)))
    return found
