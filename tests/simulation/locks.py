"""Row locks that each named statement takes in PostgreSQL, which its transaction holds until it ends.

A row is identified by its table and its key. A ``for update`` lock, which a delete takes too, conflicts with
every other lock. The lock of an update conflicts with other updates. The lock that a foreign key reference
takes on the referenced row conflicts only with ``for update``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Key = tuple[Any, ...]
RunQuery = Callable[[str, Mapping[str, Any]], list[Any]]
"""Runs a query on the data that the transaction sees."""

FindKeys = Callable[[Mapping[str, Any], RunQuery], Iterable[Key]]
"""Returns the keys of the rows that a statement with these parameters locks, in order."""


def _row(table: str, *columns: str) -> FindKeys:
    """Lock the row whose key is in these parameters."""
    return lambda parameters, query: [(table, *(parameters[column] for column in columns))]


def _selected_rows(table: str, sql: str) -> FindKeys:
    """Lock the rows whose keys a query returns."""
    return lambda parameters, query: [(table, *row) for row in query(sql, parameters)]


_REGISTRATION = _row("registration", "consumer_id", "queue_id")
_POSITION = _row("position", "consumer_id", "queue_id", "partition")
_PARTITION = _row("partition", "queue_id", "partition")
_ALL_PARTITIONS = _selected_rows(
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
_OBJECTS = (
    "select queue_id, object_id from main.penstock_object where queue_id = :queue_id order by object_id"
)

LOCKED_ROWS: dict[str, FindKeys] = {
    "lock_registration": _selected_rows(
        "registration",
        "select r.consumer_id, r.queue_id from main.penstock_registration as r "
        "join main.penstock_consumer as c on c.consumer_id = r.consumer_id "
        "join main.penstock_queue as q on q.queue_id = r.queue_id "
        "where c.name = :consumer and q.name = :queue",
    ),
    "lock_registrations": _selected_rows(
        "registration",
        "select r.consumer_id, r.queue_id from main.penstock_registration as r "
        "join main.penstock_consumer as c on c.consumer_id = r.consumer_id "
        "where r.queue_id = :queue_id order by c.name",
    ),
    "insert_registration": _REGISTRATION,
    "set_vital": _REGISTRATION,
    "delete_registration": _REGISTRATION,
    "delete_registrations": _selected_rows(
        "registration",
        "select consumer_id, queue_id from main.penstock_registration where queue_id = :queue_id",
    ),
    "delete_producers": _selected_rows(
        "producer", "select queue_id, session from main.penstock_producer where queue_id = :queue_id"
    ),
    "delete_sink_ledger": _selected_rows(
        "ledger",
        "select sink, app_id, batch_id, task from main.penstock_ledger where sink = :sink",
    ),
    "delete_queue_staged": _selected_rows("staged", f"{_STAGED} queue_id = :queue_id"),
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
    "lock_queue": _selected_rows("queue", "select queue_id from main.penstock_queue where name = :name"),
    "set_partitions": _QUEUE,
    "set_retention": _QUEUE,
    "set_added_columns": _QUEUE,
    "delete_queue": _QUEUE,
    "insert_key_home": _row("key_home", "queue_id", "partitions"),
    "insert_ledger": _row("ledger", "sink", "app_id", "batch_id", "task"),
    "forget_logged": _selected_rows(
        "ledger", f"{_LEDGER} batch_id between :first and :last and task = -1 and logged is not null"
    ),
    "prune_ledger": _selected_rows("ledger", f"{_LEDGER} batch_id < :batch_id"),
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
    "delete_staged_batch": _selected_rows(
        "staged", f"{_STAGED} app_id = :app_id and batch_id <= :batch_id and queue_id = :queue_id"
    ),
    "delete_staged_from": _selected_rows(
        "staged",
        f"{_STAGED} app_id = :app_id and batch_id = :batch_id and attempt = :attempt and ordinal >= :ordinal",
    ),
    "delete_staged_before": _selected_rows(
        "staged", f"{_STAGED} app_id = :app_id and created_at < :created_at"
    ),
    "insert_object": _row("object", "queue_id", "object_id"),
    "begin_cleaning": _row("location", "payloads"),
    "insert_location": _row("location", "payloads"),
    "own_location": _row("location", "payloads"),
    "refuse_location": _row("location", "payloads"),
    "settle_cleaning": _row("cleaning", "payloads", "token"),
    "forget_cleaning": _row("cleaning", "payloads", "token"),
    "forget_cleanings": _selected_rows(
        "cleaning",
        "select payloads, token from main.penstock_cleaning where payloads = :payloads and "
        "begun_at < :before and taken_over = 0 and settled_at is not null",
    ),
    "mark_unused": _selected_rows("object", _OBJECTS),
    "mark_used": _selected_rows("object", _OBJECTS),
    "delete_unused": _selected_rows("object", _OBJECTS),
    "insert_queue": lambda parameters, query: [("queue name", parameters["name"])],
    # The identity comes from a sequence, which a rollback does not reset.
    "insert_consumer": lambda parameters, query: [
        ("identity", "consumer"),
        ("consumer name", parameters["name"]),
    ],
    "delete_consumer": _row("consumer", "consumer_id"),
}
"""The rows that each statement reads for update, changes or deletes."""

_REGISTERED = (
    "select 1 from main.penstock_registration where consumer_id = :consumer_id and queue_id = :queue_id"
)

EXISTING_ROW: dict[str, str] = {
    "insert_ledger": f"{_LEDGER} batch_id = :batch_id and task = :task",
    "insert_mark": "select 1 from main.penstock_mark where source = :source and partition = :partition",
    "insert_marked_source": "select 1 from main.penstock_marked_source where source = :source",
    "insert_registration": _REGISTERED,
}
"""Queries that find the existing row of a statement that inserts only if there is none.

The statement does not lock an existing row.
"""

REFERENCED_ROWS: dict[str, FindKeys] = {
    "insert_registration": lambda parameters, query: (
        []
        if query(_REGISTERED, parameters)
        else [("queue", parameters["queue_id"]), ("consumer", parameters["consumer_id"])]
    ),
    "insert_position": _REGISTRATION,
    "insert_partition": _QUEUE,
    "insert_key_home": _QUEUE,
    # Updating an existing session does not check its foreign key.
    "open_producer": lambda parameters, query: (
        [] if query(_SESSION, parameters) else _QUEUE(parameters, query)
    ),
}
"""The rows to which the foreign keys of an inserted row refer."""

# Lock modes of PostgreSQL.
FOR_UPDATE, NO_KEY_UPDATE, KEY_SHARE = "for update", "for no key update", "for key share"

FOR_UPDATE_STATEMENTS = {"lock_queue", "lock_partition", "lock_partitions"} | {
    name for name in LOCKED_ROWS if name.startswith(("delete_", "prune_"))
}


def conflict(one: str, other: str) -> bool:
    """Return whether two transactions cannot hold locks of these modes on a row at the same time."""
    return FOR_UPDATE in (one, other) or one == other == NO_KEY_UPDATE


def required_locks(name: str, parameters: Mapping[str, Any], query: RunQuery) -> list[tuple[Key, str]]:
    """Return the rows that a statement locks and the lock modes, in order."""
    locks = []
    if name in LOCKED_ROWS:
        mode = FOR_UPDATE if name in FOR_UPDATE_STATEMENTS else NO_KEY_UPDATE
        locks += [(key, mode) for key in LOCKED_ROWS[name](parameters, query)]
    if name in REFERENCED_ROWS:
        locks += [(key, KEY_SHARE) for key in REFERENCED_ROWS[name](parameters, query)]
    return locks
