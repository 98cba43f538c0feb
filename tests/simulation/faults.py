"""Faults that somebody could bring into the protocol, each of which the simulation has to find.

A fault is a text that occurs once in a file of ``src/penstock``, and what stands in its place: a missing check, a swapped order, a lost
lock, an ignored epoch. Each breaks a promise in some schedule. Where another check would make it harmless, that one is
left out as well, and the fault has to break more than that.
``python -m tests.simulation.fault_run`` applies them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A text of a file, and what stands in its place."""

    file: str
    text: str
    instead: str


@dataclass(frozen=True)
class Fault:
    """One change that breaks something."""

    name: str
    file: str
    text: str
    instead: str
    without: Change | None = None
    """How the check is left out that would find what this breaks."""

    @property
    def change(self) -> Change:
        return Change(self.file, self.text, self.instead)


TIMES_OF_ROWS = Change(
    "commit/source_rows.py",
    "                _refuse(tx, offset)\n",
    "                return\n",
)
"""The times of a queue's last rows tell it from one that was restored, or recreated, and has grown again."""

SAME_INPUT = Change(
    "commit/protocol.py",
    "        _same(batch, before.ranges)\n        _settle(tx, batch, locked)\n",
    "        _settle(tx, batch, locked)\n",
)
"""A micro-batch that the sink has already committed with other input is refused."""

COMPARE_AND_SET = Change(
    "store/sql/common.sql",
    "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index = :old;\n",
    "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and (next_index = :old or :safe < :new);\n",
)
"""A consumer moves only from where the micro-batch begins."""


FAULTS = [
    # Commits: one transaction for the rows, the ledger and the consumers.
    Fault(
        "a micro-batch that the ledger has is written again",
        "commit/protocol.py",
        "    if before is not None:\n        _same(batch, before.ranges)\n",
        "    if before is not None and batch.batch_id < 0:\n        _same(batch, before.ranges)\n",
    ),
    Fault(
        "a replay with other input passes for a repeat",
        SAME_INPUT.file,
        SAME_INPUT.text,
        SAME_INPUT.instead,
    ),
    Fault(
        "a sink that lacks the micro-batch before takes the next one",
        "commit/protocol.py",
        "    previous = around.previous or refuse_gap(tx, batch.key, new_sink=batch.new_sink)\n",
        "    previous = around.previous\n",
    ),
    Fault(
        "a retry of staging leaves what the try before has staged",
        "store/staging.py",
        "        if next(tries):\n",
        "        if next(tries) < 0:\n",
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
        "    def work(tx: Transaction) -> partition_log.Appended | None:\n        if _appended_before(tx, key, origin, covers, rows, new_sink):\n            return None\n        return partition_log.append(tx, sink, segments)\n",
        "    if database.run(lambda tx: _appended_before(tx, key, origin, covers, rows, new_sink), idempotent=True):\n        return None\n\n    def work(tx: Transaction) -> partition_log.Appended | None:\n        return partition_log.append(tx, sink, segments)\n",
    ),
    Fault(
        "an idempotent task that is repeated appends again",
        "commit/protocol.py",
        "        if _appended_before(tx, key, origin, covers, rows, new_sink):\n            return None\n        return",
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
        "    if around.empty:\n        _refuse_rewound(tx, batch.key)\n",
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
        "    if previous is not None:\n        _refuse_jump(batch, previous)\n",
        "",
        without=SAME_INPUT,
    ),
    # Owners, and the plan of the micro-batch in flight.
    Fault(
        "an epoch is committed whoever owns its consumer",
        "commit/owner.py",
        "    require_owner(registration, end.epoch, end.owner, end.generation)\n",
        "",
        without=COMPARE_AND_SET,
    ),
    Fault(
        "an epoch is committed whatever rows the queue has by now",
        "commit/owner.py",
        "    require_owner(registration, end.epoch, end.owner, end.generation)\n    _require_there(tx, registration, end)\n",
        "    require_owner(registration, end.epoch, end.owner, end.generation)\n",
        without=COMPARE_AND_SET,
    ),
    Fault(
        "an owner that was overtaken is not refused",
        "commit/owner.py",
        "if (registration.epoch, registration.owner) != (epoch, identity):",
        "if registration.epoch < epoch:",
    ),
    Fault(
        "a program seeks a consumer that a query owns",
        "queue/consumer.py",
        '                self.refuse_when_owned(tx, registration, "seek")\n',
        "",
    ),
    Fault(
        "what the checkpoint has logged never becomes safe",
        "commit/owner.py",
        "elif any(have < wanted for have, wanted in zip(safe, logged.end, strict=False)):",
        "elif False:",
    ),
    Fault(
        "a micro-batch is planned wherever the consumer stands",
        "commit/owner.py",
        "if not _follows(tx, registration, end):",
        "if False:",
        without=TIMES_OF_ROWS,
    ),
    Fault(
        "a consumer that lags behind the checkpoint is moved to it, whatever was lost",
        "commit/owner.py",
        "    return expects_move or registration.plan != plan_text(logged)\n",
        "    return False\n",
    ),
    Fault(
        "a consumer is moved over an epoch of its sink from wherever it stands",
        "commit/owner.py",
        "        if same and offsets == begins and _planned_from(registration, begins):\n",
        "        if same:\n",
    ),
    Fault(
        "a consumer that has not planned an epoch of its sink is moved over it",
        "commit/owner.py",
        "        if same and offsets == begins and _planned_from(registration, begins):\n",
        "        if same and offsets == begins:\n",
    ),
    Fault(
        "a query that stops drains whoever owns its consumer",
        "commit/owner.py",
        "        if (made.epoch, made.owner) == (registration.epoch, registration.owner):\n",
        "        if made.epoch <= registration.epoch:\n",
    ),
    Fault(
        "an owner does not hold its lock",
        "commit/owner.py",
        "            return self._lock.acquire()\n",
        "            return True\n",
    ),
    Fault(
        "a new owner passes for the one before",
        "store/sql/common.sql",
        "set epoch = epoch + 1, owner = :owner, plan_epoch = null, draining = 0\n",
        "set owner = coalesce(owner, :owner), plan_epoch = null, draining = 0\n",
    ),
    Fault(
        "a new owner stays drained",
        "store/sql/common.sql",
        "set epoch = epoch + 1, owner = :owner, plan_epoch = null, draining = 0\n",
        "set epoch = epoch + 1, owner = :owner, plan_epoch = null\n",
    ),
    Fault(
        "a commit moves a consumer without compare-and-set",
        COMPARE_AND_SET.file,
        COMPARE_AND_SET.text,
        COMPARE_AND_SET.instead,
    ),
    Fault(
        "a consumer does not follow its safe offset",
        "store/sql/common.sql",
        "set safe_index = :safe_index,\n    next_index = case when next_index < :safe_index then :safe_index else next_index end\n",
        "set safe_index = :safe_index\n",
    ),
    Fault(
        "a seek does not refuse older checkpoints",
        "store/records/consumers.py",
        '    tx.run("set_generation", generation=generation, **registration.keys)\n',
        "    pass\n",
    ),
    Fault(
        "a consumer is found, and not locked",
        "store/records/consumers.py",
        '"lock_registration" if lock and tx.write else "find_registration", consumer=consumer, queue=queue',
        '"find_registration", consumer=consumer, queue=queue',
    ),
    Fault(
        "a query that has ended moves its consumer over the micro-batch that it had begun",
        "pipeline/micro_batches.py",
        "checkpoint.ranges(checkpoint.last_commit())\n",
        "checkpoint.ranges(checkpoint.last_planned())\n",
    ),
    Fault(
        "a query that stops drains the owner that its checkpoint names last",
        "pipeline/micro_batches.py",
        "            if expected.get((offset.queue, str(offset.consumer))) == offset.epoch\n",
        "            if (offset.queue, str(offset.consumer)) in expected\n",
    ),
    # The ledger, staging, and the marks of other stores.
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
        "    rows = [row for row in staged if row.batch_id == batch_id and row.attempt in attempts]\n    if len(rows) != sum(attempts.values()):\n",
        "    rows = [row for row in staged if row.batch_id == batch_id]\n    if len(rows) < sum(attempts.values()):\n",
    ),
    Fault(
        "staged segments are promoted in the order in which they are found",
        "store/staging.py",
        '    for column in ("ordinal", "attempt", "task", "partition"):\n',
        '    for column in ("partition",):\n',
    ),
    Fault(
        "staged segments that are gone are not missed",
        "store/staging.py",
        "    if len(rows) != sum(attempts.values()):\n",
        "    if len(rows) > sum(attempts.values()):\n",
    ),
    Fault(
        "a commit drops what later micro-batches have staged",
        "store/sql/common.sql",
        "delete from penstock.staged where app_id = :app_id and batch_id <= :batch_id and queue_id = :queue_id",
        "delete from penstock.staged where app_id = :app_id and batch_id >= 0 * :batch_id and queue_id = :queue_id",
    ),
    # The driver of a continuous query, and its checkpoint.
    Fault(
        "an epoch is in the checkpoint before it is in the sink",
        "continuous/driver/committed_epochs.py",
        "        self._sink.commit(writers, epoch, offset)\n        self.last, self.positions, self.rows = epoch.number, end, self.rows + epoch.rows_out\n        if self._follower is None:\n            self._log(epoch.number, offset)\n        else:\n            self._follower.add(epoch.number, offset)\n",
        "        self.last, self.positions, self.rows = epoch.number, end, self.rows + epoch.rows_out\n        if self._follower is None:\n            self._log(epoch.number, offset)\n        else:\n            self._follower.add(epoch.number, offset)\n            self._follower.flush()\n        self._sink.commit(writers, epoch, offset)\n",
    ),
    Fault(
        "a continuous query does not begin another run when its source grows",
        "continuous/driver/execution.py",
        "return self.stopping or run.coordinator.grown or behind",
        "return self.stopping or behind",
    ),
    Fault(
        "an epoch that the sink has refused counts as committed",
        "continuous/driver/committed_epochs.py",
        "        self._sink.commit(writers, epoch, offset)\n",
        "        try:\n            self._sink.commit(writers, epoch, offset)\n        except Exception:\n            pass\n",
    ),
    Fault(
        "a micro-batch that was begun counts as committed when a continuous query starts",
        "continuous/driver/checkpoint_log.py",
        "    if begun is not None and newest is not None and newest.number == begun and newest.identified:\n",
        "    if begun is not None and newest is not None and newest.number <= begun and newest.identified:\n",
    ),
    Fault(
        "the ledger does not have the offset of an epoch",
        "continuous/connectors/ledger.py",
        "                rebind=self.rebind,\n                new_sink=self.new_sink,\n                logged=json.dumps(offset),\n",
        "                rebind=self.rebind,\n                new_sink=self.new_sink,\n",
    ),
    Fault(
        "a continuous query resumes in a queue that was recreated",
        "continuous/connectors/queue.py",
        "            offset.require(store.uuid, queue.name, self.options.consumer, self._generation(queue))\n",
        "",
        without=TIMES_OF_ROWS,
    ),
    Fault(
        "an epoch is planned for whichever queue has the name by now",
        "continuous/connectors/queue.py",
        "        return self._pinned or _look_up(self.options)\n",
        "        return _look_up(self.options)\n",
        without=TIMES_OF_ROWS,
    ),
    Fault(
        "an epoch is committed to the queue as it is by now, not as its rows were placed",
        "continuous/connectors/queue.py",
        "        queue = writers.queue\n        if not self.exactly_once:\n",
        "        queue = _look_up(self.options)\n        if not self.exactly_once:\n",
    ),
    Fault(
        "an epoch begins after the rows that were trimmed, and not where the one before ended",
        "continuous/connectors/queue.py",
        "            skip_trimmed(self.options, partitions, offsets)\n            return dict(enumerate(offsets))\n",
        "            return dict(enumerate(skip_trimmed(self.options, partitions, offsets)))\n",
    ),
    Fault(
        "the offset of an epoch that was begun is dropped before another one is committed in its place",
        "continuous/driver/committed_epochs.py",
        "        self._begun = self._logs.begun()\n",
        '        for number in self._logs.begun():\n            self._logs._delete(f"offsets/{number}")\n',
    ),
    # Epochs, and the readers and writers of a continuous query.
    Fault(
        "an epoch is complete as soon as its readers are",
        "continuous/driver/epochs.py",
        "        return self.offsets is not None and (self.rows_in == 0 or self.attempts is not None)\n",
        "        return self.offsets is not None\n",
    ),
    Fault(
        "an epoch has the offsets of its first task alone",
        "continuous/driver/epochs.py",
        "        {partition: end for part in parts for partition, end in (part.offsets or {}).items()},\n",
        "        {partition: end for part in [*parts][:1] for partition, end in (part.offsets or {}).items()},\n",
    ),
    Fault(
        "an epoch has the staged segments of its first task alone",
        "continuous/driver/epochs.py",
        "{attempt: count for part in parts for attempt, count in (part.attempts or {}).items()},",
        "{attempt: count for part in [*parts][:1] for attempt, count in (part.attempts or {}).items()},",
    ),
    Fault(
        "a run ends before its readers rest",
        "continuous/driver/coordinator.py",
        "            return len(self._paused) == self.tasks and self.epochs.idle\n",
        "            return self.epochs.idle\n",
    ),
    Fault(
        "rows after a marker are those of the epoch before it",
        "continuous/tasks.py",
        "        self._epoch = number + 1\n",
        "        self._epoch = number\n",
    ),
    Fault(
        "a reader that is to rest reads on",
        "continuous/tasks.py",
        "            rows = None if self._paused else self._read()\n",
        "            rows = self._read()\n",
    ),
    Fault(
        "a reader does not report that it has skipped rows",
        "continuous/tasks.py",
        '                self._report("sent", not self._reader.rows and self._source.skipped)\n',
        "",
    ),
    Fault(
        "a marker overtakes rows that wait in the writer",
        "continuous/tasks.py",
        '        self._flush()\n        self._channel.send("wrote"',
        '        self._channel.send("wrote"',
    ),
    Fault(
        "a job that catches up leaves its last rows out",
        "continuous/catch_up.py",
        "    writer.write(epoch)\n    return writer.end(epoch)",
        "    return writer.end(epoch)",
    ),
    Fault(
        "a job that catches up begins where the run before it has begun",
        "continuous/driver/execution.py",
        "        starts = {part: at for part, at in self.committed.positions.items() if unread[part] > 0}\n",
        "        starts = {part: max(at - 1, 0) for part, at in self.committed.positions.items()}\n",
    ),
    Fault(
        "rows after the last marker of a batch are dropped",
        "continuous/tasks.py",
        "        self._add(_real(batch, kinds, start, batch.num_rows))\n        # Fillers",
        "        # Fillers",
    ),
    Fault(
        "a reader's offsets include what it has read ahead",
        "continuous/connectors/queue.py",
        "        return dict(self._positions)\n",
        "        return {**self._positions, **{ahead.partition: ahead.start + ahead.rows.num_rows for ahead in self._held}}\n",
    ),
    Fault(
        "the rest of a batch that was cut is dropped",
        "continuous/connectors/queue.py",
        "                self._held.appendleft(later)\n",
        "",
    ),
    Fault(
        "a continuous writer stages each group of segments over the one before",
        "continuous/connectors/queue.py",
        "queue, attempt, group, staged, durable=False)\n",
        "queue, attempt, group, 0, durable=False)\n",
    ),
    Fault(
        "partitions beyond the number of tasks are read by nobody",
        "continuous/driver/runs.py",
        "partitions[task::tasks]",
        "partitions[task : task + 1]",
    ),
    # Sources and sinks of micro-batches.
    Fault(
        "a repeated micro-batch is cut into tasks as the options say by now",
        "spark/stream_reader.py",
        "        rows = batch.rows_per_task or self._options.rows_per_task\n",
        "        rows = self._options.rows_per_task\n",
    ),
    Fault(
        "a query without a consumer resumes in a queue that was recreated",
        "spark/stream_reader.py",
        "            last.require(self._store().uuid, queue.name, None, queue.generation)\n",
        "",
        without=TIMES_OF_ROWS,
    ),
    Fault(
        "a new checkpoint starts with the first row, wherever the consumer stands",
        "spark/ranges.py",
        "    if options.consumer is not None:\n        registration",
        "    if options.consumer is not None and options.starting_offsets is not None:\n        registration",
    ),
    Fault(
        "a queue that ends before the offset of its checkpoint is read on",
        "commit/offsets.py",
        "        if len(self.end) <= len(ends) and all(at <= end for at, end in zip(self.end, ends, strict=False)):\n",
        "        if len(self.end) <= len(ends):\n",
        without=TIMES_OF_ROWS,
    ),
    Fault(
        "tasks that follow one another share a row",
        "spark/ranges.py",
        "[Range(partition, *cut) for cut in pairwise",
        "[Range(partition, max(first, cut[0] - 1), cut[1]) for cut in pairwise",
    ),
    Fault(
        "a task has only the first of the partitions that share it",
        "spark/ranges.py",
        "            tasks[-1].append(piece)\n",
        "            pass\n",
    ),
    Fault(
        "a page leaves out what it did not reach of a range",
        "store/log/reading.py",
        "                at += rows[-1].end_index >= asked.end\n",
        "                at += 1\n",
    ),
    Fault(
        "a repeated micro-batch has as many tasks as the options say by now",
        "spark/stream_reader.py",
        "rows, batch.max_tasks)\n",
        "rows, self._options.max_tasks)\n",
    ),
    Fault(
        "a micro-batch of at-least-once is not entered in the ledger",
        "spark/queue_writers.py",
        "            self._note_batch(wrote, batchId)\n",
        "            pass\n",
    ),
    Fault(
        "a task stages each group of segments over the one before",
        "spark/queue_writers.py",
        "self._queue, attempt, group, count)\n",
        "self._queue, attempt, group, 0)\n",
    ),
    # The log of a queue: appends, reads, trims and merges.
    Fault(
        "a read goes on to the end of its last segment",
        "store/log/reading.py",
        "max(asked.start, row.start_index), min(asked.end, row.end_index)\n",
        "max(asked.start, row.start_index), row.end_index\n",
    ),
    Fault(
        "a read skips rows that were trimmed although it is to fail",
        "store/log/reading.py",
        '                    if self._on_lost == "fail":\n',
        "                    if False:\n",
    ),
    Fault(
        "a trim takes segments that reach beyond it",
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
        "a trim goes beyond the newest row",
        "store/log/trim.py",
        "        min(wanted, record.next_index, _consumers_bound(",
        "        min(wanted, _consumers_bound(",
    ),
    Fault(
        "a trim takes every owner for dead",
        "queue/maintenance.py",
        "            return tx.owner_alive(owner_name(database.uuid, consumer, queue.queue_id))\n",
        "            return False\n",
    ),
    Fault(
        "a merge replaces segments that somebody else has replaced",
        "store/log/compact.py",
        "    if list(map(_identity, present)) != list(map(_identity, old)):\n        return False\n",
        "",
    ),
    Fault(
        "a merge reverses the order of segments",
        "store/log/compact.py",
        "    segment = Segment(run.partition, pa.concat_batches(batches), width)\n",
        "    segment = Segment(run.partition, pa.concat_batches(batches[::-1]), width)\n",
    ),
    Fault(
        "a merge does not lock its partition",
        "store/log/compact.py",
        "    lock_partition(tx, queue, new.partition)\n    present",
        "    present",
    ),
    # Growth, producers, and consumers of programs.
    Fault(
        "a queue that grows does not tell its partitions",
        "store/records/catalog.py",
        '    tx.run("set_total", queue_id=queue.queue_id, total=total)\n',
        "",
    ),
    Fault(
        "a queue grows without the locks of its partitions",
        "queue/evolution.py",
        "        catalog.lock_partitions(tx, current)\n",
        "",
    ),
    Fault(
        "keys that come while a queue grows are not remembered",
        "queue/evolution.py",
        "            _remember(tx, current, _gather(_Inside(database, tx), current, seen.copy(), upto)[0])\n",
        "            _remember(tx, current, seen)\n",
    ),
    Fault(
        "a queue that grows forgets where its keys are",
        "queue/evolution.py",
        "        if current.key:\n            _remember(",
        "        if current.key and count > MAX_PARTITIONS:\n            _remember(",
    ),
    Fault(
        "consumers have no position in partitions that were added",
        "queue/evolution.py",
        "        consumers.add_partition_positions(tx, registrations, current.partitions, total)\n",
        "",
    ),
    Fault(
        "a key goes to the partition that it had before the last growth, not before the first",
        "queue/placement.py",
        "        for home in reversed(self.homes):\n",
        "        for home in self.homes:\n",
    ),
    Fault(
        "an append that met a growth keeps the old placement",
        "queue/queue.py",
        "lambda tx: catalog.reread(tx, self._record), write=False)\n        self._placed = None\n",
        "lambda tx: catalog.reread(tx, self._record), write=False)\n",
    ),
    Fault(
        "the last append of a producer session is not taken for a repeat",
        "queue/producer.py",
        "            repeated = number <= self._locked_sequence(",
        "            repeated = number < self._locked_sequence(",
    ),
    Fault(
        "a producer session stores its sequence in a transaction before that of the rows",
        "queue/producer.py",
        "        appended = self._queue.append_with(rows, partition, around=once, idempotent=True)\n",
        "        self._database.run(lambda tx: once(tx, lambda: Appended({})))\n        appended = self._queue.append_with(\n            rows, partition, around=lambda tx, append: Appended({}) if repeated else append(), idempotent=True\n        )\n",
    ),
    Fault(
        "a producer session that is fenced appends",
        "store/sql/common.sql",
        "where queue_id = :queue_id and session = :session and epoch = :epoch and owner = :owner\nreturning sequence;",
        "where queue_id = :queue_id and session = :session\nreturning sequence;",
    ),
    Fault(
        "a producer session that is opened again has forgotten its sequence",
        "store/sql/common.sql",
        "do update set epoch = p.epoch + 1, owner = excluded.owner\n",
        "do update set epoch = p.epoch + 1, owner = excluded.owner, sequence = -1\n",
    ),
    Fault(
        "a program moves a consumer without compare-and-set",
        "store/sql/common.sql",
        "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index = :old;\n",
        "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and (next_index = :old or :safe = :new);\n",
    ),
    Fault(
        "a program moves a consumer that a query owns",
        "queue/consumer.py",
        '            self.refuse_when_owned(tx, registration, "move")\n',
        "",
    ),
    # Tables.
    Fault(
        "an attempt that was not acknowledged is put into the table all the same",
        "tables/sql/staging.py",
        "        rows = [row for row in staged if row.batch_id == self.batch_id and row.attempt in attempts]\n        if len(rows) != sum(attempts.values()):\n",
        "        rows = [row for row in staged if row.batch_id == self.batch_id]\n        if len(rows) < sum(attempts.values()):\n",
    ),
    Fault(
        "a table does not miss staged rows that are gone",
        "tables/sql/staging.py",
        "        if len(rows) != sum(attempts.values()):\n            raise self.rows_gone()\n",
        "",
    ),
    Fault(
        "a replay puts what it has staged into the table again",
        "tables/sql/writer.py",
        "    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:\n        self.stage.drop(tx)\n",
        "    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:\n        self.write(tx, dict(batch.attempts))\n",
    ),
    Fault(
        "a table's micro-batch is entered in the ledger in another transaction than its rows",
        "tables/sql/writer.py",
        '        if self.guarantee == "at_least_once":\n            store.database.run(',
        '        if self.guarantee != "idempotent":\n            store.database.run(',
    ),
    Fault(
        "a table's epoch is entered in the ledger in another transaction than its rows",
        "tables/continuous.py",
        '            self.commits.commit(TableTarget(layout, self.name, "append", stage), epoch, offset)\n',
        '            target = TableTarget(layout, self.name, "append", stage)\n            open_store(self.url).database.run(\n                lambda tx: target.write(tx, dict(epoch.attempts)), idempotent=True\n            )\n            self.commits.note(target.ledger_name, epoch, offset)\n',
    ),
    Fault(
        "rows that a task holds are not staged when their epoch ends",
        "continuous/connectors/staging_writer.py",
        "    def end(self, epoch: int) -> dict[str, int]:\n        self._stage(epoch)\n",
        "    def end(self, epoch: int) -> dict[str, int]:\n",
    ),
    Fault(
        "rows that a task has staged are staged again",
        "continuous/connectors/staging_writer.py",
        "        held, self._held, self._rows, self._bytes = self._held, [], 0, 0\n",
        "        held = self._held\n",
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
        "    if covers and before_covers and before_covers != covers:\n",
        "    if covers and before_covers and False:\n",
    ),
    Fault(
        "an epoch that was begun with other rows stands in the way of the one that the sink has",
        "continuous/driver/checkpoint_log.py",
        "offset, passed, instead=found, committed=committed)\n",
        "offset, passed)\n",
    ),
    Fault(
        "an epoch that another owner has committed with the same rows is taken for one's own",
        "commit/protocol.py",
        "        if source.unplanned:\n            require_owner(",
        "        if False:\n            require_owner(",
    ),
    Fault(
        "the ledger forgets the offset of the epoch before the newest one",
        "store/records/ledger.py",
        "    last = key.batch_id - 2\n",
        "    last = key.batch_id - 1\n",
    ),
    Fault(
        "a checkpoint that follows lacks the offset before the last one",
        "continuous/driver/checkpoint_follower.py",
        "            for number, offset in epochs[:-1]:\n",
        "            for number, offset in []:\n",
    ),
    Fault(
        "the checkpoint follows where nothing else tells that another driver has taken over",
        "continuous/driver/committed_epochs.py",
        "sink.keeps_offsets and source.advanced_by_sink and not limited\n",
        "sink.keeps_offsets and not limited\n",
    ),
    Fault(
        "dropping a queue locks its partitions before what is staged for it",
        "store/records/catalog.py",
        '    staged = tx.all("delete_queue_staged", queue_id=queue.queue_id)\n',
        '    lock_partitions(tx, queue)\n    staged = tx.all("delete_queue_staged", queue_id=queue.queue_id)\n',
    ),
    Fault(
        "a restored queue that has grown again passes for the one that was read",
        TIMES_OF_ROWS.file,
        TIMES_OF_ROWS.text,
        TIMES_OF_ROWS.instead,
    ),
    Fault(
        "a task does not notice that its rows were replaced after they were planned",
        "spark/queue_readers.py",
        "        if task.last:\n",
        "        if False:\n",
        without=TIMES_OF_ROWS,
    ),
    Fault(
        "the generation of a registration is the time, whatever there was before",
        "store/records/consumers.py",
        "    return int(row.last_generation)\n",
        "    return tx.now()\n",
    ),
    Fault(
        "a table's staging is cleared whenever writers are made",
        "tables/continuous.py",
        "        layout = self._known.layout\n        open_store",
        "        self.clear()\n        layout = self._known.layout\n        open_store",
    ),
    Fault(
        "objects that were begun long ago are entered",
        "store/log/payloads.py",
        "    if any(row.created_at - oldest > ORPHAN_AGE // 2 for row in entered):\n",
        "    if False:\n",
    ),
    Fault(
        "old objects are deleted whether the store has them or not",
        "store/log/object_cleaning.py",
        "    return [each for each in old if each.name not in names]\n",
        "    return old\n",
    ),
    Fault(
        "objects without payloads are deleted at once",
        "store/log/object_cleaning.py",
        """        return tx.all("delete_unused", queue_id=folder.queue_id, before=before, most=AT_ONCE)""",
        """        return tx.all("delete_unused", queue_id=folder.queue_id, before=tx.now(), most=AT_ONCE)""",
    ),
    Fault(
        "only the first object of an append is entered",
        "store/log/payloads.py",
        "    made = list({each.object_id: each for each in objects}.values())\n",
        "    made = list({each.object_id: each for each in objects}.values())[:1]\n",
    ),
]
