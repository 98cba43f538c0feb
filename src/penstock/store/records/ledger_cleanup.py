"""What the ledger and the marks may forget, a part of it at a time.

- A dropped queue is no sink any more: another queue of its name has another generation. Its entries go.
- An app that has not committed for long may still be started again. Then it repeats its newest micro-batch, so the newest entries stay;
  an earlier micro-batch is refused as one that the ledger has forgotten.
- A mark stands for a consumer of another store, and without it rows would be repeated. It was written together with an entry of its app, and
  the newest entry of an app in a sink stays as long as the sink. So where an app has no entry left, its marks are for a dropped queue.
"""

from __future__ import annotations

from penstock.store.database import Database, Transaction
from penstock.store.records import ledger
from penstock.store.records.catalog import list_queues

IDLE_MICROSECONDS = 30 * 86_400_000_000
"""How long an app has not committed before all but its newest entries go."""
IDLE_KEEP = 10
"""How many micro-batches before the newest one stay."""
AT_ONCE = 100
"""How many sinks, apps and apps' marks one run cleans up."""


def clean_up(database: Database) -> int:
    """Forget what no query can need any more; the number of dropped queues and of apps of which something went."""
    sinks, idle, orphans = database.run(_found, write=False)
    for sink in sinks:
        _delete(database, "delete_sink_ledger", sink=sink)
    for sink, app_id, batch_id in idle:
        _delete(database, "prune_ledger", sink=sink, app_id=app_id, batch_id=batch_id)
    for app_id in orphans:
        _delete(database, "delete_orphaned_marks", app_id=app_id)
        _delete(database, "delete_orphaned_sources", app_id=app_id)
    return len(sinks) + len(idle) + len(orphans)


def _delete(database: Database, statement: str, **parameters: str | int) -> None:
    database.run(lambda tx: tx.run(statement, **parameters), idempotent=True)


def _found(tx: Transaction) -> tuple[list[str], list[tuple[str, str, int]], list[str]]:
    """Sinks that were dropped, apps with the micro-batch before which their entries may go, and apps whose marks may go."""
    now = tx.now()
    there = {ledger.queue_sink(queue) for queue in list_queues(tx)}
    sinks = [row.sink for row in tx.all("ledger_sinks") if row.sink.startswith(ledger.QUEUE_SINK)]
    idle = tx.all("idle_apps", before=now - IDLE_MICROSECONDS, now=now, keep=IDLE_KEEP, most=AT_ONCE)
    orphans = tx.all("orphaned_mark_apps", most=AT_ONCE)
    return (
        [sink for sink in sinks if sink not in there][:AT_ONCE],
        [(row.sink, row.app_id, row.newest - IDLE_KEEP) for row in idle],
        [row.app_id for row in orphans],
    )
