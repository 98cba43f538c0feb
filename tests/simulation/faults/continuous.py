"""Faults of continuous queries: the driver, its checkpoint, epochs, readers and writers."""

from __future__ import annotations

from tests.simulation.faults.fault import NO_ROW_TIME_CHECK, Fault

CONTINUOUS = [
    Fault(
        "an epoch is in the checkpoint before it is in the sink",
        "continuous/driver/committed_epochs.py",
        "        self._sink.commit(writers, epoch, offset)\n        self.last, self.positions, self.rows = epoch.number, end, self.rows + epoch.rows_out\n        if self._follower is None:\n            self._log(epoch.number, offset)\n        else:\n            self._follower.add(epoch.number, offset)\n",
        "        self.last, self.positions, self.rows = epoch.number, end, self.rows + epoch.rows_out\n        if self._follower is None:\n            self._log(epoch.number, offset)\n        else:\n            self._follower.add(epoch.number, offset)\n            self._follower.flush()\n        self._sink.commit(writers, epoch, offset)\n",
    ),
    Fault(
        "a continuous query does not begin another run when its source grows",
        "continuous/driver/execution.py",
        "return self.stopping or run.coordinator.has_new_partitions or behind",
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
        "        and sink_epoch.number == uncommitted\n",
        "        and sink_epoch.number <= uncommitted\n",
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
        baseline=NO_ROW_TIME_CHECK,
    ),
    Fault(
        "an epoch is planned for whichever queue has the name by now",
        "continuous/connectors/queue.py",
        "        return self._pinned or _find_queue(self.options)\n",
        "        return _find_queue(self.options)\n",
        baseline=NO_ROW_TIME_CHECK,
    ),
    Fault(
        "an epoch is committed to the queue as it is by now, not as its rows were placed",
        "continuous/connectors/queue.py",
        "        queue = writers.queue\n        if not self.exactly_once:\n",
        "        queue = _find_queue(self.options)\n        if not self.exactly_once:\n",
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
        "        self._begun = self._checkpoint.begun_entries()\n",
        '        for number in self._checkpoint.begun_entries():\n            self._checkpoint._delete(f"offsets/{number}")\n',
    ),
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
        '                self._report("sent", not self._statistics.rows and self._source.skipped_rows)\n',
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
        "            partition: offset\n            for partition, offset in self.committed.positions.items()\n            if unread[partition] > 0\n",
        "            partition: max(offset - 1, 0)\n            for partition, offset in self.committed.positions.items()\n",
    ),
    Fault(
        "rows after the last marker of a batch are dropped",
        "continuous/tasks.py",
        "        self._add(_source_rows(batch, kinds, start, batch.num_rows))\n        # Fillers",
        "        # Fillers",
    ),
    Fault(
        "a reader's offsets include what it has read ahead",
        "continuous/connectors/queue.py",
        "        return dict(self._positions)\n",
        "        return {**self._positions, **{ahead.partition: ahead.start + ahead.rows.num_rows for ahead in self._rows_ahead}}\n",
    ),
    Fault(
        "the rest of a batch that was cut is dropped",
        "continuous/connectors/queue.py",
        "                self._rows_ahead.appendleft(remainder)\n",
        "",
    ),
    Fault(
        "a continuous writer stages each group of segments over the one before",
        "continuous/connectors/queue.py",
        "queue, attempt, group, staged_parts, durable=False\n",
        "queue, attempt, group, 0, durable=False\n",
    ),
    Fault(
        "partitions beyond the number of tasks are read by nobody",
        "continuous/driver/runs.py",
        "partitions[task::tasks]",
        "partitions[task : task + 1]",
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
        "        pending, self._pending, self._pending_rows, self._pending_bytes = self._pending, [], 0, 0\n",
        "        pending = self._pending\n",
    ),
    Fault(
        "an epoch that was begun with other rows stands in the way of the one that the sink has",
        "continuous/driver/checkpoint_log.py",
        "offset, rows_passed, replaced_entry=existing, committed=committed)\n",
        "offset, rows_passed)\n",
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
        "sink.records_offsets and source.advanced_by_sink and not limited\n",
        "sink.records_offsets and not limited\n",
    ),
]
