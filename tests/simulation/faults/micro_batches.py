"""Faults in the sources and sinks of micro-batch queries."""

from __future__ import annotations

from tests.simulation.faults.fault import NO_ROW_TIME_CHECK, Fault

MICRO_BATCHES = [
    Fault(
        "a repeated micro-batch uses the current rows_per_task, not the planned one",
        "spark/stream_reader.py",
        "        rows = batch.rows_per_task or self._options.rows_per_task\n",
        "        rows = self._options.rows_per_task\n",
    ),
    Fault(
        "a query without a consumer resumes reading a recreated queue",
        "spark/stream_reader.py",
        "            last_offset.require(self._store().uuid, queue.name, None, queue.generation)\n",
        "",
        baseline=NO_ROW_TIME_CHECK,
    ),
    Fault(
        "a query with a new checkpoint starts at the first row instead of the consumer's offset",
        "spark/ranges.py",
        "    if options.consumer is not None:\n        registration",
        "    if options.consumer is not None and options.starting_offsets is not None:\n        registration",
    ),
    Fault(
        "a queue that ends before the checkpoint's offset is not refused",
        "commit/offsets.py",
        "        if len(self.end) <= len(ends) and all(\n            offset <= end for offset, end in zip(self.end, ends, strict=False)\n        ):\n",
        "        if len(self.end) <= len(ends):\n",
        baseline=NO_ROW_TIME_CHECK,
    ),
    Fault(
        "consecutive tasks share a row",
        "spark/ranges.py",
        "[Range(partition, *cut) for cut in pairwise",
        "[Range(partition, max(first, cut[0] - 1), cut[1]) for cut in pairwise",
    ),
    Fault(
        "a task reads only the first of its partitions",
        "spark/ranges.py",
        "            tasks[-1].append(piece)\n",
        "            pass\n",
    ),
    Fault(
        "a read skips the rest of a range that does not fit into a page",
        "store/log/reading.py",
        "                position += rows[-1].end_index >= requested.end\n",
        "                position += 1\n",
    ),
    Fault(
        "a repeated micro-batch uses the current max_tasks, not the planned one",
        "spark/stream_reader.py",
        "rows, batch.max_tasks)\n",
        "rows, self._options.max_tasks)\n",
    ),
    Fault(
        "an at-least-once micro-batch is not added to the ledger",
        "spark/queue_writers.py",
        "            self._record_batch(results, batchId)\n",
        "            pass\n",
    ),
    Fault(
        "a micro-batch task overwrites the segments that it staged before",
        "spark/queue_writers.py",
        "self._queue, attempt, group, count)\n",
        "self._queue, attempt, group, 0)\n",
    ),
    Fault(
        "a restored queue is accepted once it has grown past the checkpoint's offset",
        NO_ROW_TIME_CHECK.file,
        NO_ROW_TIME_CHECK.text,
        NO_ROW_TIME_CHECK.replacement,
    ),
    Fault(
        "a task does not notice that its planned rows were replaced",
        "spark/queue_readers.py",
        "        if task.last_row_times:\n",
        "        if False:\n",
        baseline=NO_ROW_TIME_CHECK,
    ),
]
