"""Which rows a statement locks in PostgreSQL, for its transaction to wait for and to hold to its end.

A row is named by its table and its key. What locks a row ``for update`` (that, and deletes) keeps everybody
else off; an update keeps other updates off; a reference from another table only those who lock it
``for update``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Key = tuple[Any, ...]
Find = Callable[[str, Mapping[str, Any]], list[Any]]
"""Runs a statement of the simulation's own on what the transaction sees: the rows that it is about."""

Rows = Callable[[Mapping[str, Any], Find], Iterable[Key]]


def _row(table: str, *columns: str) -> Rows:
    return lambda given, find: [(table, *(given[column] for column in columns))]


def _found(table: str, text: str) -> Rows:
    return lambda given, find: [(table, *row) for row in find(text, given)]


_REGISTRATION = _row("registration", "consumer_id", "queue_id")
_POSITION = _row("position", "consumer_id", "queue_id", "partition")
_PARTITION = _row("partition", "queue_id", "partition")
_ALL_PARTITIONS = _found(
    "partition",
    "select queue_id, partition from main.penstock_partition where queue_id = :queue_id order by partition",
)
_QUEUE = _row("queue", "queue_id")
_PRODUCER = _row("producer", "queue_id", "session")
_SESSION = "select 1 from main.penstock_producer where queue_id = :queue_id and session = :session"
_LEDGER = (
    "select sink, app_id, batch_id, task from main.penstock_ledger "
    "where sink = :sink and app_id = :app_id and"
)
_STAGED = "select app_id, batch_id, attempt, ordinal from main.penstock_staged where "
_OBJECTS = "select object_id from main.penstock_object where queue_id = :queue_id order by object_id"

LOCKED: dict[str, Rows] = {
    "lock_registration": _found(
        "registration",
        "select r.consumer_id, r.queue_id from main.penstock_registration as r "
        "join main.penstock_consumer as c on c.consumer_id = r.consumer_id "
        "join main.penstock_queue as q on q.queue_id = r.queue_id "
        "where c.name = :consumer and q.name = :queue",
    ),
    "lock_registrations": _found(
        "registration",
        "select r.consumer_id, r.queue_id from main.penstock_registration as r "
        "join main.penstock_consumer as c on c.consumer_id = r.consumer_id "
        "where r.queue_id = :queue_id order by c.name",
    ),
    "insert_registration": _REGISTRATION,
    "set_vital": _REGISTRATION,
    "delete_registration": _REGISTRATION,
    "delete_registrations": _found(
        "registration",
        "select consumer_id, queue_id from main.penstock_registration where queue_id = :queue_id",
    ),
    "delete_producers": _found(
        "producer", "select queue_id, session from main.penstock_producer where queue_id = :queue_id"
    ),
    "delete_sink_ledger": _found(
        "ledger",
        "select sink, app_id, batch_id, task from main.penstock_ledger where sink = :sink",
    ),
    "delete_queue_staged": _found("staged", f"{_STAGED} queue_id = :queue_id"),
    "own_registration": _REGISTRATION,
    "open_plan": _REGISTRATION,
    "close_plan": _REGISTRATION,
    "bind_app": _REGISTRATION,
    "new_generation": _row("store"),
    "set_generation": _REGISTRATION,
    "set_draining": _REGISTRATION,
    "insert_position": _POSITION,
    "advance_position": _POSITION,
    "raise_safe": _POSITION,
    "set_position": _POSITION,
    "lock_partition": _PARTITION,
    "lock_partitions": _ALL_PARTITIONS,
    "advance_partition": _PARTITION,
    "set_first_index": _PARTITION,
    "account_merge": _PARTITION,
    "insert_partition": _PARTITION,
    "set_total": _ALL_PARTITIONS,
    "lock_queue": _found("queue", "select queue_id from main.penstock_queue where name = :name"),
    "set_partitions": _QUEUE,
    "set_retention": _QUEUE,
    "set_added_columns": _QUEUE,
    "delete_queue": _QUEUE,
    "insert_key_home": _row("key_home", "queue_id", "partitions"),
    "insert_ledger": _row("ledger", "sink", "app_id", "batch_id", "task"),
    "forget_logged": _found(
        "ledger", f"{_LEDGER} batch_id between :first and :last and task = -1 and logged is not null"
    ),
    "prune_ledger": _found("ledger", f"{_LEDGER} batch_id < :batch_id"),
    "lock_marked_source": _row("marked_source", "source"),
    "insert_marked_source": _row("marked_source", "source"),
    "raise_marked_source": _row("marked_source", "source"),
    "insert_mark": _row("mark", "source", "partition"),
    "advance_mark": _row("mark", "source", "partition"),
    "open_producer": _PRODUCER,
    "lock_producer": _PRODUCER,
    "set_sequence": _PRODUCER,
    "delete_segment": _row("segment", "queue_id", "partition", "end_index"),
    "delete_payload": _row("payload", "payload_id"),
    "delete_staged_batch": _found(
        "staged", f"{_STAGED} app_id = :app_id and batch_id <= :batch_id and queue_id = :queue_id"
    ),
    "delete_staged_from": _found(
        "staged",
        f"{_STAGED} app_id = :app_id and batch_id = :batch_id and attempt = :attempt and ordinal >= :ordinal",
    ),
    "delete_staged_before": _found("staged", f"{_STAGED} app_id = :app_id and created_at < :created_at"),
    "insert_object": _row("object", "object_id"),
    "begin_cleaning": _row("location", "payloads"),
    "insert_location": _row("location", "payloads"),
    "own_location": _row("location", "payloads"),
    "refuse_location": _row("location", "payloads"),
    "settle_cleaning": _row("cleaning", "payloads", "token"),
    "forget_cleaning": _row("cleaning", "payloads", "token"),
    "forget_cleanings": _found(
        "cleaning",
        "select payloads, token from main.penstock_cleaning where payloads = :payloads and "
        "begun_at < :before and taken_over = 0 and settled_at is not null",
    ),
    "mark_unused": _found("object", _OBJECTS),
    "mark_used": _found("object", _OBJECTS),
    "delete_unused": _found("object", _OBJECTS),
    "insert_queue": lambda given, find: [("queue name", given["name"])],
    # The identity comes from a counter, which a transaction that is undone does not turn back.
    "insert_consumer": lambda given, find: [("identity", "consumer"), ("consumer name", given["name"])],
    "delete_consumer": _row("consumer", "consumer_id"),
}

_REGISTERED = (
    "select 1 from main.penstock_registration where consumer_id = :consumer_id and queue_id = :queue_id"
)

THERE: dict[str, str] = {
    "insert_ledger": f"{_LEDGER} batch_id = :batch_id and task = :task",
    "insert_mark": "select 1 from main.penstock_mark where source = :source and partition = :partition",
    "insert_marked_source": "select 1 from main.penstock_marked_source where source = :source",
    "insert_registration": _REGISTERED,
}
"""How a statement that inserts a row only where there is none finds one: that one it does not lock."""

REFERRED: dict[str, Rows] = {
    "insert_registration": lambda given, find: (
        [] if find(_REGISTERED, given) else [("queue", given["queue_id"]), ("consumer", given["consumer_id"])]
    ),
    "insert_position": _REGISTRATION,
    "insert_partition": _QUEUE,
    "insert_key_home": _QUEUE,
    # Of a session that is there nothing refers anew.
    "open_producer": lambda given, find: [] if find(_SESSION, given) else _QUEUE(given, find),
}

FOR_UPDATE = {"lock_queue", "lock_partition", "lock_partitions"} | {
    name for name in LOCKED if name.startswith(("delete_", "prune_"))
}

UPDATE, CHANGE, REFER = "for update", "for no key update", "for key share"


def conflict(one: str, other: str) -> bool:
    """Whether two transactions cannot have a row in these modes at once."""
    return UPDATE in (one, other) or one == other == CHANGE


def wanted(name: str, given: Mapping[str, Any], find: Find) -> list[tuple[Key, str]]:
    """The rows that a statement locks, in its order, and how."""
    found = []
    if name in LOCKED:
        mode = UPDATE if name in FOR_UPDATE else CHANGE
        found += [(key, mode) for key in LOCKED[name](given, find)]
    if name in REFERRED:
        found += [(key, REFER) for key in REFERRED[name](given, find)]
    return found
