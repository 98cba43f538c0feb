"""Groups of batches that arrive from Spark while earlier ones are being written.

Each write has a fixed cost, such as a round trip to a server and a flush of its log. So a writer that wrote
each batch separately would fall behind a busy source. A writer that writes all waiting batches at once keeps
up, like a database with group commit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa


class ArrivingBatches(Iterator[list[pa.RecordBatch]]):
    """Iterator over groups of batches: each group has all batches that arrived since the last one.

    A thread collects batches until ``max_bytes`` of them wait. An error of ``batches`` is raised after the
    batches before it.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], max_bytes: int) -> None:
        self._batches, self._max_bytes = batches, max_bytes
        self._changed = threading.Condition()
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._ended = self._closed = False
        self._failure: BaseException | None = None
        # A daemon, since a task that fails may end while the thread still waits for Spark.
        threading.Thread(target=self._collect, name="arriving batches", daemon=True).start()

    def _collect(self) -> None:
        try:
            for batch in self._batches:
                with self._changed:
                    self._changed.wait_for(lambda: self._pending_bytes < self._max_bytes or self._closed)
                    if self._closed:
                        return
                    self._pending.append(batch)
                    self._pending_bytes += batch.nbytes
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def __next__(self) -> list[pa.RecordBatch]:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._ended)
            group, self._pending, self._pending_bytes = self._pending, [], 0
            self._changed.notify_all()
            if not group:
                if self._failure is not None:
                    raise self._failure
                raise StopIteration
        return group

    def close(self) -> None:
        """Let the thread end when it gets the next batch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
