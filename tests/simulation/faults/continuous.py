"""Faults in continuous queries: the driver, its checkpoint, epochs, readers and writers."""

from __future__ import annotations

from tests.simulation.faults.fault import NO_ROW_TIME_CHECK, Fault

CONTINUOUS = [
    Fault(
        "an epoch is committed to the checkpoint before the sink",
        "continuous/driver/committed_epochs.py",
        "        self._sink.commit(writers, epoch, offset)\n        self.last, self.positions, self.rows = epoch.number, end, self.rows + epoch.rows_out\n        if self._follower is None:\n            self._log(epoch.number, offset)\n        else:\n            self._follower.add(epoch.number, offset)\n",
        "        self.last, self.positions, self.rows = epoch.number, end, self.rows + epoch.rows_out\n        if self._follower is None:\n            self._log(epoch.number, offset)\n        else:\n            self._follower.add(epoch.number, offset)\n            self._follower.flush()\n        self._sink.commit(writers, epoch, offset)\n",
    ),
    Fault(
        "a continuous query does not start a new run when its source grows",
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
        "an uncommitted micro-batch counts as committed when a continuous query starts",
        "continuous/driver/checkpoint_log.py",
        "        and sink_epoch.number == uncommitted\n",
        "        and sink_epoch.number <= uncommitted\n",
    ),
    Fault(
        "the ledger entry of an epoch lacks its offset",
        "continuous/connectors/ledger.py",
        "                rebind=self.rebind,\n                new_sink=self.new_sink,\n                logged=json.dumps(offset),\n",
        "                rebind=self.rebind,\n                new_sink=self.new_sink,\n",
    ),
    Fault(
        "a continuous query resumes reading a recreated queue",
        "continuous/connectors/queue.py",
        "            offset.require(store.uuid, queue.name, self.options.consumer, self._generation(queue))\n",
        "",
        baseline=NO_ROW_TIME_CHECK,
    ),
    Fault(
        "an epoch is planned for any queue that now has the name",
        "continuous/connectors/queue.py",
        "        return self._pinned or _find_queue(self.options)\n",
        "        return _find_queue(self.options)\n",
        baseline=NO_ROW_TIME_CHECK,
    ),
    Fault(
        "an epoch is committed to the current queue, not to the one in which its rows were placed",
        "continuous/connectors/queue.py",
        "        queue = writers.queue\n        if not self.exactly_once:\n",
        "        queue = _find_queue(self.options)\n        if not self.exactly_once:\n",
    ),
    Fault(
        "an epoch starts after the trimmed rows instead of where the previous one ended",
        "continuous/connectors/queue.py",
        "            skip_trimmed(self.options, partitions, offsets)\n            return dict(enumerate(offsets))\n",
        "            return dict(enumerate(skip_trimmed(self.options, partitions, offsets)))\n",
    ),
    Fault(
        "the logged offset of an uncommitted epoch is deleted before its replacement is committed",
        "continuous/driver/committed_epochs.py",
        "        self._begun = self._checkpoint.begun_entries()\n",
        '        for number in self._checkpoint.begun_entries():\n            self._checkpoint._delete(f"offsets/{number}")\n',
    ),
    Fault(
        "an epoch is complete as soon as its readers have reported",
        "continuous/driver/epochs.py",
        "        return self.offsets is not None and (self.rows_in == 0 or self.attempts is not None)\n",
        "        return self.offsets is not None\n",
    ),
    Fault(
        "an epoch has the offsets of its first task only",
        "continuous/driver/epochs.py",
        "        {partition: end for part in parts for partition, end in (part.offsets or {}).items()},\n",
        "        {partition: end for part in [*parts][:1] for partition, end in (part.offsets or {}).items()},\n",
    ),
    Fault(
        "an epoch has the staged segments of its first task only",
        "continuous/driver/epochs.py",
        "{attempt: count for part in parts for attempt, count in (part.attempts or {}).items()},",
        "{attempt: count for part in [*parts][:1] for attempt, count in (part.attempts or {}).items()},",
    ),
    Fault(
        "a run ends before its readers are paused",
        "continuous/driver/coordinator.py",
        "            return len(self._paused) == self.tasks and self.epochs.idle\n",
        "            return self.epochs.idle\n",
    ),
    Fault(
        "rows after an epoch marker are counted in the previous epoch",
        "continuous/tasks.py",
        "        self._epoch = number + 1\n",
        "        self._epoch = number\n",
    ),
    Fault(
        "a paused reader continues reading",
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
        "an epoch marker overtakes rows that the writer has buffered",
        "continuous/tasks.py",
        '        self._flush()\n        self._channel.send("wrote"',
        '        self._channel.send("wrote"',
    ),
    Fault(
        "a catch-up job does not write its last rows",
        "continuous/catch_up.py",
        "    writer.write(epoch)\n    return writer.end(epoch)",
        "    return writer.end(epoch)",
    ),
    Fault(
        "a catch-up job reads the last committed row of each partition again",
        "continuous/driver/execution.py",
        "            partition: offset\n            for partition, offset in self.committed.positions.items()\n            if unread[partition] > 0\n",
        "            partition: max(offset - 1, 0)\n            for partition, offset in self.committed.positions.items()\n",
    ),
    Fault(
        "rows after the last epoch marker of a batch are dropped",
        "continuous/tasks.py",
        "        self._add(_source_rows(batch, kinds, start, batch.num_rows))\n        # Fillers",
        "        # Fillers",
    ),
    Fault(
        "a reader's offsets include the rows that it has read ahead",
        "continuous/connectors/queue.py",
        "        return dict(self._positions)\n",
        "        return {**self._positions, **{ahead.partition: ahead.start + ahead.rows.num_rows for ahead in self._rows_ahead}}\n",
    ),
    Fault(
        "the remainder of a split batch is dropped",
        "continuous/connectors/queue.py",
        "                self._rows_ahead.appendleft(remainder)\n",
        "",
    ),
    Fault(
        "a continuous writer overwrites the segments that it staged before",
        "continuous/connectors/queue.py",
        "queue, attempt, group, staged_parts, durable=False\n",
        "queue, attempt, group, 0, durable=False\n",
    ),
    Fault(
        "each task reads only one of its partitions",
        "continuous/driver/runs.py",
        "partitions[task::tasks]",
        "partitions[task : task + 1]",
    ),
    Fault(
        "buffered rows of a task are not staged when their epoch ends",
        "continuous/connectors/staging_writer.py",
        "    def end(self, epoch: int) -> dict[str, int]:\n        self._stage(epoch)\n",
        "    def end(self, epoch: int) -> dict[str, int]:\n",
    ),
    Fault(
        "a task stages rows again that it has already staged",
        "continuous/connectors/staging_writer.py",
        "        pending, self._pending, self._pending_rows, self._pending_bytes = self._pending, [], 0, 0\n",
        "        pending = self._pending\n",
    ),
    Fault(
        "the checkpoint keeps an uncommitted epoch although the sink has other rows for it",
        "continuous/driver/checkpoint_log.py",
        "offset, rows_passed, replaced_entry=existing, committed=committed)\n",
        "offset, rows_passed)\n",
    ),
    Fault(
        "a checkpoint that is written in the background lacks the second-newest offset",
        "continuous/driver/checkpoint_follower.py",
        "            for number, offset in epochs[:-1]:\n",
        "            for number, offset in []:\n",
    ),
    Fault(
        "the checkpoint is written in the background although only it can detect a takeover",
        "continuous/driver/committed_epochs.py",
        "sink.records_offsets and source.advanced_by_sink and not limited\n",
        "sink.records_offsets and not limited\n",
    ),
]
