"""Faults of the sources and sinks of micro-batches."""

from __future__ import annotations

from tests.simulation.faults.fault import NO_ROW_TIME_CHECK, Fault

MICRO_BATCHES = [
    Fault(
        "a repeated micro-batch is cut into tasks as the options say by now",
        "spark/stream_reader.py",
        "        rows = batch.rows_per_task or self._options.rows_per_task\n",
        "        rows = self._options.rows_per_task\n",
    ),
    Fault(
        "a query without a consumer resumes in a queue that was recreated",
        "spark/stream_reader.py",
        "            last_offset.require(self._store().uuid, queue.name, None, queue.generation)\n",
        "",
        baseline=NO_ROW_TIME_CHECK,
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
        "        if len(self.end) <= len(ends) and all(\n            offset <= end for offset, end in zip(self.end, ends, strict=False)\n        ):\n",
        "        if len(self.end) <= len(ends):\n",
        baseline=NO_ROW_TIME_CHECK,
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
        "                position += rows[-1].end_index >= requested.end\n",
        "                position += 1\n",
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
        "            self._record_batch(results, batchId)\n",
        "            pass\n",
    ),
    Fault(
        "a task stages each group of segments over the one before",
        "spark/queue_writers.py",
        "self._queue, attempt, group, count)\n",
        "self._queue, attempt, group, 0)\n",
    ),
    Fault(
        "a restored queue that has grown again passes for the one that was read",
        NO_ROW_TIME_CHECK.file,
        NO_ROW_TIME_CHECK.text,
        NO_ROW_TIME_CHECK.replacement,
    ),
    Fault(
        "a task does not notice that its rows were replaced after they were planned",
        "spark/queue_readers.py",
        "        if task.last_row_times:\n",
        "        if False:\n",
        baseline=NO_ROW_TIME_CHECK,
    ),
]
