"""Auditor that checks the invariants of a query against clients' replies and the rows that readers see.

The auditor does not depend on the code that it checks.

Row ids are never reused. A source row is committed once it can be read from the source. From then on it must
reach the sink as often as the guarantee allows, in the order of its partition, with its whole commit, and in
the partition of its key. The only exceptions are rows that a deliberate change of the store accounts for: a
restored backup, a seek, a trim, or a recreated queue.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FIRST_FOREIGN_ID = 1_000_000
"""The ids from here on belong to producers that append to the sink directly."""


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass
class Snapshot:
    """The contents of the source and the sink at one moment."""

    source: list[list[int]]
    """The ids in each partition, starting at the first row that was not trimmed."""
    first_indexes: list[int]
    """The row index of the first row of each partition."""
    sink: list[list[tuple[int, int]]]
    """The ids and keys in each partition. A table has one partition."""
    offsets: list[int] | None
    """The consumer's offsets; None without a consumer."""
    safe_offsets: list[int] | None = None
    """The offsets up to which the consumer allows trimming; None without a consumer."""

    @property
    def ends(self) -> list[int]:
        """The row index after the newest row of each partition."""
        return [first + len(rows) for first, rows in zip(self.first_indexes, self.source, strict=True)]


@dataclass
class History:
    """The replies that clients got, and the changes that were made on purpose."""

    guarantee: str
    ordered: bool
    keyed: bool
    one_store: bool
    acknowledged: set[int] = field(default_factory=set)
    """The ids of successful appends to the source."""
    appends: list[tuple[int, ...]] = field(default_factory=list)
    """The ids of each append to the source."""
    foreign: set[int] = field(default_factory=set)
    """The ids of successful appends to the sink by its own producers."""
    keys: dict[int, int] = field(default_factory=dict)
    disturbed: bool = False
    """Whether anything has happened after which at-least-once may repeat rows."""
    reruns: int = 0
    """How many interruptions may have caused rows to be written again."""
    processed: Counter[int] = field(default_factory=Counter)
    """How often an advance past a row succeeded for a program."""
    possibly_processed: Counter[int] = field(default_factory=Counter)
    """The rows that programs may have processed without getting a reply."""
    allowed_repeats: Counter[int] = field(default_factory=Counter)
    """How many more times a row may reach the sink because the consumer was sought back."""
    trimmed: set[int] = field(default_factory=set)
    """The ids that may have been trimmed from the source."""
    may_be_missing: set[int] = field(default_factory=set)
    """The ids that were skipped on purpose: trimmed, or passed by a seek."""
    taken_by_programs: set[int] = field(default_factory=set)
    """The ids that programs have taken through the query's consumer."""
    restored: bool = False
    """Whether a backup has replaced a store, which may have undone acknowledged changes."""
    recreated: bool = False
    sought: bool = False


def check_invariants(history: History, snapshot: Snapshot) -> None:
    """Check everything that must hold at any moment.

    Raises
    ------
    Violation
    """
    ids = [row[0] for partition in snapshot.sink for row in partition]
    query_ids = [row_id for row_id in ids if row_id < FIRST_FOREIGN_ID]
    _check_duplicates(history, ids)
    # Rows of a dropped queue may come again in the recreated one.
    if not (history.restored or history.recreated):
        _check_processed_once(history)
    if history.keyed:
        _check_key_partitions(snapshot)
    if history.ordered and not (history.sought or history.restored or history.recreated):
        _check_order(snapshot)
    _check_appends(history, snapshot)
    if history.guarantee == "exactly_once":
        _check_no_gaps(history, snapshot)
        if history.one_store:
            _check_not_taken(history, query_ids)
    if history.one_store and snapshot.offsets is not None and history.guarantee == "exactly_once":
        _check_consumer_matches_sink(history, snapshot, query_ids)


def _check_duplicates(history: History, ids: list[int]) -> None:
    for row_id, count in Counter(ids).items():
        if count == 1:
            continue
        if (
            row_id < FIRST_FOREIGN_ID
            and history.guarantee == "at_least_once"
            and _may_repeat(history, row_id, count)
        ):
            continue
        if history.guarantee == "idempotent" and history.sought:
            # Tasks append before the commit, and a seek may have made the commit fail.
            continue
        if count > 1 + history.allowed_repeats[row_id]:
            raise Violation("repeated", f"row {row_id} is in the sink {count} times")


def _may_repeat(history: History, row_id: int, count: int) -> bool:
    """Return whether at-least-once allows this many copies of a row."""
    unlimited = history.restored or history.recreated
    return history.disturbed and (unlimited or count <= 1 + history.reruns + history.allowed_repeats[row_id])


def _check_processed_once(history: History) -> None:
    duplicates = sorted(row_id for row_id, count in history.processed.items() if count > 1)
    if duplicates:
        raise Violation("repeated", f"programs have processed rows {duplicates} twice")


def _check_not_taken(history: History, query_ids: list[int]) -> None:
    """Check that each row passed through the consumer once, either to the query or to a program."""
    duplicates = history.taken_by_programs & set(query_ids)
    if duplicates and not (history.restored or history.recreated or history.sought):
        raise Violation(
            "repeated", f"rows {sorted(duplicates)} are in the sink, and a program has taken them"
        )


def _check_key_partitions(snapshot: Snapshot) -> None:
    """Check that the rows of a key are in one partition."""
    partition_of: dict[int, int] = {}
    for partition, rows in enumerate(snapshot.sink):
        for _, key in rows:
            if partition_of.setdefault(key, partition) != partition:
                raise Violation("key", f"key {key} is in partitions {partition_of[key]} and {partition}")


def _check_order(snapshot: Snapshot) -> None:
    """Check that rows of one source partition are in the same order in each partition of the sink."""
    positions = {
        row_id: (partition, position)
        for partition, rows in enumerate(snapshot.source)
        for position, row_id in enumerate(rows)
    }
    for partition, rows in enumerate(snapshot.sink):
        last: dict[int, int] = {}
        for row_id, _ in rows:
            source = positions.get(row_id)
            if source is None:
                continue
            if last.get(source[0], -1) > source[1]:
                raise Violation("order", f"row {row_id} is out of order in partition {partition} of the sink")
            last[source[0]] = source[1]


def _check_appends(history: History, snapshot: Snapshot) -> None:
    """Check that the source has each append at most once, and all of it or none."""
    counts = Counter(row_id for rows in snapshot.source for row_id in rows)
    for row_id, count in counts.items():
        if count > 1:
            raise Violation("source", f"row {row_id} is in the source {count} times")
    if history.restored or history.recreated:
        return
    for append in history.appends:
        untrimmed = [row_id for row_id in append if row_id not in history.trimmed]
        if 0 < sum(1 for row_id in untrimmed if row_id in counts) < len(untrimmed):
            raise Violation("torn", f"the source has only a part of append {append}")
    lost = history.acknowledged - counts.keys() - history.trimmed
    if lost:
        raise Violation("source", f"rows {sorted(lost)} were acknowledged and are not in the source")


def _check_no_gaps(history: History, snapshot: Snapshot) -> None:
    """Check that the sink has every row of a source partition that comes before the last one it has."""
    if history.sought or history.restored or history.recreated or history.may_be_missing:
        return
    sink_ids = {row[0] for rows in snapshot.sink for row in rows}
    for rows in snapshot.source:
        arrived = [row_id in sink_ids for row_id in rows]
        if True in arrived[arrived.index(False) :] if False in arrived else False:
            gap = [row_id for row_id in rows if row_id not in sink_ids]
            raise Violation("torn", f"rows {gap} are not in the sink, but later rows of their partition are")


def _check_consumer_matches_sink(history: History, snapshot: Snapshot, query_ids: list[int]) -> None:
    """Check that the sink has exactly the rows that the consumer has passed."""
    if history.sought or history.restored or history.recreated or history.may_be_missing:
        return
    assert snapshot.offsets is not None
    passed = {
        row_id
        for rows, first, offset in zip(
            snapshot.source, snapshot.first_indexes, snapshot.offsets, strict=False
        )
        for row_id in rows[: max(0, offset - first)]
    }
    source_ids = {row_id for rows in snapshot.source for row_id in rows}
    if lost := passed - set(query_ids):
        raise Violation("lost", f"the consumer has passed rows {sorted(lost)} that are not in the sink")
    if early := (set(query_ids) & source_ids) - passed:
        raise Violation("torn", f"rows {sorted(early)} are in the sink, and the consumer has not passed them")


def missing_rows(history: History, snapshot: Snapshot) -> list[int]:
    """Return the ids that must reach the sink eventually and are not there yet."""
    sink_ids = {row[0] for rows in snapshot.sink for row in rows}
    expected = {row_id for rows in snapshot.source for row_id in rows}
    if not history.restored and not history.recreated:
        expected |= history.acknowledged
    expected -= history.may_be_missing
    if not history.restored and not history.recreated:
        expected |= history.foreign
    return sorted(expected - sink_ids)


def unprocessed_rows(history: History, snapshot: Snapshot) -> list[int]:
    """Return the ids in the source that programs have not processed yet."""
    done = +history.processed + +history.possibly_processed
    return sorted({row_id for rows in snapshot.source for row_id in rows} - done.keys())


def lagging_partitions(snapshot: Snapshot) -> list[int]:
    """Return the partitions in which the consumer's offset is not at the end."""
    offsets = snapshot.offsets or []
    return [
        partition
        for partition, (offset, end) in enumerate(zip(offsets, snapshot.ends, strict=False))
        if offset != end
    ]


def unsafe_partitions(snapshot: Snapshot) -> list[int]:
    """Return the partitions in which the consumer does not yet allow all rows to be trimmed."""
    safe_offsets = snapshot.safe_offsets or []
    return [
        partition
        for partition, (offset, end) in enumerate(zip(safe_offsets, snapshot.ends, strict=False))
        if offset < end
    ]


def unknown_rows(history: History, snapshot: Snapshot) -> list[int]:
    """Return the ids in the sink that were never appended to the source, or that the source has lost."""
    if history.restored or history.recreated or history.may_be_missing:
        return []
    known = {row_id for rows in snapshot.source for row_id in rows} | history.keys.keys()
    return sorted({row[0] for rows in snapshot.sink for row in rows} - known)
