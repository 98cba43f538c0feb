"""Faults in commits, which change the rows, the ledger and the consumers in one transaction."""

from __future__ import annotations

from tests.simulation.faults.fault import NO_INPUT_CHECK, Fault

COMMITS = [
    Fault(
        "a micro-batch that is already in the ledger is written again",
        "commit/protocol.py",
        "    if existing is not None:\n        _require_same_input(batch, existing.ranges)\n",
        "    if existing is not None and batch.batch_id < 0:\n        _require_same_input(batch, existing.ranges)\n",
    ),
    Fault(
        "a replay with different input is accepted as the same micro-batch",
        NO_INPUT_CHECK.file,
        NO_INPUT_CHECK.text,
        NO_INPUT_CHECK.replacement,
    ),
    Fault(
        "a sink accepts a micro-batch although the previous one is missing",
        "commit/protocol.py",
        "    previous = entries.previous or refuse_gap(tx, batch.key, new_sink=batch.new_sink)\n",
        "    previous = entries.previous\n",
    ),
    Fault(
        "a retry of staging keeps the rows that the failed attempt has staged",
        "store/staging.py",
        "        if next(attempt_numbers):\n",
        "        if next(attempt_numbers) < 0:\n",
    ),
    Fault(
        "a commit is not synced to the disk",
        "commit/protocol.py",
        "lambda tx: _commit(tx, database.uuid, batch), idempotent=True)",
        "lambda tx: _commit(tx, database.uuid, batch), durable=False, idempotent=True)",
    ),
    Fault(
        "an append is not synced to the disk",
        "queue/queue.py",
        "self.database.run(work, idempotent=idempotent)",
        "self.database.run(work, durable=False, idempotent=idempotent)",
    ),
    Fault(
        "an at-least-once sink accepts a micro-batch although the previous one is missing",
        "commit/protocol.py",
        "            refuse_gap(tx, key, new_sink=new_sink)\n            ledger.prune(tx, key)\n",
        "            ledger.prune(tx, key)\n",
    ),
    Fault(
        "an idempotent task adds its ledger entry in a transaction before that of its rows",
        "commit/protocol.py",
        "    def work(tx: Transaction) -> partition_log.Appended | None:\n        if _is_already_appended(tx, key, origin, input_id, rows, new_sink):\n            return None\n        return partition_log.append(tx, sink, segments)\n",
        "    if database.run(lambda tx: _is_already_appended(tx, key, origin, input_id, rows, new_sink), idempotent=True):\n        return None\n\n    def work(tx: Transaction) -> partition_log.Appended | None:\n        return partition_log.append(tx, sink, segments)\n",
    ),
    Fault(
        "a retried idempotent task appends its rows again",
        "commit/protocol.py",
        "        if _is_already_appended(tx, key, origin, input_id, rows, new_sink):\n            return None\n        return",
        "        return",
    ),
    Fault(
        "a commit does not move the consumer in the same store",
        "commit/protocol.py",
        "    for source, registration in locked:\n        _move_consumer(",
        "    for source, registration in locked[:0]:\n        _move_consumer(",
    ),
    Fault(
        "a micro-batch whose ledger entry was pruned is written again",
        "commit/protocol.py",
        "    if entries.empty:\n        _refuse_rewound(tx, batch.key)\n",
        "",
    ),
    Fault(
        "a micro-batch is committed although the consumer's owner has not planned it",
        "commit/protocol.py",
        "    if not source.unplanned:\n        _require_planned(batch, source, registration)\n",
        "",
    ),
    Fault(
        "a commit moves the consumer's offset in the first partition only",
        "commit/protocol.py",
        "consumers.advance(tx, registration, source.moves(), ",
        "consumers.advance(tx, registration, source.moves([0]), ",
    ),
    Fault(
        "the safe offset moves with the sink's commit, before the checkpoint logs the commit",
        "commit/protocol.py",
        'safe="old" if source.unplanned else None)',
        'safe="new")',
    ),
    Fault(
        "a seek does not delete the marks of the source",
        "commit/protocol.py",
        '        tx.run("delete_marks", source=name)\n',
        "",
    ),
    Fault(
        "added partitions are read from the offset of the first partition",
        "commit/offsets.py",
        "(*offsets, *[0] * (length - len(offsets)))",
        "(*offsets, *offsets[:1] * (length - len(offsets)))",
    ),
    Fault(
        "a replay promotes the rows that it has staged",
        "commit/micro_batch.py",
        "        staging.discard(tx, self.record, batch.app_id, batch.batch_id)",
        "        staging.promote(tx, self.record, batch.app_id, batch.batch_id, batch.attempts)",
    ),
    Fault(
        "a micro-batch does not have to start where the previous one ended",
        "commit/protocol.py",
        "    if previous is not None:\n        _require_contiguous(batch, previous)\n",
        "",
        baseline=NO_INPUT_CHECK,
    ),
    Fault(
        "the oldest epoch in the ledger is used as the newest one",
        "store/sql/common.sql",
        "and batch_id < :before and task = -1\norder by batch_id desc\n",
        "and batch_id < :before and task = -1\norder by batch_id\n",
    ),
    Fault(
        "a mark is moved without compare-and-set",
        "store/sql/common.sql",
        "where source = :source and partition = :partition and next_index = :old;",
        "where source = :source and partition = :partition;",
    ),
    Fault(
        "rows of an unacknowledged attempt are promoted too",
        "store/staging.py",
        "    is_acknowledged = [row.batch_id == batch_id and row.attempt in attempts for row in staged]\n    rows = [*compress(staged, is_acknowledged)]\n    remaining = sum(row.segments for row in rows)\n    if remaining != sum(attempts.values()):\n",
        "    is_acknowledged = [row.batch_id == batch_id for row in staged]\n    rows = [*compress(staged, is_acknowledged)]\n    remaining = sum(row.segments for row in rows)\n    if remaining < sum(attempts.values()):\n",
    ),
    Fault(
        "staged segments are promoted without sorting them",
        "store/staging.py",
        '    rows.sort(key=attrgetter("task", "attempt", "ordinal"))\n',
        "",
    ),
    Fault(
        "missing staged segments are not noticed",
        "store/staging.py",
        "    if remaining != sum(attempts.values()):\n",
        "    if remaining > sum(attempts.values()):\n",
    ),
    Fault(
        "a commit deletes the staged rows of later micro-batches",
        "store/sql/common.sql",
        "delete from penstock.staged where app_id = :app_id and batch_id <= :batch_id and queue_id = :queue_id",
        "delete from penstock.staged where app_id = :app_id and batch_id >= 0 * :batch_id and queue_id = :queue_id",
    ),
    Fault(
        "the ledger entry of a micro-batch lacks its offset",
        "spark/checkpoint.py",
        "            logged=None if stateful else _restorable_offset(offsets),\n",
        "",
    ),
    Fault(
        "idempotent tasks do not compare the input of their micro-batch",
        "commit/protocol.py",
        "    if input_id and stored_input and stored_input != input_id:\n",
        "    if input_id and stored_input and False:\n",
    ),
    Fault(
        "the ledger deletes the offset of the second-newest epoch",
        "store/records/ledger.py",
        "    last = key.batch_id - 2\n",
        "    last = key.batch_id - 1\n",
    ),
]
