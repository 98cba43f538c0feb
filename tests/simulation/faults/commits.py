"""Faults of commits: one transaction for the rows, the ledger and the consumers."""

from __future__ import annotations

from tests.simulation.faults.fault import NO_INPUT_CHECK, Fault

COMMITS = [
    Fault(
        "a micro-batch that the ledger has is written again",
        "commit/protocol.py",
        "    if existing is not None:\n        _require_same_input(batch, existing.ranges)\n",
        "    if existing is not None and batch.batch_id < 0:\n        _require_same_input(batch, existing.ranges)\n",
    ),
    Fault(
        "a replay with other input passes for a repeat",
        NO_INPUT_CHECK.file,
        NO_INPUT_CHECK.text,
        NO_INPUT_CHECK.replacement,
    ),
    Fault(
        "a sink that lacks the micro-batch before takes the next one",
        "commit/protocol.py",
        "    previous = entries.previous or refuse_gap(tx, batch.key, new_sink=batch.new_sink)\n",
        "    previous = entries.previous\n",
    ),
    Fault(
        "a retry of staging leaves what the try before has staged",
        "store/staging.py",
        "        if next(attempt_numbers):\n",
        "        if next(attempt_numbers) < 0:\n",
    ),
    Fault(
        "a commit does not wait for the disk",
        "commit/protocol.py",
        "lambda tx: _commit(tx, database.uuid, batch), idempotent=True)",
        "lambda tx: _commit(tx, database.uuid, batch), durable=False, idempotent=True)",
    ),
    Fault(
        "an append does not wait for the disk",
        "queue/queue.py",
        "self.database.run(work, idempotent=idempotent)",
        "self.database.run(work, durable=False, idempotent=idempotent)",
    ),
    Fault(
        "an at-least-once sink that lacks the micro-batch before takes the next one",
        "commit/protocol.py",
        "            refuse_gap(tx, key, new_sink=new_sink)\n            ledger.prune(tx, key)\n",
        "            ledger.prune(tx, key)\n",
    ),
    Fault(
        "an idempotent task enters the ledger in a transaction before that of its rows",
        "commit/protocol.py",
        "    def work(tx: Transaction) -> partition_log.Appended | None:\n        if _is_already_appended(tx, key, origin, input_id, rows, new_sink):\n            return None\n        return partition_log.append(tx, sink, segments)\n",
        "    if database.run(lambda tx: _is_already_appended(tx, key, origin, input_id, rows, new_sink), idempotent=True):\n        return None\n\n    def work(tx: Transaction) -> partition_log.Appended | None:\n        return partition_log.append(tx, sink, segments)\n",
    ),
    Fault(
        "an idempotent task that is repeated appends again",
        "commit/protocol.py",
        "        if _is_already_appended(tx, key, origin, input_id, rows, new_sink):\n            return None\n        return",
        "        return",
    ),
    Fault(
        "the sink does not move the consumer of its own store",
        "commit/protocol.py",
        "    for source, registration in locked:\n        _move_consumer(",
        "    for source, registration in locked[:0]:\n        _move_consumer(",
    ),
    Fault(
        "a micro-batch that the ledger has pruned is written again",
        "commit/protocol.py",
        "    if entries.empty:\n        _refuse_rewound(tx, batch.key)\n",
        "",
    ),
    Fault(
        "a micro-batch is committed whether its owner has planned it or not",
        "commit/protocol.py",
        "    if not source.unplanned:\n        _require_planned(batch, source, registration)\n",
        "",
    ),
    Fault(
        "only the offset of the first partition moves",
        "commit/protocol.py",
        "consumers.advance(tx, registration, source.moves(), ",
        "consumers.advance(tx, registration, source.moves([0]), ",
    ),
    Fault(
        "the safe offset moves with the sink's commit, before the checkpoint logs it",
        "commit/protocol.py",
        'safe="old" if source.unplanned else None)',
        'safe="new")',
    ),
    Fault(
        "the marks from before a seek stay",
        "commit/protocol.py",
        '        tx.run("delete_marks", source=name)\n',
        "",
    ),
    Fault(
        "partitions that were added are read from where the first one stands",
        "commit/offsets.py",
        "(*offsets, *[0] * (length - len(offsets)))",
        "(*offsets, *offsets[:1] * (length - len(offsets)))",
    ),
    Fault(
        "a replay appends what it has staged",
        "commit/micro_batch.py",
        "        staging.discard(tx, self.record, batch.app_id, batch.batch_id)",
        "        staging.promote(tx, self.record, batch.app_id, batch.batch_id, batch.attempts)",
    ),
    Fault(
        "a micro-batch begins elsewhere than where the one before it ends",
        "commit/protocol.py",
        "    if previous is not None:\n        _require_contiguous(batch, previous)\n",
        "",
        baseline=NO_INPUT_CHECK,
    ),
    Fault(
        "the oldest epoch in the ledger is taken for the newest",
        "store/sql/common.sql",
        "and batch_id < :before and task = -1\norder by batch_id desc\n",
        "and batch_id < :before and task = -1\norder by batch_id\n",
    ),
    Fault(
        "a mark moves without compare-and-set",
        "store/sql/common.sql",
        "where source = :source and partition = :partition and next_index = :old;",
        "where source = :source and partition = :partition;",
    ),
    Fault(
        "an attempt that was not acknowledged is promoted all the same",
        "store/staging.py",
        "    is_acknowledged = [row.batch_id == batch_id and row.attempt in attempts for row in staged]\n    rows = [*compress(staged, is_acknowledged)]\n    remaining = sum(row.segments for row in rows)\n    if remaining != sum(attempts.values()):\n",
        "    is_acknowledged = [row.batch_id == batch_id for row in staged]\n    rows = [*compress(staged, is_acknowledged)]\n    remaining = sum(row.segments for row in rows)\n    if remaining < sum(attempts.values()):\n",
    ),
    Fault(
        "staged segments are promoted in the order in which they are found",
        "store/staging.py",
        '    rows.sort(key=attrgetter("task", "attempt", "ordinal"))\n',
        "",
    ),
    Fault(
        "staged segments that are gone are not missed",
        "store/staging.py",
        "    if remaining != sum(attempts.values()):\n",
        "    if remaining > sum(attempts.values()):\n",
    ),
    Fault(
        "a commit drops what later micro-batches have staged",
        "store/sql/common.sql",
        "delete from penstock.staged where app_id = :app_id and batch_id <= :batch_id and queue_id = :queue_id",
        "delete from penstock.staged where app_id = :app_id and batch_id >= 0 * :batch_id and queue_id = :queue_id",
    ),
    Fault(
        "the ledger does not have the offset of a micro-batch",
        "spark/checkpoint.py",
        "            logged=None if stateful else _restorable_offset(offsets),\n",
        "",
    ),
    Fault(
        "tasks of guarantee=idempotent do not compare the input of their micro-batch",
        "commit/protocol.py",
        "    if input_id and stored_input and stored_input != input_id:\n",
        "    if input_id and stored_input and False:\n",
    ),
    Fault(
        "the ledger forgets the offset of the epoch before the newest one",
        "store/records/ledger.py",
        "    last = key.batch_id - 2\n",
        "    last = key.batch_id - 1\n",
    ),
]
