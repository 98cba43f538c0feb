"""What must hold, judged by the answers that clients got and by what anybody can read.

Nothing here knows how it is made to hold.

Rows have ids that are never used twice. A source row is committed when it can be read in the source. From
then on it has to come to the sink as often as the guarantee says, in its partition's order, whole commits at
a time, and with its key in one partition; unless what was done to the store on purpose (a restored backup, a
seek, a trim, a recreated queue) accounts for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class Violation(Exception):
    """Something that must hold does not."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass
class Snapshot:
    """One moment."""

    source: list[list[int]]
    """The ids of each partition, from its first row that is left."""
    first: list[int]
    """The row index of each partition's first row."""
    sink: list[list[tuple[int, int]]]
    """Ids and keys by partition; a table has one."""
    offsets: list[int] | None
    """Where the consumer stands, if there is one."""
    safe: list[int] | None = None
    """Up to where the consumer lets rows be trimmed, if there is one."""

    @property
    def ends(self) -> list[int]:
        """Behind each partition's newest row."""
        return [first + len(rows) for first, rows in zip(self.first, self.source, strict=True)]


@dataclass
class History:
    """The answers that clients got, and what was done on purpose."""

    guarantee: str
    ordered: bool
    keyed: bool
    one_store: bool
    acknowledged: set[int] = field(default_factory=set)
    """Ids of appends to the source that succeeded."""
    appends: list[tuple[int, ...]] = field(default_factory=list)
    """Ids that were appended to the source together."""
    foreign: set[int] = field(default_factory=set)
    """Ids of others' appends to the sink that succeeded."""
    keys: dict[int, int] = field(default_factory=dict)
    disturbed: bool = False
    """Whether anything happened for which at-least-once may repeat rows."""
    reruns: int = 0
    """How often something was interrupted whose rows are written again."""
    processed: Counter[int] = field(default_factory=Counter)
    """How often programs that read for themselves got the answer that they have processed a row."""
    perhaps: Counter[int] = field(default_factory=Counter)
    """Rows that a program may have processed without having been told."""
    repeats: Counter[int] = field(default_factory=Counter)
    """How often an id may come again, since a consumer was sought to before it."""
    trimmed: set[int] = field(default_factory=set)
    """Ids that may be gone from the source."""
    may_lack: set[int] = field(default_factory=set)
    """Ids that were passed over on purpose: trimmed, or sought past."""
    taken: set[int] = field(default_factory=set)
    """Ids that a program has taken through the query's consumer."""
    restored: bool = False
    """Whether a backup has replaced a store, so that earlier answers may be undone."""
    recreated: bool = False
    sought: bool = False


def check(history: History, now: Snapshot) -> None:
    """What holds at every moment.

    Raises
    ------
    Violation
    """
    ids = [row[0] for partition in now.sink for row in partition]
    own = [each for each in ids if each < 1_000_000]
    _check_repeated(history, ids)
    # What was in a queue that was dropped may come again in the recreated one.
    if not (history.restored or history.recreated):
        _check_processed(history)
    if history.keyed:
        _check_keys(now)
    if history.ordered and not (history.sought or history.restored or history.recreated):
        _check_order(now)
    _check_appends(history, now)
    if history.guarantee == "exactly_once":
        _check_whole(history, now)
        if history.one_store:
            _check_taken(history, own)
    if history.one_store and now.offsets is not None and history.guarantee == "exactly_once":
        _check_level(history, now, own)


def _check_repeated(history: History, ids: list[int]) -> None:
    for each, count in Counter(ids).items():
        if count == 1:
            continue
        if (
            each < 1_000_000
            and history.guarantee == "at_least_once"
            and _may_come_again(history, each, count)
        ):
            continue
        if history.guarantee == "idempotent" and history.sought:
            # Its tasks write for all to see before the commit that a seek has refused.
            continue
        if count > 1 + history.repeats[each]:
            raise Violation("repeated", f"row {each} is in the sink {count} times")


def _may_come_again(history: History, each: int, count: int) -> bool:
    """Whether at-least-once may have written a row so often."""
    wild = history.restored or history.recreated
    return history.disturbed and (wild or count <= 1 + history.reruns + history.repeats[each])


def _check_processed(history: History) -> None:
    twice = sorted(each for each, count in history.processed.items() if count > 1)
    if twice:
        raise Violation("repeated", f"programs have processed rows {twice} twice")


def _check_taken(history: History, own: list[int]) -> None:
    """A row goes through a consumer once, to the query or to a program."""
    twice = history.taken & set(own)
    if twice and not (history.restored or history.recreated or history.sought):
        raise Violation("repeated", f"rows {sorted(twice)} are in the sink, and a program has taken them")


def _check_keys(now: Snapshot) -> None:
    homes: dict[int, int] = {}
    for partition, rows in enumerate(now.sink):
        for _, key in rows:
            if homes.setdefault(key, partition) != partition:
                raise Violation("key", f"key {key} is in partitions {homes[key]} and {partition}")


def _check_order(now: Snapshot) -> None:
    """Rows of one partition of the source stay in order in each partition of the sink."""
    places = {
        each: (partition, place)
        for partition, rows in enumerate(now.source)
        for place, each in enumerate(rows)
    }
    for partition, rows in enumerate(now.sink):
        last: dict[int, int] = {}
        for each, _ in rows:
            found = places.get(each)
            if found is None:
                continue
            if last.get(found[0], -1) > found[1]:
                raise Violation("order", f"row {each} comes late in partition {partition} of the sink")
            last[found[0]] = found[1]


def _check_appends(history: History, now: Snapshot) -> None:
    """An append is there as a whole or not at all, and once."""
    there = Counter(each for rows in now.source for each in rows)
    for each, count in there.items():
        if count > 1:
            raise Violation("source", f"row {each} is in the source {count} times")
    if history.restored or history.recreated:
        return
    for append in history.appends:
        kept = [each for each in append if each not in history.trimmed]
        if 0 < sum(1 for each in kept if each in there) < len(kept):
            raise Violation("torn", f"an append of {append} is there in part")
    lost = history.acknowledged - there.keys() - history.trimmed
    if lost:
        raise Violation("source", f"rows {sorted(lost)} were acknowledged and are not in the source")


def _check_whole(history: History, now: Snapshot) -> None:
    """Commits are whole: of a source partition, the sink has all that comes before its last row there."""
    if history.sought or history.restored or history.recreated or history.may_lack:
        return
    there = {row[0] for rows in now.sink for row in rows}
    for rows in now.source:
        arrived = [each in there for each in rows]
        if True in arrived[arrived.index(False) :] if False in arrived else False:
            lacking = [each for each in rows if each not in there]
            raise Violation(
                "torn", f"rows {lacking} are not in the sink, and later ones of their partition are"
            )


def _check_level(history: History, now: Snapshot, own: list[int]) -> None:
    """The consumer and the sink move together: what it has passed is there, and nothing else is."""
    if history.sought or history.restored or history.recreated or history.may_lack:
        return
    assert now.offsets is not None
    passed = {
        each
        for rows, first, offset in zip(now.source, now.first, now.offsets, strict=False)
        for each in rows[: max(0, offset - first)]
    }
    trimmed = {each for rows in now.source for each in rows}
    if lost := passed - set(own):
        raise Violation("lost", f"the consumer has passed rows {sorted(lost)} that are not in the sink")
    if early := (set(own) & trimmed) - passed:
        raise Violation("torn", f"rows {sorted(early)} are in the sink, and the consumer has not passed them")


def missing(history: History, now: Snapshot) -> list[int]:
    """Rows of the source, and of others in the sink, that are not in the sink and ought to be in the end."""
    there = {row[0] for rows in now.sink for row in rows}
    wanted = {each for rows in now.source for each in rows}
    if not history.restored and not history.recreated:
        wanted |= history.acknowledged
    wanted -= history.may_lack
    if not history.restored and not history.recreated:
        wanted |= history.foreign
    return sorted(wanted - there)


def unprocessed(history: History, now: Snapshot) -> list[int]:
    """Rows of the source that programs have not processed yet."""
    done = +history.processed + +history.perhaps
    return sorted({each for rows in now.source for each in rows} - done.keys())


def behind(now: Snapshot) -> list[int]:
    """Partitions whose rows the consumer is not told to have processed, by their numbers."""
    offsets = now.offsets or []
    return [number for number, (at, end) in enumerate(zip(offsets, now.ends, strict=False)) if at != end]


def unsafe(now: Snapshot) -> list[int]:
    """The numbers of partitions whose rows are kept for a consumer that has processed all of them."""
    safe = now.safe or []
    return [number for number, (at, end) in enumerate(zip(safe, now.ends, strict=False)) if at < end]


def unknown(history: History, now: Snapshot) -> list[int]:
    """Rows in the sink that nobody has appended, or that were undone in the source."""
    if history.restored or history.recreated or history.may_lack:
        return []
    known = {each for rows in now.source for each in rows} | history.keys.keys()
    return sorted({row[0] for rows in now.sink for row in rows} - known)
