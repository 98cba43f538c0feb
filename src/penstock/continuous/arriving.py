"""Take batches from Spark as they arrive, while earlier ones are being written.

Every write takes a certain time whatever its size, such as a round trip to a server and a flush of its log. A
writer that wrote each batch separately would fall behind a busy source. One that writes everything that has
arrived meanwhile in one go keeps up, like a database with group commit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa


class ArrivingBatches(Iterator[list[pa.RecordBatch]]):
    """Iterator over groups of batches, each with all that have arrived since the last group; uses a thread.

    At most ``most_bytes`` and one batch wait. An error of ``batches`` is raised after the batches before it.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], most_bytes: int) -> None:
        self._batches, self._most_bytes = batches, most_bytes
        self._changed = threading.Condition()
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self._ended = self._closed = False
        self._failure: BaseException | None = None
        # A daemon, since a failed task ends while the thread waits for Spark.
        threading.Thread(target=self._take, name="arriving batches", daemon=True).start()

    def _take(self) -> None:
        try:
            for batch in self._batches:
                with self._changed:
                    self._changed.wait_for(lambda: self._bytes < self._most_bytes or self._closed)
                    if self._closed:
                        return
                    self._waiting.append(batch)
                    self._bytes += batch.nbytes
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def __next__(self) -> list[pa.RecordBatch]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            taken, self._waiting, self._bytes = self._waiting, [], 0
            self._changed.notify_all()
            if not taken:
                if self._failure is not None:
                    raise self._failure
                raise StopIteration
        return taken

    def close(self) -> None:
        """Let the thread end when it gets the next batch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
