"""Faults in queues: the log, growth, producers, and the consumers of programs."""

from __future__ import annotations

from tests.simulation.faults.fault import Fault

QUEUES = [
    Fault(
        "a read continues to the end of its last segment",
        "store/log/reading.py",
        "max(requested.start, row.start_index), min(requested.end, row.end_index)\n",
        "max(requested.start, row.start_index), row.end_index\n",
    ),
    Fault(
        "a read skips trimmed rows although it must fail",
        "store/log/reading.py",
        '                    if self._on_lost == "fail":\n',
        "                    if False:\n",
    ),
    Fault(
        "a trim deletes segments that extend past its end",
        "store/sql/common.sql",
        "where queue_id = :queue_id and partition = :partition and end_index <= :row_index\nreturning bytes;",
        "where queue_id = :queue_id and partition = :partition and start_index < :row_index\nreturning bytes;",
    ),
    Fault(
        "a trim does not wait for retention-blocking consumers",
        "store/log/trim.py",
        "    if vital is not None:\n",
        "    if vital is not None and queue.retention.unlimited is None:\n",
    ),
    Fault(
        "a trim can go past the newest row",
        "store/log/trim.py",
        "        min(requested, record.next_index, _consumers_bound(",
        "        min(requested, _consumers_bound(",
    ),
    Fault(
        "a trim treats every owner as dead",
        "queue/maintenance.py",
        "            return tx.owner_alive(owner_lock_name(database.uuid, consumer, queue.queue_id))\n",
        "            return False\n",
    ),
    Fault(
        "a compaction replaces segments that another one has already replaced",
        "store/log/compact.py",
        "    if list(map(_segment_identity, current)) != list(map(_segment_identity, old)):\n        return False\n",
        "",
    ),
    Fault(
        "a compaction reverses the order of segments",
        "store/log/compact.py",
        "    segment = Segment(group.partition, pa.concat_batches(batches), columns_id)\n",
        "    segment = Segment(group.partition, pa.concat_batches(batches[::-1]), columns_id)\n",
    ),
    Fault(
        "a compaction does not lock its partition",
        "store/log/compact.py",
        "    lock_partition(tx, queue, new.partition)\n    current",
        "    current",
    ),
    Fault(
        "a queue that grows does not update the records of its partitions",
        "store/records/catalog.py",
        '    tx.run("set_total", queue_id=queue.queue_id, total=total)\n',
        "",
    ),
    Fault(
        "a queue grows without locking its partitions",
        "queue/evolution.py",
        "        catalog.lock_partitions(tx, current)\n",
        "",
    ),
    Fault(
        "keys that arrive while a queue grows are not recorded",
        "queue/evolution.py",
        "                _collect_key_hashes(_OpenTransaction(database, tx), current, hashes.copy(), read_ends)[0],\n",
        "                hashes,\n",
    ),
    Fault(
        "a queue that grows does not record its existing keys",
        "queue/evolution.py",
        "        if current.key:\n            _store_known_keys(",
        "        if current.key and count > MAX_PARTITIONS:\n            _store_known_keys(",
    ),
    Fault(
        "consumers have no offsets in added partitions",
        "queue/evolution.py",
        "        consumers.add_partition_positions(tx, registrations, current.partitions, total)\n",
        "",
    ),
    Fault(
        "a key goes to its partition from before the last growth instead of its first one",
        "queue/placement.py",
        "        for known in reversed(self.known_keys):\n",
        "        for known in self.known_keys:\n",
    ),
    Fault(
        "an append during a growth keeps the old placement of keys",
        "queue/queue.py",
        "lambda tx: catalog.reload_queue(tx, self._record), write=False)\n        self._cached_placement = None\n",
        "lambda tx: catalog.reload_queue(tx, self._record), write=False)\n",
    ),
    Fault(
        "the last append of a producer session is not recognized as a repeat",
        "queue/producer.py",
        "            repeated = number <= self._locked_sequence(",
        "            repeated = number < self._locked_sequence(",
    ),
    Fault(
        "a producer session stores its sequence in a transaction before that of the rows",
        "queue/producer.py",
        "        appended = self._queue.append_with(rows, partition, hook=append_once, idempotent=True)\n",
        "        self._database.run(lambda tx: append_once(tx, lambda: Appended()))\n        appended = self._queue.append_with(\n            rows, partition, hook=lambda tx, append: Appended() if repeated else append(), idempotent=True\n        )\n",
    ),
    Fault(
        "a fenced producer session can append",
        "store/sql/common.sql",
        "where queue_id = :queue_id and session = :session and epoch = :epoch and owner = :owner\nreturning sequence;",
        "where queue_id = :queue_id and session = :session\nreturning sequence;",
    ),
    Fault(
        "a reopened producer session loses its sequence",
        "store/sql/common.sql",
        "do update set epoch = p.epoch + 1, owner = excluded.owner\n",
        "do update set epoch = p.epoch + 1, owner = excluded.owner, sequence = -1\n",
    ),
    Fault(
        "rows are appended with columns that a restored store does not have",
        "store/records/catalog.py",
        "    if added_ids and not added_ids <= set(reload_queue(tx, queue).columns.ids):\n",
        "    if False:\n",
    ),
    Fault(
        "a program moves a consumer without compare-and-set",
        "store/sql/common.sql",
        "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index = :old;\n",
        "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and (next_index = :old or :safe = :new);\n",
    ),
    Fault(
        "a program can move a consumer that a query owns",
        "queue/consumer.py",
        '            self.refuse_when_owned(tx, registration, "move")\n',
        "",
    ),
    Fault(
        "dropping a queue locks its partitions before its staged rows",
        "store/records/catalog.py",
        '    delete_staged_payloads(tx, tx.all("delete_queue_staged", queue_id=queue.queue_id))\n',
        "    lock_partitions(tx, queue)\n"
        '    delete_staged_payloads(tx, tx.all("delete_queue_staged", queue_id=queue.queue_id))\n',
    ),
    Fault(
        "the generation of a registration is the clock's time",
        "store/records/consumers.py",
        "    return int(row.last_generation)\n",
        "    return tx.now()\n",
    ),
]
