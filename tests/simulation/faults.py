"""Faults that somebody could bring into the protocol, each of which the simulation has to find.

A fault is a text that occurs once in a file of ``src/penstock``, and what stands in its place: a missing check, a swapped order, a lost
lock, an ignored epoch. ``python -m tests.simulation.fault_run`` applies them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change that breaks something."""

    name: str
    file: str
    text: str
    instead: str


def _of(file: str, *changes: tuple[str, str, str]) -> list[Fault]:
    return [Fault(name, file, text, instead) for name, text, instead in changes]


OWNERS = _of(
    "commit/owner.py",
    (
        "an owner that was overtaken is not refused",
        "if registration.epoch != self.epoch:",
        "if registration.epoch < self.epoch:",
    ),
    (
        "a generation that has changed while the query ran is not noticed",
        "if registration.generation != self.generation:",
        "if False:",
    ),
    (
        "taking over does not raise the epoch",
        'owned = tx.one("own_registration", **self._find(tx, lock=True).keys)',
        "owned = self._find(tx, lock=True)",
    ),
    (
        "an offset of another generation is taken for this one's",
        "logged.require(self._store_uuid, self.queue, self.consumer, registration.generation)",
        "pass",
    ),
    (
        "what Spark has logged never becomes safe",
        "if not logged.empty and any(have < wanted for have, wanted in zip(safe, logged.end, strict=False)):",
        "if False:",
    ),
    (
        "a consumer that is behind its checkpoint follows it anyhow",
        "        if _ahead(tx, registration, logged):\n            raise",
        "        if False:\n            raise",
    ),
    (
        "a consumer is ahead of any checkpoint but the planned one",
        "return ahead and registration.plan != plan_text(logged)",
        "return ahead",
    ),
    (
        "a repeated micro-batch is planned wherever the consumer stands",
        "if not _follows(tx, registration, end):",
        "if False:",
    ),
    (
        "a micro-batch may only follow where the consumer stands",
        "if planned is not None and (planned == end or pad(planned.end, len(end.start)) == end.start):\n        return True",
        "if False:\n        return True",
    ),
    (
        "the plan in flight is not stored",
        'tx.run("open_plan", epoch=self.epoch, plan=plan_text(end), **registration.keys)',
        "pass",
    ),
    (
        "a consumer follows its sink from wherever it stands",
        "if same and offsets == begins and planned and pad(planned.start, len(offsets)) == begins:",
        "if same:",
    ),
    (
        "a consumer never follows its sink after a crash",
        "if same and offsets == begins and planned and pad(planned.start, len(offsets)) == begins:",
        "if False:",
    ),
    (
        "a query drains whoever owns its consumer",
        "if epoch == registration.epoch:",
        "if True:",
    ),
    (
        "the safe offset is that of the start",
        "for partition, index in enumerate(logged.end):",
        "for partition, index in enumerate(logged.start):",
    ),
)

COMMITS = _of(
    "commit/batch.py",
    (
        "a replay is published again",
        "    if before is not None:\n        _same(batch, before.ranges)\n        _settle(tx, batch, locked)\n        return None\n",
        "    if before is not None:\n        _same(batch, before.ranges)\n",
    ),
    (
        "a replay with other input passes for the same",
        "        _same(batch, before.ranges)\n",
        "",
    ),
    (
        "a sink takes a micro-batch without the one before",
        "    refuse_gap(tx, batch.key, new_sink=batch.new_sink)\n    _check_tasks",
        "    _check_tasks",
    ),
    (
        "an idempotent task takes a micro-batch without the one before",
        "    if before is None:\n        refuse_gap(tx, key, new_sink=new_sink)\n        return False",
        "    if before is None:\n        return False",
    ),
    (
        "at least once notices no gap",
        "        if ledger.enter(tx, key, json.dumps([origin, []]), rows, logged) is None:\n            refuse_gap(tx, key, new_sink=new_sink)\n",
        "        if ledger.enter(tx, key, json.dumps([origin, []]), rows, logged) is None:\n",
    ),
    (
        "a gap is a gap in any checkpoint, the first micro-batch included",
        "if not key.batch_id or ledger.find(tx, key.before) is not None:",
        "if ledger.find(tx, key.before) is not None:",
    ),
    (
        "the consumers of a micro-batch do not move",
        "        move_consumer(tx, batch, source, registration)\n",
        "        pass\n",
    ),
    (
        "the marks of other stores do not move",
        "            move_mark(tx, batch, source)\n",
        "            pass\n",
    ),
    (
        "the sources of a micro-batch are not locked",
        "locked = [(source, lock_consumer(tx, source)) for source in moved if source.store == store_uuid]",
        "locked = []",
    ),
    (
        "what a replay has staged is published with the next micro-batch",
        "    batch.sink.discard(tx, batch)\n",
        "",
    ),
    (
        "an idempotent task that is repeated appends again",
        "        if key is not None and _appended_before(tx, key, origin, rows, new_sink):\n            return None\n",
        "",
    ),
    (
        "an idempotent task does not look whether its micro-batch is committed",
        "    if ledger.find(tx, key.whole) is not None:\n        return True\n",
        "",
    ),
    (
        "rows of an idempotent task are placed as they were before the queue grew",
        "        catalog.require_unchanged(tx, sink)\n        return appended",
        "        return appended",
    ),
    (
        "the ledger row is written in a transaction of its own, first",
        "published = database.run(lambda tx: _commit(tx, store_uuid, batch), idempotent=True)",
        "entered = database.run(lambda tx: ledger.enter(tx, batch.key, batch.ranges(), batch.rows, batch.logged))\n"
        "    if entered is not None:\n        return None\n"
        "    database.run(lambda tx: tx.run('prune_ledger', sink=batch.key.sink, app_id=batch.app_id, batch_id=batch.batch_id + 1))\n"
        "    published = database.run(lambda tx: _commit(tx, store_uuid, batch), idempotent=True)",
    ),
    (
        "the ledger remembers the micro-batch before instead",
        "return json.dumps" if False else "ledger.prune(tx, batch.key)\n    return published",
        'tx.run("prune_ledger", sink=batch.key.sink, app_id=batch.app_id, batch_id=batch.batch_id + 1)\n    return published',
    ),
)

MOVES = _of(
    "commit/moves.py",
    (
        "a micro-batch that nobody has planned is committed",
        "    _require_planned(batch, source, registration)\n    _bind",
        "    _bind",
    ),
    (
        "a plan of an earlier owner is as good as an open one",
        "if not registration.plan_open or registration.plan != planned:",
        "if registration.plan != planned:",
    ),
    (
        "a micro-batch without rows is committed wherever the consumer stands",
        "        _require_there(tx, source, registration)\n",
        "",
    ),
    (
        "a micro-batch of another generation moves the consumer",
        "    source.require(source.store, registration.queue, registration.consumer, registration.generation)\n",
        "",
    ),
    (
        "a consumer moves over the first partition alone",
        "    for partition, (old, new) in enumerate(zip(source.start, source.end, strict=True)):\n        if old != new:\n            _advance",
        "    for partition, (old, new) in enumerate(zip(source.start[:1], source.end[:1], strict=True)):\n        if old != new:\n            _advance",
    ),
    (
        "the plan stays open behind its commit",
        '            _advance(tx, source, registration, partition)\n    tx.run("close_plan", **registration.keys)\n',
        "            _advance(tx, source, registration, partition)\n",
    ),
    (
        "an older generation is not fenced in the sink's store",
        "    _fence_mark(tx, batch, source, name)\n",
        "",
    ),
    (
        "a newer generation finds the marks of the older one",
        '        tx.run("delete_marks", source=name)\n',
        "        pass\n",
    ),
    (
        "a mark moves from wherever it is",
        '"advance_mark", old=old, new=new, **where',
        '"advance_mark", old=found, new=new, **where',
    )
    if False
    else (
        "a mark that stands elsewhere is no conflict",
        "            raise _mark_conflict(tx, batch, source, name, partition)",
        "            pass",
    ),
    (
        "a mark ends where the micro-batch begins",
        'tx.run("insert_mark", next_index=new, **where)',
        'tx.run("insert_mark", next_index=old, **where)',
    ),
)

OFFSETS = _of(
    "commit/offsets.py",
    (
        "an offset forgets how many rows a task reads",
        '            value.get("rowsPerTask"),\n',
        "            None,\n",
    ),
    (
        "a source without new rows comes with the range of the micro-batch before",
        "covered = _at_end(offset) if offset in earlier else offset",
        "covered = offset",
    ),
    (
        "a partition that was added begins at its second row",
        "return (*offsets, *[0] * (length - len(offsets)))",
        "return (*offsets, *[1] * (length - len(offsets)))",
    ),
)

STAGING = _of(
    "store/staging.py",
    (
        "attempts that nobody has acknowledged are promoted too",
        "rows = [row for row in staged if row.batch_id == batch_id and row.attempt in attempts]\n    if len(rows) != sum(attempts.values()):\n        raise CommitRefused",
        "rows = [row for row in staged if row.batch_id == batch_id]\n    if len(rows) < sum(attempts.values()):\n        raise CommitRefused",
    ),
    (
        "staged rows that are gone are not missed",
        "    if len(rows) != sum(attempts.values()):\n        raise CommitRefused",
        "    if False:\n        raise CommitRefused",
    ),
    (
        "what earlier micro-batches have staged is promoted with this one",
        "rows = [row for row in staged if row.batch_id == batch_id and row.attempt in attempts]",
        "rows = [row for row in staged if row.attempt in attempts]",
    ),
    (
        "segments are promoted in the order of their attempts",
        "rows.sort(key=lambda row: (row.partition, row.task, row.attempt, row.ordinal))",
        "rows.sort(key=lambda row: (row.partition, row.attempt, row.ordinal))",
    ),
    (
        "segments of an attempt are promoted backwards",
        "rows.sort(key=lambda row: (row.partition, row.task, row.attempt, row.ordinal))",
        "rows.sort(key=lambda row: (row.partition, row.task, row.attempt, -row.ordinal))",
    ),
    (
        "promoted rows are placed although the queue has grown",
        "    appended = publish(tx, queue, places, [row.payload_id for row in rows], allocate_payloads(tx, 1)[0])\n    require_unchanged(tx, queue)\n",
        "    appended = publish(tx, queue, places, [row.payload_id for row in rows], allocate_payloads(tx, 1)[0])\n",
    )
    if False
    else (
        "payloads that were promoted are dropped",
        "drop_payloads(tx, [row.payload_id for row in staged if row.payload_id not in kept])",
        "drop_payloads(tx, [row.payload_id for row in staged if row.payload_id in kept])",
    ),
    (
        "a repeated staging call stages twice",
        '    before = tx.all("delete_staged_from", ordinal=ordinal, **key)\n    drop_payloads(tx, [row.payload_id for row in before])\n',
        "    ordinal += len(tx.all('count_staged', **key)) if False else 0\n",
    )
    if False
    else (
        "the ordinals of an attempt begin anew with each write",
        '"ordinal": ordinal + number,',
        '"ordinal": number,',
    ),
    (
        "a sweep takes what running queries have staged",
        "running = _running(tx, store_uuid) if old or aged else set()",
        "running: set[str] = set()",
    ),
)

LOG = _of(
    "store/log.py",
    (
        "rows are placed although the queue has got more partitions",
        "if queue.key and row.total != queue.partitions:",
        "if False:",
    ),
    (
        "the rows of an append overlap by one",
        "        start += rows\n    return places",
        "        start += max(rows - 1, 1)\n    return places",
    ),
    (
        "a read that lost rows goes on without them",
        '            if on_lost == "fail":\n                raise lost',
        "            if False:\n                raise lost",
    ),
    (
        "a read leaves out the first row of a segment that it begins in",
        "    offset = max(position - row.start_index, 0)\n",
        "    offset = min(max(position - row.start_index, 0) + (position > row.start_index), row.end_index - row.start_index - 1)\n",
    ),
    (
        "a read goes on behind the end of its range",
        "length = min(end, row.end_index) - row.start_index - offset",
        "length = row.end_index - row.start_index - offset",
    ),
)

TRIM = _of(
    "store/trim.py",
    (
        "trimming does not wait for vital consumers",
        "        bounds.append(int(vital))\n",
        "        pass\n",
    ),
    (
        "trimming does not lock the partition",
        "record = lock_partition(tx, queue, partition)\n    wanted",
        "record = next(p for p in __import__('penstock.store.catalog', fromlist=['x']).partitions(tx, queue) if p.partition == partition)\n    wanted",
    )
    if False
    else (
        "trimming takes a row too many",
        "        _cut(tx, queue, partition, bound)\n",
        "        _cut(tx, queue, partition, min(bound + 1, record.next_index))\n",
    ),
    (
        "a trimmed partition begins at the row before",
        "        first_index=bound,\n",
        "        first_index=bound - 1,\n",
    ),
)

MERGE = _of(
    "store/merge.py",
    (
        "a merge does not look whether its segments are still there",
        "    if [row.payload_id for row in present] != [row.payload_id for row in old]:\n        return False\n",
        "",
    ),
    (
        "merged rows come in another order",
        "    batch = pa.concat_batches(batches)\n",
        "    batch = pa.concat_batches(batches[::-1])\n",
    ),
    (
        "a merge leaves the old segments where they are",
        '    tx.many("delete_segment", [{"end_index": row.end_index, **where} for row in old])\n    tx.run(\n        "insert_segment",',
        '    tx.many("delete_segment", [{"end_index": row.end_index, **where} for row in old[1:]])\n    tx.run(\n        "insert_segment",',
    ),
)

QUEUES = [
    *_of(
        "store/consumers.py",
        (
            "a seek does not turn older checkpoints away",
            '    tx.run("next_generation", **registration.keys)\n',
            "    pass\n",
        ),
        (
            "a consumer is found, and not locked",
            '"lock_registration" if lock and tx.write else "find_registration", consumer=consumer, queue=queue',
            '"find_registration", consumer=consumer, queue=queue',
        ),
        (
            "partitions that are added have no position",
            "            for partition in range(first, last)\n",
            "            for partition in range(first + 1, last)\n",
        ),
    ),
    *_of(
        "store/catalog.py",
        (
            "a queue that was recreated is taken for the old one",
            "    if now.queue_id != queue.queue_id:\n        raise CommitRefused(",
            "    if False:\n        raise CommitRefused(",
        )
        if False
        else (
            "partitions do not learn that there are more of them",
            '    tx.run("set_total", queue_id=queue.queue_id, total=total)\n',
            "",
        ),
    ),
    *_of(
        "store/producers.py",
        (
            "a producer does not remember what it has appended",
            '    tx.run("set_sequence", queue_id=session.queue_id, session=session.session, sequence=sequence)\n',
            "    pass\n",
        ),
    ),
    *_of(
        "queue/producer.py",
        (
            "a repeat of the last append is appended again",
            "repeated = number <= producers.lock_session(tx, self._session)",
            "repeated = number < producers.lock_session(tx, self._session)",
        ),
    ),
    *_of(
        "queue/growth.py",
        (
            "a queue that grows forgets which keys it has",
            "            _remember(tx, current, _gather(_Inside(tx), current, seen.copy(), upto)[0])\n",
            "            pass\n",
        ),
        (
            "keys that came while a queue grew are forgotten",
            "_remember(tx, current, _gather(_Inside(tx), current, seen.copy(), upto)[0])",
            "_remember(tx, current, seen.copy())",
        ),
        (
            "a queue grows without the locks of its partitions",
            "        catalog.lock_partitions(tx, current)\n        if current.key:",
            "        if current.key:",
        ),
        (
            "consumers do not get the partitions that were added",
            "        consumers.add_partition_positions(tx, registrations, current.partitions, total)\n",
            "",
        ),
    ),
    *_of(
        "queue/placement.py",
        (
            "keys that were there before a growth move",
            "        for home in reversed(self.homes):\n",
            "        for home in ():\n",
        ),
    ),
    *_of(
        "queue/queue.py",
        (
            "an append that met a growth is placed as before",
            "                self.refresh()\n        raise StoreError",
            "                self._record = self._database.run(lambda tx: catalog.reread(tx, self._record), write=False)\n"
            "                self._placed = (self._record, self._current_placement()[1])\n        raise StoreError",
        ),
    ),
]

SQL = _of(
    "store/sql/common.sql",
    (
        "an offset moves without compare-and-set",
        "-- name: advance_position\nupdate penstock.position set next_index = :new\nwhere consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index = :old;",
        "-- name: advance_position\nupdate penstock.position set next_index = :new\nwhere consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index >= 0 * :old;",
    ),
    (
        "a mark moves without compare-and-set",
        "where source = :source and partition = :partition and next_index = :old;",
        "where source = :source and partition = :partition and next_index >= 0 * :old;",
    ),
    (
        "the lock of a producer session ignores the epoch",
        "where queue_id = :queue_id and session = :session and epoch = :epoch\nreturning sequence;",
        "where queue_id = :queue_id and session = :session and epoch >= 0 * :epoch\nreturning sequence;",
    ),
    (
        "a new owner keeps the mark of a drain",
        "set epoch = epoch + 1, plan_epoch = null, draining = 0",
        "set epoch = epoch + 1, plan_epoch = null",
    ),
    (
        "staging of later micro-batches is taken with an earlier one",
        "delete from penstock.staged where app_id = :app_id and batch_id <= :batch_id and queue_id = :queue_id",
        "delete from penstock.staged where app_id = :app_id and batch_id >= 0 * :batch_id and queue_id = :queue_id",
    ),
)

SPARK = [
    *_of(
        "spark/stream_reader.py",
        (
            "the reader does not ask whether the queue has reached an offset",
            "        require_reached(began, there)\n        if self",
            "        if self",
        ),
        (
            "a repeated micro-batch is divided as the options say now",
            "rows = batch.rows_per_task or self._options.rows_per_task",
            "rows = self._options.rows_per_task",
        ),
        (
            "a micro-batch is not planned with the owner",
            "            owner.plan(batch)\n",
            "            pass\n",
        ),
        (
            "a drained reader plans more",
            "        if draining:\n            return start\n",
            "",
        ),
        (
            "trimmed rows are passed over although data loss is to fail",
            "        if self._options.fail_on_data_loss:\n            still_there",
            "        if False:\n            still_there",
        ),
        (
            "a queue without a consumer may be another one by now",
            "            began.require(self._store().uuid, queue.name, None, queue.generation)\n",
            "",
        ),
        (
            "rows are read from the start of the queue again",
            "        end = self._next_end(queue, there, began.end, left)\n",
            "        end = self._next_end(queue, there, began.start, left)\n",
        ),
    ),
    *_of(
        "spark/stream_writer.py",
        (
            "rows in the wrong partition are committed",
            "        self._require_placed(wrote)\n",
            "",
        ),
        (
            "at least once enters nothing in the ledger",
            "            self._note_batch(wrote, batchId)\n",
            "            pass\n",
        ),
        (
            "an exactly-once task appends as it goes",
            "            wrote = writer.stage(app_id, stream.batch_id, iterator)\n",
            "            wrote = writer.append(iterator)\n            wrote = replace(wrote, segments=0)\n",
        ),
    ),
    *_of(
        "spark/positions.py",
        (
            "an offset past the end of its queue passes",
            "    if len(offset.end) <= len(ends) and all(at <= end for at, end in zip(offset.end, ends, strict=False)):\n        return",
            "    if True:\n        return",
        ),
    ),
    *_of(
        "spark/admission.py",
        (
            "the last row of a range belongs to no task",
            "tasks.append([partition, low, first + (last - first) * (piece + 1) // pieces])",
            "tasks.append([partition, low, first + (last - first) * (piece + 1) // pieces - (piece and 1)])",
        ),
    ),
    *_of(
        "pipeline/micro_batches.py",
        (
            "a query is drained by an epoch that it only expects",
            "            if expected.get((each.queue, str(each.consumer))) == each.epoch\n",
            "            if (each.queue, str(each.consumer)) in expected\n",
        ),
    ),
]

CONTINUOUS = [
    *_of(
        "continuous/execution.py",
        (
            "an epoch is logged before the sink has it",
            "        self._sink.commit(run.sink, epoch, offset)\n        self._logs.write_offset(epoch.number, offset, None if self._limit is None else passed)\n        self._logs.write_commit(epoch.number)\n",
            "        self._logs.write_offset(epoch.number, offset, None if self._limit is None else passed)\n        self._logs.write_commit(epoch.number)\n        self._sink.commit(run.sink, epoch, offset)\n",
        ),
        (
            "an epoch begins where the query began",
            "        self._epoch, self._at, self._offset, self._fresh = epoch.number, end, offset, False\n",
            "        self._epoch, self._offset, self._fresh = epoch.number, offset, False\n",
        ),
        (
            "an epoch is committed to the queue as it is by now",
            "        self._sink.commit(run.sink, epoch, offset)\n",
            "        self._sink.commit(self._sink.sink(), epoch, offset)\n",
        ),
        (
            "a run drops the staging of the one that is at work",
            "            self._sink.sink(),\n            self._settings.backlog,",
            "            (self._sink.clear(), self._sink.sink())[1],\n            self._settings.backlog,",
        ),
        (
            "a run of a queue that has grown ends the query",
            "if isinstance(error, ContinuousFailed | QueueGrown) or not isinstance(error, PenstockError):",
            "if isinstance(error, ContinuousFailed) or not isinstance(error, PenstockError):",
        ),
        (
            "a run begins where the one before began",
            "            coordinator.give(self._epoch + 1, grouped(self._at, run.tasks))\n",
            "            self._first = getattr(self, '_first', None) or dict(self._at)\n"
            "            coordinator.give(self._epoch + 1, grouped({**self._at, **self._first}, run.tasks))\n",
        ),
        (
            "the source is not told of committed epochs",
            "        self._ask_source(offset)\n        self._logs.prune",
            "        self._logs.prune",
        ),
        (
            "a query stops without its last epoch",
            "        self._finish(run)\n        self._end_by_limit()\n",
            "        run.coordinator.finish()\n        self._end_by_limit()\n",
        )
        if False
        else (
            "the epochs of a run begin one too early",
            "            coordinator.give(self._epoch + 1, grouped(self._at, run.tasks))\n",
            "            coordinator.give(max(self._epoch, 0), grouped(self._at, run.tasks))\n",
        ),
    ),
    *_of(
        "continuous/settling.py",
        (
            "a driver does not look at what the sink has",
            "    if found.offset is not None:\n        follow(found.offset)\n",
            "    if False:\n        follow(found.offset)\n",
        ),
        (
            "a sink that is behind its checkpoint passes",
            "if found.number < after - 1 and not (found.number < 0 and sink.may_be_new):",
            "if False:",
        ),
        (
            "an epoch that the sink has is not logged",
            "        if found.number == _after(last):\n            _log(",
            "        if False:\n            _log(",
        ),
        (
            "a micro-batch that Spark has begun is taken for committed",
            "    if found is not None and found.number == begun:\n",
            "    if found is not None:\n",
        ),
        (
            "a micro-batch that Spark has begun stays in the checkpoint",
            "    logs.drop_offset(begun)\n",
            "",
        ),
    ),
    *_of(
        "continuous/logs.py",
        (
            "an entry of the checkpoint is replaced",
            "        except FileExistsError:\n            raise OwnerFenced(",
            "        except FileExistsError:\n            self._delete(name)\n            return self._create(name, text)\n            raise OwnerFenced(",
        ),
    ),
    *_of(
        "continuous/epochs.py",
        (
            "an epoch is complete when its readers are",
            "return self.offsets is not None and (self.rows_in == 0 or self.attempts is not None)",
            "return self.offsets is not None",
        ),
        (
            "an epoch forgets what all but one task have staged",
            "{attempt: count for part in parts for attempt, count in (part.attempts or {}).items()},",
            "{attempt: count for part in list(parts)[:1] for attempt, count in (part.attempts or {}).items()},",
        ),
        (
            "an epoch forgets where all but one task have read to",
            "{partition: end for part in parts for partition, end in (part.offsets or {}).items()},",
            "{partition: end for part in list(parts)[:1] for partition, end in (part.offsets or {}).items()},",
        ),
        (
            "the newest complete epoch is committed first",
            "        number = min(self._open)\n        parts",
            "        number = max(self._open)\n        parts",
        ),
    ),
    *_of(
        "continuous/reader.py",
        (
            "a reader tells its offsets before it has sent its rows",
            "        offsets = {str(partition): end for partition, end in self._source.offsets().items()}\n",
            "        self._source.read(1)\n        offsets = {str(partition): end for partition, end in self._source.offsets().items()}\n",
        ),
        (
            "a reader goes on with the number of the epoch before",
            "        self._epoch, self._told_skipped = number + 1, False\n",
            "        self._epoch, self._told_skipped = number, False\n",
        ),
        (
            "nobody is told of rows that were skipped",
            "                self._tell_skipped()\n",
            "",
        ),
        (
            "a reader that rests reads on",
            "            rows = None if self._resting else self._read()\n",
            "            rows = self._read()\n",
        ),
        (
            "a reader does not tell that its queue has grown",
            "                self._tell_growth()\n",
            "",
        ),
    ),
    *_of(
        "continuous/queues.py",
        (
            "a continuous query fails on lost rows that it may skip",
            'on_lost="fail" if source.fail_on_data_loss else "skip",',
            'on_lost="fail",',
        ),
        (
            "a reader forgets the rows that it has read ahead",
            "                self._held.appendleft(ahead.after(left))\n",
            "",
        ),
        (
            "an attempt of a task counts what it staged from its first epoch on",
            "        staged, self._staged = self._staged, 0\n",
            "        staged = self._staged\n",
        ),
    ),
    *_of(
        "continuous/queue_drivers.py",
        (
            "an epoch is planned for whatever queue has the name",
            "        return self._pinned or self._found()\n",
            "        return self._found()\n",
        ),
        (
            "a run begins behind lost rows, and its epoch too",
            "            still_there(self.options, there, offsets)\n            return dict(enumerate(offsets))\n",
            "            return dict(enumerate(still_there(self.options, there, offsets)))\n",
        ),
        (
            "a run does not ask whether its queue has reached the checkpoint",
            "            require_reached(offset, there)\n",
            "",
        ),
        (
            "a run does not own its consumer anew",
            "            self._let_go()\n            self._owner = Owner(",
            "            if self._owner is None:\n                self._owner = Owner(",
        )
        if False
        else (
            "an epoch is not planned with the owner",
            "            self._owner.plan(offset)\n",
            "            pass\n",
        ),
    ),
]

TABLES = [
    *_of(
        "tables/segment_stage.py",
        (
            "a table takes the rows of attempts that nobody has acknowledged",
            "rows = [row for row in staged if row.batch_id == self.batch_id and row.attempt in attempts]\n        if len(rows) != sum",
            "rows = [row for row in staged if row.batch_id == self.batch_id]\n        if len(rows) < sum",
        ),
        (
            "a table does not miss staged rows that are gone",
            "        if len(rows) != sum(attempts.values()):\n            raise self.swept()\n",
            "",
        ),
        (
            "a table takes what earlier micro-batches have staged",
            "if row.batch_id == self.batch_id and row.attempt in attempts]",
            "if row.attempt in attempts]",
        ),
    ),
    *_of(
        "pipeline/table_driver.py",
        (
            "the staging of a table's epoch is dropped before it is committed",
            "        with nul_refused():\n            self._commits.commit(self._target(epoch.number), epoch, offset)\n",
            "        self.clear()\n        with nul_refused():\n            self._commits.commit(self._target(epoch.number), epoch, offset)\n",
        ),
    ),
    *_of(
        "pipeline/table_tasks.py",
        (
            "rows of a table that are held back come with the next epoch",
            "    def end(self, epoch: int) -> dict[str, int]:\n        self._stage(epoch)\n        staged",
            "    def end(self, epoch: int) -> dict[str, int]:\n        staged",
        ),
        (
            "rows of a table are staged again with the next write",
            "        self._held, self._rows, self._bytes = [], 0, 0\n",
            "        self._rows, self._bytes = 0, 0\n",
        ),
    ),
]

FAULTS: list[Fault] = [
    *OWNERS,
    *COMMITS,
    *MOVES,
    *OFFSETS,
    *STAGING,
    *LOG,
    *TRIM,
    *MERGE,
    *QUEUES,
    *SQL,
    *SPARK,
    *CONTINUOUS,
    *TABLES,
]
